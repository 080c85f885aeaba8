"""The implicit reward model through Megatron against plain Hugging Face and torch: token rewards, loss, weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config.schema import Config
from megarl.core.sample import Sample
from megarl.megatron.workers.implicit_reward import ImplicitRewardWorker
from megarl.models.folder import read_config
from tests.closeness import assert_close, close_to, expected, load
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import (
    EPS,
    LR,
    Group,
    RankResult,
    config_of,
    local_batch,
    random_groups,
    rank_batches,
    whole_tensors,
)
from tests.tiny_model import SHARDED_VOCAB, write_tiny_llama

BETA, COEFFICIENT = 0.5, 2.0  # a large beta, so that log-sigmoid is not linear
STEPS = [random_groups(0, SHARDED_VOCAB), random_groups(1, SHARDED_VOCAB)]
LAYOUTS = {
    "1 process": "{}",
    "TP3, sequence parallel": "{tp: 3, sequence_parallel: true}",
    "PP2": "{pp: 2}",
    "DP2": "{dp: 2}",
    "CP2": "{cp: 2}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("model"),
        num_heads=3,
        num_kv_heads=3,
        hidden_size=96,
        intermediate_size=96,
        vocab_size=SHARDED_VOCAB,
    )


def train(store, rank: int, config: Config, folder: Path, steps: list[list[Group]]):
    """Train on one rank. Return its final state and the token rewards that it reports in each step."""
    worker = ImplicitRewardWorker(config, folder, rank, store, threads=1)
    rewards = []
    for groups in steps:
        batch = local_batch(rank_batches(config, worker.packing, groups, "implicit_reward")[worker.data_parallel_rank])
        rewards.append(worker.score_tokens(batch))
        metrics = worker.update(batch)
        worker.end_step()
    return RankResult(worker.holder, {}, {n: p.clone() for n, p in worker.parameters().items()}, metrics), rewards


def log_probs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """Return the log-probs of the response tokens at temperature 1 [R]."""
    ids = torch.tensor(sample.token_ids[None]).long()
    first = len(sample.prompt.token_ids)
    return model(ids).logits[0, first - 1 : -1].log_softmax(-1).gather(1, ids[0, first:, None])[:, 0]


def plain(folder: Path, steps: list[list[Group]]):
    """Apply PRIME's eq. 2 and 3 to one sample at a time. Return the weights, each step's token rewards, and the last
    loss."""
    model, start = (load(AutoModelForCausalLM, folder) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    rewards = []
    for groups in steps:
        members = [item for group in groups for item in group]
        losses, of_step = [], {}
        for sample, outcome in members:
            token = BETA * (log_probs(model, sample) - log_probs(start, sample).detach())
            of_step[sample.id] = COEFFICIENT * token.detach()
            mask = torch.tensor(sample.response_mask)
            probability = torch.sigmoid(token[mask].sum())
            likelihood = probability if outcome > 0.5 else 1 - probability
            losses.append(-likelihood.log() if mask.any() else probability * 0)
        rewards.append(of_step)
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return dict(model.named_parameters()), rewards, float(loss.detach())


@pytest.mark.parametrize("layout", exhaustive_but(LAYOUTS, "TP3, sequence parallel", "CP2"))
def test_two_steps_equal_plain_torch(folder, layout):
    config = config_of(
        folder,
        "algorithm.advantage.estimator=gae",
        f"implicit_reward.layout={LAYOUTS[layout]}",
        f"implicit_reward.coefficient={COEFFICIENT}",
        f"implicit_reward.beta={BETA}",
        f"implicit_reward.optimizer.lr={LR}",
        f"implicit_reward.optimizer.eps={EPS}",
        "implicit_reward.tokens_per_microbatch=80",
        "critic.tokens_per_microbatch=80",
    )
    results = run_ranks(config.implicit_reward.layout.world_size, train, config, folder, STEPS)
    weights, token_rewards, loss = zip(*expected(lambda: plain(folder, STEPS)), strict=True)

    for step, of_step in enumerate(token_rewards[0]):
        reported = [rewards[step] for _, rewards in results]
        assert sorted(name for rank in reported for name in rank) == sorted(of_step)
        reported_rewards = torch.cat([next(rank[name] for rank in reported if name in rank) for name in of_step])
        exact, rounded = (torch.cat(list(rewards[step].values())) for rewards in token_rewards)
        if step == 0:
            assert not reported_rewards.any() and not exact.any()  # the model equals its reference
        else:  # the rewards are differences of nearly equal log-probs
            assert_close({"tokens": reported_rewards}, {"tokens": exact}, {"tokens": rounded}, "reward")
    ranks = [rank for rank, _ in results]
    metrics = [rank.metrics for rank in ranks if rank.metrics]
    assert sum(m["implicit_reward/loss"].value for m in metrics) == close_to(*loss)
    assert_close(whole_tensors(read_config(folder), ranks, "weights"), *weights, "weight")
