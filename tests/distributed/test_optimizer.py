"""The optimizer against torch's AdamW: parameters with and without decay, scheduled learning rates, and skipped
updates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megarl.config.learning_rate import learning_rate
from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.megatron.optimizer import parts_of
from megarl.megatron.workers.actor import ActorWorker
from tests.closeness import TOLERANCE, assert_close, expected
from tests.distributed.test_families import DEEPSEEK
from tests.forked import run_ranks
from tests.grpo_reference import GrpoReference
from tests.parity import canonical, config_of, local_batch, random_groups, rank_batches, train
from tests.tiny_model import SHARDED_VOCAB, write_tiny_llama, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model with biases, which are not decayed."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("model"), model_type="qwen2", num_kv_heads=2, num_layers=2, vocab_size=SHARDED_VOCAB
    )


def scheduled(folder: Path, *overrides: str) -> Config:
    schedule = "actor.optimizer.schedule={name: cosine, warmup: 1, min_lr: 1e-4}"
    return config_of(folder, "run.steps=3", "actor.optimizer.weight_decay=0.5", schedule, *overrides)


def reference_weights(folder: Path, config: Config, updates: list) -> dict[str, torch.Tensor]:
    """Train with AdamW, with decay on everything except biases and norms, and a new learning rate for each update."""
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
    updates = [random_groups(seed, SHARDED_VOCAB) for seed in range(3)]
    ranks = run_ranks(config.actor.layout.world_size, train, config, folder, updates)
    exact, plain = expected(lambda: reference_weights(folder, config, updates))
    assert_close(canonical(folder, ranks, "weights"), exact, plain, "weight")
    assert ranks[0].metrics["policy/lr"].value == pytest.approx(1e-4 + 9e-4 * 0.5, rel=TOLERANCE)


SPOILED_SAMPLE = "1.1"
"""The sample whose microbatch gets a non-finite loss."""

LAYOUTS = {
    "PP2, no clipping": ["actor.layout.pp=2", "actor.optimizer.clip_grad_norm=0.0"],
    "DP2": ["actor.layout.dp=2"],
    "DP2, bfloat16": ["actor.layout.dp=2", "model.dtype=bfloat16"],
    "DP2, bfloat16, Muon": ["actor.layout.dp=2", "model.dtype=bfloat16", "actor.optimizer.name=muon"],
    "TP2, without overlap": ["actor.layout.tp=2", "actor.overlap_communication=false"],
}


@dataclass(frozen=True)
class Skipped:
    """The outcome of an update on a rank: its metrics or the error that ends the run, and whether weights and state are
    unchanged."""

    metrics: dict[str, Metric]
    message: str
    is_unchanged: bool


def state_of(worker: ActorWorker) -> list[torch.Tensor]:
    """Return copies of everything that an update changes: weights, routers' biases, main weights, moments and
    counts."""
    states = [state for part in parts_of(worker.optimizer) for state in part.optimizer.state.values()]
    moments = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    groups = [part.optimizer.param_groups for part in parts_of(worker.optimizer)]
    main = [weight for parts in groups for group in parts for weight in group["params"]]
    return [tensor.detach().clone() for tensor in (*worker.parameters().values(), *main, *moments)]


def updates_with_factors(store, rank: int, config: Config, folder: Path, factors: list[float]) -> list[Skipped]:
    """Run an update for each factor, which multiplies the loss of one sample's microbatch."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    plain, outcomes = ActorWorker.loss, []
    for seed, factor in enumerate(factors):
        batch = local_batch(
            rank_batches(config, worker.packing, random_groups(seed, SHARDED_VOCAB))[worker.data_parallel_rank]
        )
        is_spoiled = [any(item.sample.id == SPOILED_SAMPLE for item in members) for members in batch.members]
        multiples = iter([factor if spoiled else 1.0 for spoiled in is_spoiled])

        def spoil(batch, scored, multiples=multiples):
            terms = plain.fget(worker).terms(batch, scored)
            loss = terms.loss * next(multiples)
            return terms._replace(loss=loss, actor_loss=loss)

        # This patch affects only this forked process.
        ActorWorker.loss = property(lambda worker, spoil=spoil: replace(plain.fget(worker), terms=spoil))
        before, message, metrics = state_of(worker), "", {}
        try:
            metrics = worker.update(batch)
        except RuntimeError as error:
            message = str(error)
        worker.end_step()
        after = state_of(worker)
        is_unchanged = len(before) == len(after) and all(map(torch.equal, before, after))
        outcomes.append(Skipped(metrics, message, is_unchanged))
    return outcomes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_skip_an_update_with_a_nonfinite_gradient(folder, layout):
    """Only one microbatch of one replica has a nonfinite gradient. Every normal update resets the count of skipped
    ones.
    """
    keys = ("actor.optimizer.nonfinite_limit=2", "actor.tokens_per_microbatch=64")
    config = config_of(folder, *LAYOUTS[layout], *keys)
    factors = [1.0, math.nan, 1.0, math.inf, math.nan]
    ranks = run_ranks(config.actor.layout.world_size, updates_with_factors, config, folder, factors)
    for outcomes in ranks:
        assert [outcome.is_unchanged for outcome in outcomes] == [False, True, False, True, True]
        assert [bool(outcome.message) for outcome in outcomes] == [False, False, False, False, True]
    reported = [outcomes for outcomes in ranks if outcomes[0].metrics]
    for outcomes in reported:
        assert [outcome.metrics["policy/skipped_updates"].value for outcome in outcomes[:4]] == [0, 1, 1, 2]
        assert [outcome.metrics.keys() == {"policy/skipped_updates"} for outcome in outcomes[:4]] == [
            *(False, True, False, True)
        ]
    [message] = {outcomes[-1].message for outcomes in ranks}
    assert message.startswith(
        "actor.optimizer.nonfinite_limit=2: 2 consecutive updates were skipped, because their gradients "
        "were not finite (last norm: nan). "
    )
    assert "\n" not in message and "policy/loss nan; samples " in message
    samples = message.partition("; samples ")[2].partition(". Fix: ")[0].split(", ")
    assert SPOILED_SAMPLE in samples and len(samples) < 12, "the message must name only one microbatch's samples"


