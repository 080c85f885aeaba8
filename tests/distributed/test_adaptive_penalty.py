"""The adaptive penalty on divergence from the old policy changes between steps and survives a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.config.schema import Config
from megarl.megatron.workers.actor import ActorWorker
from tests.forked import run_ranks
from tests.parity import Group, TokenScores, config_of, local_batch, random_groups, rank_batches
from tests.tiny_model import write_tiny_llama

GROUPS = random_groups(0)
OLD = {"old": {s.id: torch.linspace(-6, -4, len(s.response_ids)) for group in GROUPS for s, _ in group}}


def losses(
    store, rank: int, config: Config, folder: Path, groups: list[Group], scores: TokenScores, divergences: list[float]
) -> tuple[float, float, dict[str, float]]:
    """Return the loss and penalty that an update reports after steps with these divergences, and the counters that a
    checkpoint saves.
    """
    worker = ActorWorker(config, folder, rank, store, threads=1)
    for divergence in divergences:
        worker.adapt_penalty(divergence)
    counters = worker._counters()
    again = {name: value for name, value in counters.items() if name != "num_updates"}
    worker._penalty = None
    worker._restore_counters({"num_updates": 0, **again})
    metrics = worker.update(local_batch(rank_batches(config, worker.packing, groups, scores=scores)[rank]))
    return metrics["policy/loss"].value, metrics["policy/penalty"].value, counters


def test_divergences_set_the_penalty_of_the_next_update(tmp_path: Path) -> None:
    """The target is 1: the penalty doubles above 1.5, halves below 1 / 1.5 and is unchanged in between (0.7, 1.4, 1.4,
    2.8, 1.4).
    """
    folder = write_tiny_llama(tmp_path)

    def run(penalty: float, divergences: list[float]) -> tuple[float, float, dict[str, float]]:
        keys = f"algorithm.objective={{name: kl_penalty, penalty: {penalty}, penalty_target: 1.0}}"
        config = config_of(folder, keys, "batch.prompts_per_update=1")
        [result] = run_ranks(1, losses, config, folder, GROUPS, OLD, divergences)
        return result

    loss, penalty, counters = run(0.7, [2.0, 1.4, 2.0, 0.5])
    expected, given, fresh = run(1.4, [])
    assert (penalty, given) == pytest.approx((1.4, 1.4))
    assert loss == expected
    assert counters["penalty"] == 1.4 and "penalty" not in fresh
