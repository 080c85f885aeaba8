"""Reward models in vLLM give the same scores as in transformers and Megatron."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from megarl.config.schema import Config
from megarl.rollout.vllm.environment import environment
from tests.distributed.test_reward_model import (
    CLASSES,
    SAMPLES,
    reward_model,  # noqa: F401  a fixture
    rewards_of,
    token_scores,
    write_classifier,
)
from tests.e2e.engine_processes import engine_context
from tests.e2e.test_refit import MODELS
from tests.e2e.tiny_families import SIZES
from tests.marks import exhaustive_but
from tests.parity import config_of
from tests.timing import RUN_S
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow


def config(folder: Path) -> Config:
    overrides = [f"reward_model.path={folder}", "reward_model.tokens_per_microbatch=80"]
    return config_of(folder, *overrides, "reward_model.engine=vllm", "reward_model.kv_cache_gib=0.05")


def in_vllm(folders: Sequence[Path]) -> list[list[list[float]]]:
    """Return each model's scores of SAMPLES. Runs in a separate process."""
    os.environ.update(environment(ranks=1, threads=1, index=0))
    from megarl.rollout.vllm.reward_model import VllmClassifier, classifier_arguments

    # Keep all engines alive, because deleting one would destroy the process group that they share.
    engines = [VllmClassifier(classifier_arguments(config(folder), folder)) for folder in folders]
    return [[scores.tolist() for scores in engine.scores(SAMPLES)] for engine in engines]


def vllm_scores(folders: Sequence[Path]) -> list[list[list[float]]]:
    with ProcessPoolExecutor(1, mp_context=engine_context()) as pool:
        return pool.submit(in_vllm, folders).result(timeout=RUN_S)


@pytest.mark.parametrize("reward_model", exhaustive_but(CLASSES, "sequence"), indirect=True)
def test_classifier_scores_as_megatron(reward_model):  # noqa: F811
    folder, model = reward_model
    [all_scores] = vllm_scores([folder])
    assert all_scores == [pytest.approx(token_scores(model, sample), rel=0, abs=1e-4) for sample in SAMPLES]
    assert [sum(scores) for scores in all_scores] == pytest.approx(rewards_of(folder), rel=1e-5, abs=1e-4)


def has_classifier(model_type: str, kind: str) -> bool:
    """Return whether transformers has a classifier of this kind for the family that vLLM can run."""
    return (
        model_type != "qwen3_5_text"
        and model_type in CONFIG_MAPPING
        and CONFIG_MAPPING[model_type] in CLASSES[kind]._model_mapping
    )


@pytest.mark.parametrize(("kind", "least"), [("sequence", 14), ("token", 14)])
@pytest.mark.exhaustive
def test_every_family_scores_as_transformers(tmp_path, kind, least):
    # Load MoE models first: vLLM creates the process groups for the first model, and dense models need fewer.
    names = [name for name, (model_type, _, _) in MODELS.items() if has_classifier(model_type, kind)]
    assert len(names) >= least
    names.sort(key=lambda name: not any("experts" in key for key in MODELS[name][1]))
    folders = {name: tmp_path / str(i) for i, name in enumerate(names)}
    models = {}
    for name in names:
        model_type, changes, _ = MODELS[name]
        # With latent attention, head_dim in transformers is the number of rotary channels.
        changes = changes | ({"head_dim": changes["qk_rope_head_dim"]} if model_type == "deepseek_v3" else {})
        trunk = write_tiny_model(tmp_path / "trunk" / folders[name].name, model_type, **SIZES | changes)
        models[name] = write_classifier(folders[name], trunk, kind)
    for name, all_scores in zip(names, vllm_scores(list(folders.values())), strict=True):
        for sample, scores in zip(SAMPLES, all_scores, strict=True):
            assert scores == pytest.approx(token_scores(models[name], sample), rel=0, abs=1e-4), name