def test_skipped_update_leaves_router_biases_unchanged(tmp_path):
    """Router biases follow the load of the experts, which is known before the gradient."""
    folder = write_tiny_model(tmp_path, "deepseek_v3", **DEEPSEEK)
    moving = "actor.megatron_overrides.model={moe_router_bias_update_rate: 0.1}"
    config = config_of(folder, moving, "actor.optimizer.lr=1e-30")
    [outcomes] = run_ranks(1, updates_with_factors, config, folder, [1.0, math.nan])
    assert [outcome.is_unchanged for outcome in outcomes] == [False, True]


def test_skipped_updates_do_not_affect_later_ones(folder):
    config = scheduled(folder, "actor.layout.dp=2")
    updates = [random_groups(seed, SHARDED_VOCAB) for seed in range(3)]
    skipping = run_ranks(2, train_skipping, config, folder, updates)
    plain = run_ranks(2, train, config, folder, updates)
    for actual, reference in zip(skipping, plain, strict=True):
        assert all(torch.equal(actual[name], reference.weights[name]) for name in reference.weights)


def train_skipping(store, rank: int, config: Config, folder: Path, updates: list) -> dict[str, torch.Tensor]:
    """Return the weights after these updates. A skipped update precedes each of the first two."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    plain = ActorWorker.loss

    def spoiled(batch, scored):
        terms = plain.fget(worker).terms(batch, scored)
        return terms._replace(loss=math.inf * terms.loss)

    for number, groups in enumerate(updates):
        batch = local_batch(rank_batches(config, worker.packing, groups)[worker.data_parallel_rank])
        if number < 2:
            ActorWorker.loss = property(lambda _: replace(plain.fget(worker), terms=spoiled))
            worker.update(batch)
            ActorWorker.loss = plain
        worker.update(batch)
        worker.end_step()
    return {name: weight.clone() for name, weight in worker.parameters().items()}
