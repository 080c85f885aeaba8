"""Per-token details of a few samples, and torch's profile of a rank's step."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from megarl.config.schema import Config
from megarl.megatron.workers.actor import ActorWorker
from megarl.step import passes
from tests.closeness import assert_matches, close_to
from tests.forked import run_ranks
from tests.grpo_reference import GrpoReference
from tests.parity import EPS, LR, TEMPERATURE, Group, config_of, local_batch, random_groups, rank_batches
from tests.tiny_model import write_tiny_llama

CONFIGS = {
    "from the update": [],
    "from the update, PP2": ["actor.layout.pp=2"],
    "from a pass, CP2": ["actor.layout.cp=2", "algorithm.kl.placement=reward", "algorithm.kl.coefficient=0.01"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_kv_heads=2)


def one_step(store, rank: int, config: Config, folder: Path, groups: list[Group], out: Path):
    worker = ActorWorker(config, folder, rank, store, threads=1)
    batch = local_batch(rank_batches(config, worker.packing, groups)[worker.data_parallel_rank])
    for policy in passes.policies(config):
        worker.keep_log_probs(policy, batch)
    worker.start_profile([0])
    worker.update(batch)
    worker.stop_profile([0], out)
    advantages, details = worker.take_advantages(), worker.take_token_details()
    assert not worker.take_token_details()
    return advantages, details


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_the_first_groups_have_details(name: str, folder: Path, tmp_path: Path) -> None:
    """transformers computes the expected trainer log-probs. The engine's log-probs are those drawn by random_groups."""
    groups = [
        [(replace(sample, id=f"1.{i}.{k}"), reward) for k, (sample, reward) in enumerate(group)]
        for i, group in enumerate(random_groups(0))
    ]
    config = config_of(folder, *CONFIGS[name], "batch.samples_per_prompt=4", "run.token_samples=4")
    assert config.num_detailed_groups == 1
    results = run_ranks(config.actor.layout.world_size, one_step, config, folder, groups, tmp_path)
    advantages = {key: value for found, _ in results for key, value in found.items()}
    details = {key: value for _, found in results for key, value in found.items()}
    assert details.keys() == {sample.id for sample, _ in groups[0]}

    @torch.no_grad()
    def differences() -> dict[str, torch.Tensor]:
        reference = GrpoReference(folder, lr=LR, eps=EPS, temperature=TEMPERATURE)
        return {s.id: reference.log_probs(reference.model, s) - torch.tensor(s.response_logprobs) for s, _ in groups[0]}

    actual = {name: torch.tensor(rows["logprob_differences"]) for name, rows in details.items()}
    assert_matches(actual, differences, "log-prob differences")
    for sample, _ in groups[0]:
        rows = details[sample.id]
        trained = [
            a for a, is_trained in zip(rows["token_advantages"], sample.response_mask, strict=True) if is_trained
        ]
        if sample.id in advantages:
            assert advantages[sample.id] == close_to(fmean(trained), torch.tensor(trained).mean().item())
    [profile] = tmp_path.iterdir()
    assert profile.name == "actor-0.json.gz"
    operators = {event["name"] for event in json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]}
    assert "aten::mm" in operators
