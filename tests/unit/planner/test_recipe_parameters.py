"""The parameters of the ranks of each recipe, against the models that Megatron really builds for them."""

from __future__ import annotations

import json
from functools import cache
from math import prod
from pathlib import Path

import pytest

from megarl.cluster.groups.ranks import worker_class
from megarl.cluster.memory.parameters import ModelParameters
from megarl.config.load import load
from megarl.config.model_schema import Layout
from megarl.megatron.workers.classifier import ClassifierWorker
from megarl.megatron.workers.critic import CriticWorker
from megarl.megatron.workers.reward_model import RewardModelWorker
from megarl.models.classifier import as_classifier
from megarl.models.trained_model import trained_hf_config
from tests.h100_recipes import RECIPES
from tests.paths import BASE, CONFIGS
from tests.published_models import CONFIGS as MODELS
from tests.unit.resharding.megatron_world import real_rank

CASES = {recipe.file: recipe.model for recipe in RECIPES}
CASES |= {recipe: "SmolLM2-135M" for recipe in sorted(CONFIGS.glob("*.yaml")) if recipe != BASE}
"""Recipe -> the model that its language models and its classifiers have the decoder of."""


CLASSIFIERS = (CriticWorker, ClassifierWorker, RewardModelWorker)
"""The workers whose model has a score head in place of a language head."""


@pytest.mark.parametrize("recipe", CASES, ids=lambda recipe: recipe.stem)
def test_planned_ranks_match_real_models(recipe: Path) -> None:
    """Every pipeline stage of every model that runs in Megatron, each with the head that its workers give it. A reward
    model comes with its head, as another recipe has trained it."""
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
    """Returns the parameters of the last rank of each stage, on the meta device. Recipes that share a model and a
    layout share it, so both are JSON."""
    sizes = Layout.model_validate_json(layout)
    ranks = sizes.world_size // sizes.pp
    ends = [(stage + 1) * ranks - 1 for stage in range(sizes.pp)]
    return [sum(map(prod, real_rank(json.loads(hf_config), sizes, rank).shapes.values())) for rank in ends]
