"""Advantages whitened over all updates of a step, in each layout, against all tokens in one list."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megarl.config.schema import Config
from megarl.megatron.workers.actor import ActorWorker
from tests.closeness import assert_matches
from tests.forked import run_ranks
from tests.parity import Group, config_of, own_batch, random_groups
from tests.tiny_model import write_tiny_llama

UPDATES = [random_groups(seed) for seed in range(2)]
GROUPS = [(number, group) for number, groups in enumerate(UPDATES) for group in groups]
TRAINED = [(number, sample.id) for number, group in GROUPS for sample, _ in group if any(sample.response_mask)]
"""The update and the id of each sample with trained tokens."""
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


def by_hand() -> dict[str, torch.Tensor]:
    """Subtract the mean of each group's rewards, then whiten over all trained tokens of both updates."""
    plain = {}
    for number, group in GROUPS:
        rewards = torch.tensor([reward for _, reward in group])
        plain |= {(number, s.id): a for (s, _), a in zip(group, rewards - rewards.mean(), strict=True)}
    every = [plain[number, s.id] for number, group in GROUPS for s, _ in group for _ in range(sum(s.response_mask))]
    deviation, mean = torch.std_mean(torch.stack(every))
    return {"advantages": (torch.stack([plain[name] for name in TRAINED]) - mean) / (deviation + 1e-6)}


@pytest.mark.parametrize("layout", ["{dp: 2}", "{pp: 2}"])
def test_updates_are_whitened_over_the_whole_step(tmp_path: Path, layout: str) -> None:
    folder = write_tiny_llama(tmp_path)
    config = config_of(folder, KEYS, f"actor.layout={layout}")
    ranks = run_ranks(2, advantages, config, folder, UPDATES)
    found = [{name: a for part in parts for name, a in part.items()} for parts in zip(*ranks, strict=True)]
    for step in (found[:2], found[2:]):
        whitened = {(number, name): a for number, own in enumerate(step) for name, a in own.items()}
        assert whitened.keys() == set(TRAINED)
        assert_matches({"advantages": torch.tensor([whitened[name] for name in TRAINED])}, by_hand, layout)
