"""Reward models in Megatron score the sampled token ids as transformers does, in every layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from megarl.cluster.rank_batch import RankBatch
from megarl.config.schema import Config
from megarl.core.sample import Sample, SampleRef
from megarl.data.packing import Lengths, schedule
from megarl.megatron.workers.reward_model import RewardModelWorker
from megarl.rewards.model_reward import classifier_reward
from tests.closeness import Expected, assert_close, expected, load
from tests.forked import run_ranks
from tests.parity import config_of, local_batch, random_groups
from tests.tiny_model import SHARDED_VOCAB, tiny_tokenizer, write_tiny_llama

LAYOUTS = {
    "1 process": "{}",
    "TP3": "{tp: 3}",
    "TP3, sequence parallel": "{tp: 3, sequence_parallel: true}",
    "PP2": "{pp: 2}",
    "DP2": "{dp: 2}",
    "CP2": "{cp: 2}",
}
CLASSES = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}
SAMPLES, SHARDED = ([s for group in random_groups(0, vocab) for s, _ in group] for vocab in (100, SHARDED_VOCAB))
"""Samples whose tokens any model has, and samples with tokens of all ranks of TP3."""
STEP_END = "I"


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
        tmp_path_factory.mktemp("actor"),
        num_heads=3,
        num_kv_heads=3,
        hidden_size=96,
        intermediate_size=96,
        vocab_size=SHARDED_VOCAB,
    )
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_classifier(folder, actor, request.param)


def score(store, rank: int, config: Config, folder: Path, samples: list[Sample]) -> dict[str, torch.Tensor]:
    worker = RewardModelWorker(config, folder, rank, store, threads=1)
    microbatches = schedule([Lengths.of(SampleRef.of(sample)) for sample in samples], worker.packing)
    rank_batches = [RankBatch.of([SampleRef.of(sample, sample) for sample in samples], own) for own in microbatches]
    scores = worker.score_tokens(local_batch(rank_batches[worker.data_parallel_rank]))
    away = [not parameter.untyped_storage().nbytes() for parameter in worker.parameters().values()]
    assert all(away) if config.reward_model.offload else not any(away)
    return scores


def rewards_of(folder: Path, *overrides: str, samples: list[Sample] = SAMPLES) -> list[float]:
    """Return the rewards of the samples in order, from the token scores of the rank that reports each sample."""
    required = [f"reward_model.path={folder}", "reward_model.tokens_per_microbatch=80"]
    config = config_of(folder, *required, *overrides)
    ranks = run_ranks(config.reward_model.layout.world_size, score, config, folder, samples)
    assert sorted(name for rank in ranks for name in rank) == sorted(sample.id for sample in samples)
    scores = [next(rank[sample.id] for rank in ranks if sample.id in rank).tolist() for sample in samples]
    rule = classifier_reward(config, folder)
    return [rule.reward(sample, own).value for sample, own in zip(samples, scores, strict=True)]


def token_scores(model: torch.nn.Module, sample: Sample) -> list[float]:
    """Return the scores of the response's tokens. A sequence classifier scores only the last one."""
    with torch.no_grad():
        logits = model(torch.tensor(sample.token_ids[None]).long()).logits.flatten()
    return logits[-len(sample.response_ids) :].tolist()


@pytest.fixture(scope="module")
def plain_scores(reward_model) -> Expected[list[list[float]]]:
    """The samples' token scores, computed by transformers."""
    folder, model = reward_model
    return expected(partial(scores_of_samples, type(model), folder))


def scores_of_samples(kind: type, folder: Path) -> list[list[float]]:
    model = load(kind, folder)
    return [token_scores(model, sample) for sample in SHARDED]


def assert_same_rewards(rewards: list[float], exact: list[float], plain: list[float]) -> None:
    actual, *references = ({"rewards": torch.tensor(own, dtype=torch.float64)} for own in (rewards, exact, plain))
    assert_close(actual, *references, "rewards")


@pytest.mark.parametrize(
    ("layout", "offload"),
    [
        *(
            pytest.param(layout, "[]", marks=() if layout in ("PP2", "DP2", "CP2") else pytest.mark.exhaustive)
            for layout in LAYOUTS
        ),
        ("TP3, sequence parallel", "[parameters]"),
    ],
)
def test_scores_match_transformers(reward_model, plain_scores, layout, offload):
    keys = {"layout": LAYOUTS[layout], "offload": offload, "aggregation": "mean"}
    rewards = rewards_of(
        reward_model[0], *(f"reward_model.{key}={value}" for key, value in keys.items()), samples=SHARDED
    )
    exact, plain = ([*map(fmean, scores)] for scores in plain_scores)
    assert max(map(abs, exact)) > 0.1
    assert_same_rewards(rewards, exact, plain)


@pytest.mark.parametrize("reward_model", ["token"], indirect=True)
@pytest.mark.parametrize(
    ("aggregation", "combine"), [("mean", fmean), ("sum", sum), ("min", min), ("last", lambda scores: scores[-1])]
)
def test_steps_are_scored_at_their_end(reward_model, plain_scores, aggregation, combine):
    [marker] = tiny_tokenizer().encode(STEP_END)
    responses = [sample.response_ids.tolist() for sample in SHARDED]
    assert sum(ids.count(marker) for ids in responses) > 0

    def at_ends(scores: list[float], ids: list[int]) -> float:
        return combine([s for i, s in enumerate(scores) if ids[i] == marker or i == len(ids) - 1])

    keys = (f"reward_model.step_end={STEP_END}", f"reward_model.aggregation={aggregation}")
    rewards = rewards_of(reward_model[0], *keys, samples=SHARDED)
    exact, plain = (list(map(at_ends, scores, responses)) for scores in plain_scores)
    assert_same_rewards(rewards, exact, plain)
