"""The loss scale of a float16 model follows torch's rule, and updates that overflow leave no trace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megarl.config.schema import Config
from megarl.megatron.workers.actor import ActorWorker
from tests.distributed.test_optimizer import state_of, updates_with_factors
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import config_of, local_batch, random_groups, rank_batches
from tests.tiny_model import SHARDED_VOCAB, write_tiny_experts, write_tiny_llama


@dataclass(frozen=True)
class Scaled:
    """A rank after its updates: which updates were skipped, the scale after each, and all tensors that updates
    change."""

    are_skipped: list[bool]
    scales: list[float]
    state: list[torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_heads=4, num_kv_heads=2, vocab_size=SHARDED_VOCAB)


def float16(folder: Path, scale: float, window: int, *overrides: str) -> Config:
    fields = f"{{initial_loss_scale: {float(scale)}, loss_scale_window: {window}}}"
    keys = ("model.dtype=float16", "actor.tokens_per_microbatch=256", f"actor.megatron_overrides.optimizer={fields}")
    return config_of(folder, *keys, *overrides)


def scaled_updates(store, rank: int, config: Config, folder: Path, seeds: list[int]) -> Scaled:
    """Run an update for each seed."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    are_skipped, scales = [], []
    for seed in seeds:
        batch = local_batch(
            rank_batches(config, worker.packing, random_groups(seed, SHARDED_VOCAB))[worker.data_parallel_rank]
        )
        before = worker._skipped.total
        metrics = worker.update(batch)
        worker.end_step()
        are_skipped.append(worker._skipped.total > before)
        scales += [metrics["policy/loss_scale"].value] if metrics else []
    return Scaled(are_skipped, scales, state_of(worker))


def scales_of_torch(first: float, window: int, are_skipped: list[bool]) -> list[float]:
    """Return the scale after each update by torch.amp.GradScaler. `are_skipped` marks the updates that overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=window)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, scales = torch.optim.SGD([weight], lr=0.1), []
    for is_skipped in are_skipped:
        weight.grad = scaler.scale(torch.full((1,), math.inf if is_skipped else 1.0))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize(
    "layout", exhaustive_but(["{dp: 2}", "{tp: 2, sequence_parallel: true}", "{pp: 2}"], "{pp: 2}")
)
def test_overflows_halve_the_scale_and_leave_no_trace(folder, layout):
    """The initial scale is far too large. After the overflows, the run is bit-identical to one that starts with the
    final scale."""
    first, window, overrides = 2.0**36, 3, f"actor.layout={layout}"
    seeds = [0] * 24
    ranks = run_ranks(2, scaled_updates, float16(folder, first, window, overrides), folder, seeds)
    [reported] = {tuple(rank.scales) for rank in ranks if rank.scales}
    are_skipped = ranks[0].are_skipped
    assert all(rank.are_skipped == are_skipped for rank in ranks)
    assert list(reported) == scales_of_torch(first, window, are_skipped)
    num_skipped = are_skipped.index(False)
    assert num_skipped > 1 and are_skipped[:num_skipped] == [True] * num_skipped
    plain = float16(folder, reported[num_skipped - 1], window, overrides)
    others = run_ranks(2, scaled_updates, plain, folder, seeds[num_skipped:])
    for one, other in zip(ranks, others, strict=True):
        assert other.are_skipped == are_skipped[num_skipped:]
        assert len(one.state) == len(other.state) and all(map(torch.equal, one.state, other.state))


@pytest.mark.exhaustive
def test_expert_optimizer_has_the_same_scale(tmp_path):
    folder = write_tiny_experts(tmp_path, num_layers=2, vocab_size=SHARDED_VOCAB)
    config = float16(folder, 2.0**36, 100, "actor.layout={dp: 2, ep: 2}")
    ranks = run_ranks(2, scaled_updates, config, folder, [0] * 24)
    alone = run_ranks(1, scaled_updates, float16(folder, ranks[0].scales[-1], 100), folder, [0])
    assert ranks[0].are_skipped == ranks[1].are_skipped and not ranks[0].are_skipped[-1]
    assert not alone[0].are_skipped[0]


def test_only_updates_at_the_minimum_scale_count_as_skipped(folder):
    """The scale starts at 4 and is halved twice. Two more skipped updates reach the limit."""
    config = float16(folder, 4, 100, "actor.optimizer.nonfinite_limit=2")
    [outcomes] = run_ranks(1, updates_with_factors, config, folder, [math.nan] * 4)
    assert all(outcome.is_unchanged for outcome in outcomes)
    assert [bool(outcome.message) for outcome in outcomes] == [False, False, False, True]
    assert outcomes[-1].message.startswith(
        "actor.optimizer.nonfinite_limit=2: 2 consecutive updates were skipped, because their gradients "
        "were not finite (last norm: nan)"
    )
    assert [outcome.metrics["policy/loss_scale"].value for outcome in outcomes[:3]] == [2, 1, 1]
    assert [outcome.metrics["policy/skipped_updates"].value for outcome in outcomes[:3]] == [1, 2, 3]
