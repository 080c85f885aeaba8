"""The optimizer against torch's AdamW: decayed and undecayed parameters, the schedule's rates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.config.learning_rate import learning_rate
from megarl.config.schema import Config
from megarl.megatron.workers.actor import ActorWorker
from tests.forked import run_ranks
from tests.grpo_reference import GrpoReference
from tests.parity import TOLERANCE, assert_equal, canonical, config_of, local_batch, random_groups, rank_batches, train
from tests.tiny_model import write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With biases, which are not decayed either."""
    return write_tiny_llama(tmp_path_factory.mktemp("model"), model_type="qwen2", num_kv_heads=2, num_layers=2)


def scheduled(folder: Path, *overrides: str) -> Config:
    schedule = "actor.optimizer.schedule={name: cosine, warmup: 1, min_lr: 1e-4}"
    return config_of(folder, "run.steps=3", "actor.optimizer.weight_decay=0.5", schedule, *overrides)


def reference_weights(folder: Path, config: Config, updates: list) -> dict[str, torch.Tensor]:
    """AdamW with the decay on everything that is neither a bias nor a norm, and a new rate for each update."""
    reference = GrpoReference(folder, lr=1e-3, eps=1e-5, temperature=0.8)
    named = dict(reference.model.named_parameters())
    undecayed = [name for name in named if name.endswith("bias") or "norm" in name]
    reference.optimizer = torch.optim.AdamW(
        [
            {"params": [named[name] for name in undecayed], "weight_decay": 0.0},
            {"params": [named[name] for name in named if name not in undecayed], "weight_decay": 0.5},
        ],
        betas=(0.9, 0.999),
        eps=1e-5,
    )
    for done, groups in enumerate(updates):
        for group in reference.optimizer.param_groups:
            group["lr"] = learning_rate(config.actor.optimizer, done, 3)
        reference.update(groups, 0.0, clip_norm=1.0)
    return named


@pytest.mark.parametrize("layout", [[], ["actor.layout.dp=2"]], ids=["1 process", "DP2"])
def test_decay_and_schedule_equal_plain_torch(folder, layout):
    config = scheduled(folder, *layout)
    updates = [random_groups(seed) for seed in range(3)]
    ranks = run_ranks(config.actor.layout.world_size, train, config, folder, updates)
    assert_equal(canonical(folder, ranks, "weights"), reference_weights(folder, config, updates), "weight")
    assert ranks[0].metrics["policy/lr"].value == pytest.approx(1e-4 + 9e-4 * 0.5, rel=TOLERANCE)


def spoiled_update(store, rank: int, config: Config, folder: Path, factor: float) -> str:
    """What an update says whose loss is multiplied by the factor."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    objective = worker.objective

    def spoiled(batch, scored):
        loss, sums = objective(batch, scored)
        return factor * loss, sums

    ActorWorker.objective = staticmethod(spoiled)  # of this forked process alone
    batch = local_batch(rank_batches(config, worker.packing, random_groups(0))[worker.data_parallel_rank])
    with pytest.raises(RuntimeError) as error:
        worker.update(batch)
    return str(error.value)


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", ["1", "0"])
def test_a_gradient_that_is_not_finite_ends_the_run(folder, factor, clip):
    config = config_of(folder, "actor.layout.pp=2", f"actor.optimizer.clip_grad_norm={clip}.0")
    messages = run_ranks(2, spoiled_update, config, folder, factor)
    assert all("the gradient is not finite" in message for message in messages)
