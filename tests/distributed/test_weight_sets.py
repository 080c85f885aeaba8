"""Passes with the reference's weights do not affect training, in bfloat16 with the distributed optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.config.schema import Config
from megarl.megatron.workers.actor import ActorWorker
from tests.forked import run_ranks
from tests.parity import config_of, local_batch, random_groups, rank_batches
from tests.tiny_model import SHARDED_VOCAB, write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_kv_heads=2, vocab_size=SHARDED_VOCAB)


def train(store, rank: int, config: Config, folder: Path, with_passes: bool) -> dict[str, torch.Tensor]:
    """Train two updates, optionally with a reference pass before each. Return parameters and optimizer state."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    scored = []
    for seed in range(2):
        batch = local_batch(
            rank_batches(config, worker.packing, random_groups(seed, SHARDED_VOCAB))[worker.data_parallel_rank]
        )
        if with_passes:
            worker.keep_log_probs("reference", batch)
            scored.append(torch.cat(list(worker._kept.pop("reference").values())))
        worker.update(batch)
        worker.end_step()
    state = [part.optimizer.state[p] for part in worker.optimizer.chained_optimizers for p in part.optimizer.state]
    tensors = {f"state {i} {name}": value for i, values in enumerate(state) for name, value in values.items()}
    tensors |= {f"main {i}": p for i, p in enumerate(worker.optimizer.param_groups[0]["params"])}
    return worker.parameters() | tensors | ({"scored": scored[0]} if scored else {})


def ratios(store, rank: int, config: Config, folder: Path) -> list[float]:
    """Return the largest |log π − log π_ref| after an update, after a renewal of the reference, and after another
    update.
    """
    worker = ActorWorker(config, folder, rank, store, threads=1)
    batch = local_batch(
        rank_batches(config, worker.packing, random_groups(0, SHARDED_VOCAB))[worker.data_parallel_rank]
    )

    def largest() -> float:
        for policy in ("old", "reference"):
            worker.keep_log_probs(policy, batch)
        old, reference = (torch.cat(list(worker._kept.pop(name).values())) for name in ("old", "reference"))
        return float((old - reference).abs().max())

    results = []
    for renew in (False, True, False):
        worker.renew_reference() if renew else worker.update(batch)
        worker.end_step()
        results.append(largest())
    return results


def test_renewed_reference_equals_the_policy_until_updated(folder):
    kl = "algorithm.kl={coefficient: 0.1, renew_steps: 1}"
    for before, renewed, later in run_ranks(2, ratios, config_of(folder, kl, "actor.layout.tp=2"), folder):
        assert before > 1e-4
        assert renewed == 0
        assert later > 1e-4


@pytest.mark.parametrize("dp", [1, 2])
def test_reference_passes_do_not_affect_training(folder, dp):
    config = config_of(folder, "model.dtype=bfloat16", f"actor.layout.dp={dp}", "algorithm.kl.coefficient=0.1")
    without = run_ranks(dp, train, config, folder, False)
    with_passes = run_ranks(dp, train, config, folder, True)
    for plain, passed in zip(without, with_passes, strict=True):
        assert passed.pop("scored").isfinite().all()
        assert plain.keys() == passed.keys()
        assert all(torch.equal(plain[name], passed[name]) for name in plain)
