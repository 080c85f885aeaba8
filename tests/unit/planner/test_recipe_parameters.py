"""Parameter counts of each recipe's ranks, compared with the models that Megatron builds."""

from __future__ import annotations

import json
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch

from megarl.cluster.groups.ranks import worker_class
from megarl.cluster.memory.parameters import ModelParameters
from megarl.config.load import load
from megarl.config.model_schema import Layout
from megarl.megatron import parallel
from megarl.megatron.model.build import parameters_of
from megarl.megatron.model.denoiser.build import build_chunks, denoiser_config
from megarl.megatron.workers.classifier import ClassifierWorker
from megarl.megatron.workers.critic import CriticWorker
from megarl.megatron.workers.reward_model import RewardModelWorker
from megarl.models.classifier import as_classifier
from megarl.models.denoiser import is_denoiser
from megarl.models.trained_model import trained_hf_config
from tests.h100_recipes import MODELS, RECIPES
from tests.marks import every_third
from tests.paths import BASE, CONFIGS
from tests.unit.resharding.megatron_world import base_config, real_rank

TINY_FLOW = CONFIGS / "tiny-flow-cpu-flow-grpo.yaml"
"""Recipe for an image model that only a tool creates."""

CASES = {recipe.file: recipe.model for recipe in RECIPES}
CASES |= {recipe: "SmolLM2-135M" for recipe in sorted(CONFIGS.glob("*.yaml")) if recipe not in (BASE, TINY_FLOW)}
"""Recipe -> the model whose layers its models use."""


CLASSIFIERS = (CriticWorker, ClassifierWorker, RewardModelWorker)
"""Workers whose model has a score head in place of the LM head."""


@pytest.mark.parametrize("recipe", every_third(CASES), ids=[recipe.stem for recipe in CASES])
def test_planned_ranks_match_real_models(recipe: Path) -> None:
    """Compares every pipeline stage of every Megatron model, including the head that its worker adds. A reward model
    already has its head, as trained by another recipe."""
    config, published = load(recipe), MODELS[CASES[recipe]]
    for placed in config.all_placed:
        role, layout = placed.section, placed.layout
        kind = config.algorithm.objective.spec.classifier if role == "actor" else None
        is_classifier = issubclass(worker_class(config, role), CLASSIFIERS)
        built = as_classifier(published, kind or "sequence") if is_classifier else published
        model = ModelParameters(built if role == "reward_model" else trained_hf_config(config, role, published))
        planned = [model.of_stage(layout, stage).count for stage in range(layout.pp)]
        assert planned == real_counts(json.dumps(built), layout.model_dump_json()), role


@cache
def real_counts(hf_config: str, layout: str) -> list[int]:
    """Return the parameter count of the last rank of each stage, built on the meta device.

    Both arguments are JSON, so that the cache is shared by recipes with the same model and layout.
    """
    sizes = Layout.model_validate_json(layout)
    ranks = sizes.world_size // sizes.pp
    ends = [(stage + 1) * ranks - 1 for stage in range(sizes.pp)]
    config = json.loads(hf_config)
    if is_denoiser(config):
        return [denoiser_count(config, sizes, rank) for rank in ends]
    return [sum(map(prod, real_rank(config, sizes, rank).shapes.values())) for rank in ends]


def denoiser_count(config: dict, layout: Layout, rank: int) -> int:
    settings = base_config().actor.model_copy(update={"layout": layout})
    with parallel.simulated_rank(layout, rank), torch.device("meta"):
        chunks = build_chunks(denoiser_config(settings, config, torch.float32), config, layout.vpp)
    return sum(parameter.numel() for parameter in parameters_of(chunks).values())
