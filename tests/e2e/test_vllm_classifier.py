"""Reward models in vLLM score the ids that they are given as transformers and as Megatron do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

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
from tests.e2e.test_refit import MODELS, SIZES
from tests.parity import config_of
from tests.timing import RUN_S
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow


def config(folder: Path) -> Config:
    overrides = [f"reward_model.path={folder}", "reward_model.tokens_per_microbatch=80"]
    return config_of(folder, *overrides, "reward_model.engine=vllm", "reward_model.kv_cache_gib=0.05")


def in_vllm(folders: Sequence[Path]) -> list[list[list[float]]]:
    """Return the scores of SAMPLES by each model; for a process of its own."""
    os.environ.update(environment(ranks=1, threads=1, index=0))
    from megarl.rollout.vllm.classifier import VllmClassifier, classifier_arguments

    # All of them stay: the first one that ends would take the process group with it.
    engines = [VllmClassifier(classifier_arguments(config(folder), folder)) for folder in folders]
    return [[scores.tolist() for scores in engine.scores(SAMPLES)] for engine in engines]


def vllm_scores(folders: Sequence[Path]) -> list[list[list[float]]]:
    with ProcessPoolExecutor(1, mp_context=engine_context()) as pool:
        return pool.submit(in_vllm, folders).result(timeout=RUN_S)


def test_it_scores_as_megatron_does(reward_model):  # noqa: F811
    folder, model = reward_model
    [ours] = vllm_scores([folder])
    assert ours == [pytest.approx(token_scores(model, sample), rel=0, abs=1e-4) for sample in SAMPLES]
    assert [sum(own) for own in ours] == pytest.approx(rewards_of(folder), rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.exhaustive
def test_every_family_is_scored_as_transformers_does(tmp_path, kind):
    # Models with experts first: vLLM makes the groups of a process for its first model, and others need fewer.
    names = sorted(MODELS, key=lambda name: not any("experts" in key for key in MODELS[name][1]))
    folders = {name: tmp_path / str(i) for i, name in enumerate(names)}
    models = {}
    for name in names:
        model_type, changes, _ = MODELS[name]
        # What transformers calls head_dim is, with latent attention, the channels that have positions.
        changes = changes | ({"head_dim": changes["qk_rope_head_dim"]} if model_type == "deepseek_v3" else {})
        trunk = write_tiny_model(tmp_path / "trunk" / folders[name].name, model_type, **SIZES | changes)
        models[name] = write_classifier(folders[name], trunk, kind)
    for name, ours in zip(names, vllm_scores(list(folders.values())), strict=True):
        for sample, own in zip(SAMPLES, ours, strict=True):
            assert own == pytest.approx(token_scores(models[name], sample), rel=0, abs=1e-4), name
