"""A run may skip passes that would not change a bit of the gradients, but it always applies the correction for samples
of another policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megarl.algorithms.registry import OBJECTIVES
from megarl.config.schema import Config
from megarl.megatron import parallel, step
from megarl.megatron.workers.actor import ActorWorker
from megarl.step import passes
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import TokenScores, config_of, local_batch, random_groups, rank_batches, reduced_gradients
from tests.tiny_model import write_tiny_llama

Gradients = dict[str, torch.Tensor]
CORRECTION = (
    "algorithm.correction={weight: token, weight_limit: 1.5, mask: geometric, mask_low: 0.001, mask_high: 1000}"
)
FEW_MICROBATCHES = "actor.tokens_per_microbatch=256"
LAYOUTS = {"1 process": "{}", "PP2": "{pp: 2}", "CP2": "{cp: 2}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_kv_heads=2)


def gradients(
    store, rank: int, configs: Mapping[str, Config], folder: Path, scores: TokenScores, old_pass: bool
) -> dict[str, Gradients]:
    """Return the gradients of one update, by case."""
    worker = ActorWorker(next(iter(configs.values())), folder, rank, store, threads=1)
    return {name: update_gradients(worker, config, scores, old_pass) for name, config in configs.items()}


def update_gradients(worker: ActorWorker, config: Config, scores: TokenScores, old_pass: bool) -> Gradients:
    worker._config = config
    groups = random_groups(0)
    batch = local_batch(rank_batches(config, worker.packing, groups, scores=scores)[worker.data_parallel_rank])
    if old_pass:
        worker.keep_log_probs("old", batch)
    batches = worker._training_batches(batch)
    assert not parallel.is_last_stage(None) or all((batch.old is not None) == old_pass for batch in batches)
    step.accumulate_gradients(worker.chunks, worker.loss, batches)
    worker.end_step()
    return reduced_gradients(worker.chunks)


def assert_same(ranks: list[dict[str, Gradients]], expected_ranks: list[dict[str, Gradients]]) -> None:
    for actual, expected in zip(ranks, expected_ranks, strict=True):
        for case in actual:
            assert all(torch.equal(actual[case][name], expected[case][name]) for name in actual[case]), case
            assert any(gradient.any() for gradient in actual[case].values()), case


def tokens(seed: int) -> dict[str, torch.Tensor]:
    """Return a random number for each response token, by sample id."""
    generator = torch.Generator().manual_seed(seed)
    samples = [sample for group in random_groups(0) for sample, _ in group]
    return {sample.id: torch.randn(len(sample.response_ids), generator=generator) for sample in samples}


OBJECTIVES_WITHOUT_OLD = [
    name
    for name, spec in OBJECTIVES.items()
    if spec.is_policy_objective and "tokens" in spec.actions and not spec.selects_tokens
]


@pytest.mark.parametrize("layout", exhaustive_but(LAYOUTS, "PP2"))
def test_old_policy_equals_the_current_one_with_one_update(folder, layout):
    """The pass changes no gradient of any objective, with or without corrections, and the corrections still apply
    without it."""
    configs = {
        f"{name} {correction}": config_of(
            folder, FEW_MICROBATCHES, f"actor.layout={LAYOUTS[layout]}", f"algorithm.objective.name={name}", *correction
        )
        for name in OBJECTIVES_WITHOUT_OLD
        for correction in ((), (CORRECTION,))
    }
    assert not any(passes.needed(config, "old log-probs") for config in configs.values())
    world_size = next(iter(configs.values())).actor.layout.world_size
    without, with_pass = (run_ranks(world_size, gradients, configs, folder, {}, old) for old in (False, True))
    assert_same(without, with_pass)
    for actual in without:
        for name in OBJECTIVES_WITHOUT_OLD:
            plain, corrected = actual[f"{name} ()"], actual[f"{name} {(CORRECTION,)}"]
            assert all(not torch.equal(plain[p], corrected[p]) for p in plain if plain[p].any()), name


@pytest.mark.parametrize(
    ("left_out", "scores"),
    [
        ("reference log-probs", {"reference": tokens(1)}),
        ("critic values", {"values": tokens(2)}),
        ("implicit rewards", {"implicit_reward": {name: 0.0 * values for name, values in tokens(3).items()}}),
    ],
)
def test_unused_scores_change_nothing(folder, left_out, scores):
    """The scores come from a reference with a coefficient of 0, a critic whose estimator compares samples with each
    other, or an implicit reward model with a coefficient of 0."""
    configs = {
        name: config_of(folder, f"algorithm.advantage.estimator={name}")
        for name in ("grpo", "rloo", "reinforce_plus_plus")
    }
    assert not any(passes.needed(config, left_out) for config in configs.values())
    without, with_pass = (
        run_ranks(1, gradients, configs, folder, given_scores, False) for given_scores in ({}, scores)
    )
    assert_same(without, with_pass)
