"""Mismatch is the distance between the engine's log-probs and those of the policy that sampled. Drift is the distance
that a step's updates move this policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.config.schema import Config
from megarl.core.metrics import Metric, merge, merge_updates, values
from megarl.megatron.workers.actor import ActorWorker
from megarl.step import passes
from tests.closeness import expected, limit
from tests.forked import run_ranks
from tests.grpo_reference import GrpoReference
from tests.parity import EPS, LR, TEMPERATURE, Group, config_of, local_batch, random_groups, rank_batches
from tests.tiny_model import write_tiny_llama

NUM_UPDATES = 2
CONFIGS = {
    "old log-probs": [],
    "old log-probs, PP2": ["actor.layout.pp=2"],
    "the engine's in place of old log-probs, DP2": ["algorithm.correction.old=rollout", "actor.layout.dp=2"],
    "pairs": ["algorithm.objective.name=dpo", "actor.tokens_per_microbatch=128"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_kv_heads=2)


@pytest.fixture(scope="module")
def updates(folder) -> tuple[list[list[Group]], float]:
    """Samples with log-probs from the transformers model in float64, which takes the engine's place, and the largest
    difference that float32 explains."""

    def named(group: Group, seed: int) -> Group:
        prompt = replace(group[0][0].prompt, id=f"{seed}.{group[0][0].prompt.id}")
        return [(replace(s, id=f"{seed}.{s.id}", prompt=prompt), reward) for s, reward in group]

    groups = [[named(group, seed) for group in random_groups(seed)] for seed in range(NUM_UPDATES)]

    @torch.no_grad()
    def log_probs() -> dict[str, torch.Tensor]:
        reference = GrpoReference(folder, lr=LR, eps=EPS, temperature=TEMPERATURE)
        return {s.id: reference.log_probs(reference.model, s) for own in groups for group in own for s, _ in group}

    exact, plain = expected(log_probs)

    def scored(group: Group) -> Group:
        return [(replace(s, response_logprobs=exact[s.id].tolist()), reward) for s, reward in group]

    largest = max(float(values.abs().max()) for values in exact.values())
    return [[scored(group) for group in own] for own in groups], largest * limit(exact, plain)


def one_step(store, rank: int, config: Config, folder: Path, updates: list[list[Group]]) -> list[dict[str, Metric]]:
    """Run a step's passes and updates on one rank. Return the metrics of each update, then those of the second step's
    first update."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    batches = [
        local_batch(rank_batches(config, worker.packing, groups)[worker.data_parallel_rank]) for groups in updates
    ]
    for policy in ("old", "reference"):
        if passes.needed(config, f"{policy} log-probs"):
            for batch in batches:
                worker.keep_log_probs(policy, batch)
    metrics = [worker.update(batch) for batch in batches]
    worker.end_step()
    if config.has_reference:
        worker.keep_log_probs("reference", batches[0])
    return [*metrics, worker.update(batches[0])]


def step_metrics(ranks: list[list[Mapping[str, Metric]]], number: int) -> dict[str, float]:
    return values(merge([metrics[number] for metrics in ranks if metrics[number]]))


@pytest.mark.parametrize("name", CONFIGS)
def test_mismatch_refers_to_the_sampling_policy(folder, updates, name):
    config = config_of(
        folder, "actor.optimizer.lr=0.1", "batch.prompts_per_step=6", "batch.prompts_per_update=3", *CONFIGS[name]
    )
    updates, largest = updates
    ranks = run_ranks(config.actor.layout.world_size, one_step, config, folder, updates)
    first, second, next_step = (step_metrics(ranks, number) for number in range(3))
    assert 0 < first["mismatch/logprob_abs_mean"] <= first["mismatch/logprob_abs_max"] <= largest
    assert "policy/drift_abs_mean" not in first
    assert second["policy/drift_abs_max"] > second["policy/drift_abs_mean"] > 0.1
    assert ("mismatch/logprob_abs_max" in second) == passes.needed(config, "old log-probs")
    merged = [merge([metrics[number] for metrics in ranks if metrics[number]]) for number in range(NUM_UPDATES)]
    whole_step = values(merge_updates(merged))
    assert whole_step["mismatch/logprob_abs_max"] <= largest and whole_step["policy/drift_abs_mean"] > 0.1
    assert "policy/drift_abs_mean" not in next_step, "the first update of a step has no drift"
    assert next_step["mismatch/logprob_abs_max"] > 0.1, "the samples come from another policy"
