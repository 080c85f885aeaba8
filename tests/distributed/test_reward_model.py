"""Reward models in Megatron score the sampled token ids as transformers does, in every layout."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from megarl.cluster.groups.rewards import classifier_reward
from megarl.cluster.rank_batch import RankBatch
from megarl.config.schema import Config
from megarl.core.types import Sample, SampleRef
from megarl.data.packing import Lengths, schedule
from megarl.megatron.workers.reward_model import RewardModelWorker
from tests.closeness import TOLERANCE
from tests.forked import run_ranks
from tests.parity import config_of, local_batch, random_groups
from tests.tiny_model import tiny_tokenizer, write_tiny_llama

LAYOUTS = {
    "1 process": "{}",
    "TP3": "{tp: 3}",
    "TP3, sequence parallel": "{tp: 3, sequence_parallel: true}",
    "PP2": "{pp: 2}",
    "DP2": "{dp: 2}",
    "CP2": "{cp: 2}",
}
CLASSES = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}
SAMPLES = [sample for group in random_groups(0) for sample, _ in group]
STEP_END = "a"


def write_classifier(folder: Path, actor: Path, kind: str) -> torch.nn.Module:
    """Write a Hugging Face classifier with the actor's backbone and tokenizer and a random head."""
    model = CLASSES[kind].from_pretrained(actor, num_labels=1, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter.normal_(generator=generator)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=CLASSES)
def reward_model(request, tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    actor = write_tiny_llama(
        tmp_path_factory.mktemp("actor"), num_heads=3, num_kv_heads=3, hidden_size=96, intermediate_size=96
    )
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_classifier(folder, actor, request.param)


def score(store, rank: int, config: Config, folder: Path) -> dict[str, torch.Tensor]:
    worker = RewardModelWorker(config, folder, rank, store, threads=1)
    microbatches = schedule([Lengths.of(SampleRef.of(sample)) for sample in SAMPLES], worker.packing)
    rank_batches = [RankBatch.of([SampleRef.of(sample, sample) for sample in SAMPLES], own) for own in microbatches]
    scores = worker.score_tokens(local_batch(rank_batches[worker.data_parallel_rank]))
    away = [not parameter.untyped_storage().nbytes() for parameter in worker.parameters().values()]
    assert all(away) if config.reward_model.offload else not any(away)
    return scores


def rewards_of(folder: Path, *overrides: str) -> list[float]:
    """Return the rewards of the samples in order, from the token scores of the rank that reports each sample."""
    required = [f"reward_model.path={folder}", "reward_model.tokens_per_microbatch=80"]
    config = config_of(folder, *required, *overrides)
    ranks = run_ranks(config.reward_model.layout.world_size, score, config, folder)
    assert sorted(name for rank in ranks for name in rank) == sorted(sample.id for sample in SAMPLES)
    scores = [next(rank[sample.id] for rank in ranks if sample.id in rank).tolist() for sample in SAMPLES]
    rule = classifier_reward(config, folder)
    return [rule.reward(sample, own).value for sample, own in zip(SAMPLES, scores, strict=True)]


def token_scores(model: torch.nn.Module, sample: Sample) -> list[float]:
    """Return the scores of the response's tokens. A sequence classifier scores only the last one."""
    with torch.no_grad():
        logits = model(torch.tensor(sample.token_ids[None]).long()).logits.flatten()
    return logits[-len(sample.response_ids) :].tolist()


@pytest.mark.parametrize(
    ("layout", "offload"), [*((layout, "[]") for layout in LAYOUTS), ("TP3, sequence parallel", "[parameters]")]
)
def test_scores_match_transformers(reward_model, layout, offload):
    folder, model = reward_model
    expected = [fmean(token_scores(model, sample)) for sample in SAMPLES]
    keys = {"layout": LAYOUTS[layout], "offload": offload, "aggregation": "mean"}
    rewards = rewards_of(folder, *(f"reward_model.{key}={value}" for key, value in keys.items()))
    assert max(map(abs, expected)) > 0.1
    assert rewards == pytest.approx(expected, rel=0, abs=TOLERANCE * max(map(abs, expected)))


@pytest.mark.parametrize("reward_model", ["token"], indirect=True)
@pytest.mark.parametrize(
    ("aggregation", "combine"), [("mean", fmean), ("sum", sum), ("min", min), ("last", lambda scores: scores[-1])]
)
def test_steps_are_scored_at_their_end(reward_model, aggregation, combine):
    folder, model = reward_model
    [marker] = tiny_tokenizer().encode(STEP_END)
    expected, marked = [], 0
    for sample in SAMPLES:
        scores, ids = token_scores(model, sample), sample.response_ids.tolist()
        marked += ids.count(marker)
        expected.append(combine([s for i, s in enumerate(scores) if ids[i] == marker or i == len(ids) - 1]))
    assert marked > 0
    rewards = rewards_of(folder, f"reward_model.step_end={STEP_END}", f"reward_model.aggregation={aggregation}")
    assert rewards == pytest.approx(expected, rel=0, abs=TOLERANCE * max(map(abs, expected)))
