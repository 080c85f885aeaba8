"""Advantages whitened over all updates of a step, in each layout, against all tokens in one list."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import pytest

from megarl.config.schema import Config
from megarl.megatron.workers.actor import ActorWorker
from tests.forked import run_ranks
from tests.parity import Group, config_of, own_batch, random_groups
from tests.tiny_model import write_tiny_llama

UPDATES = [random_groups(seed) for seed in range(2)]
KEYS = "algorithm.advantage={estimator: reinforce_plus_plus_baseline, whiten_over: step}"


def advantages(store, rank: int, config: Config, folder: Path, updates: Sequence[list[Group]]) -> list[dict]:
    """Return, by update, the mean advantage of each sample that this rank reports, for two equal steps."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    found = []
    for _ in range(2):
        batches = [own_batch(config, worker, groups, None) for groups in updates]
        for batch in batches:
            worker.note_advantages(batch)
        for batch in batches:
            worker._training_batches(batch)
            found.append(worker.take_advantages())
        worker.end_step()
    return found


def by_hand() -> list[dict[str, float]]:
    """Subtract the mean of each group's rewards, then whiten over all trained tokens of both updates."""
    plain = [
        {s.id: r - fmean(reward for _, reward in group) for group in groups for s, r in group} for groups in UPDATES
    ]
    every = [
        own[sample.id]
        for own, groups in zip(plain, UPDATES, strict=True)
        for group in groups
        for sample, _ in group
        for _ in range(sum(sample.response_mask))
    ]
    mean, deviation = fmean(every), stdev(every) + 1e-6
    trained = [{s.id for group in groups for s, _ in group if any(s.response_mask)} for groups in UPDATES]
    return [
        {i: (a - mean) / deviation for i, a in own.items() if i in names}
        for own, names in zip(plain, trained, strict=True)
    ]


@pytest.mark.parametrize("layout", ["{dp: 2}", "{pp: 2}"])
def test_updates_are_whitened_over_the_whole_step(tmp_path: Path, layout: str) -> None:
    folder = write_tiny_llama(tmp_path)
    config = config_of(folder, KEYS, f"actor.layout={layout}")
    ranks = run_ranks(2, advantages, config, folder, UPDATES)
    found = [{name: a for part in parts for name, a in part.items()} for parts in zip(*ranks, strict=True)]
    for own, expected in zip(found, by_hand() * 2, strict=True):
        assert own == pytest.approx(expected, rel=1e-5, abs=1e-6)
