"""A microbatch's tensors by hand, with and without a shared prompt."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.core.types import Baseline, CandidateIds, Prompt, Sample, SampleInfo, TrainingSample, VersionRun
from megarl.data.collate import collate
from megarl.data.packing import Lengths, bundle
from tests.packing import packing


def training_sample(name: str, prompt: str, prompt_ids: list[int], response: list[int], weight: float = 0.5):
    n = len(response)
    mask = tuple(i != 1 for i in range(n))  # the second token is masked out
    sample = Sample(
        id=name,
        prompt=Prompt(prompt, "", tuple(prompt_ids)),
        response_ids=tuple(response),
        response_logprobs=tuple(-0.1 * token for token in response),
        response_mask=mask,
        versions=(VersionRun(3, n),),
        finish_reason="stop",
        text="",
    )
    return TrainingSample(sample, reward=1.0, baseline=Baseline(0.25, 0.5), weight=weight)


def two_of_one_prompt():
    return [
        training_sample("a", "p", [11, 12, 13], [21, 22]),
        training_sample("b", "p", [11, 12, 13], [31, 32, 33], weight=0.25),
    ]


def test_prompt_of_two_samples_stands_once():
    batch = collate(two_of_one_prompt(), packing(1, True))
    assert batch.tokens.tolist() == [11, 12, 13, 21, 22, 31, 32, 33]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5]
    assert batch.document_tokens.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert batch.boundaries.tolist() == [0, 5, 11]
    assert batch.rows.tolist() == [2, 3, 2, 5, 6]  # the prompt's last token predicts both first tokens
    assert batch.targets.tolist() == [21, 22, 31, 32, 33]
    assert batch.row_sample.tolist() == [0, 0, 1, 1, 1]
    assert batch.mask.tolist() == [True, False, True, False, True]
    assert batch.weight.tolist() == [0.5, 0.0, 0.25, 0.0, 0.25]
    torch.testing.assert_close(batch.rollout_logprobs, -0.1 * batch.targets)


def test_prompt_of_two_samples_stands_twice():
    batch = collate(two_of_one_prompt(), packing(1, False))
    assert batch.tokens.tolist() == [11, 12, 13, 21, 22, 11, 12, 13, 31, 32, 33]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert batch.document_tokens.tolist() == list(range(11))
    assert batch.rows.tolist() == [2, 3, 7, 8, 9]


def test_kept_tokens_of_each_row_are_filled_up():
    one, other = two_of_one_prompt()
    one = replace(one, sample=replace(one.sample, candidate_ids=CandidateIds.of([(21, 7, 8), ()])))
    assert collate([other], packing(1, True)).candidate_ids is None
    batch = collate([one, other], packing(1, True))
    assert batch.candidate_ids.tolist() == [[21, 7, 8], *([[-1, -1, -1]] * 4)]
    assert batch.take_rows(torch.tensor([3, 0])).candidate_ids.tolist() == [[-1, -1, -1], [21, 7, 8]]
    assert collate([one, other], packing(1, True), truncates=False).candidate_ids is None


def test_prompts_are_told_apart_by_their_id():
    samples = [training_sample("a", "p", [11], [21]), training_sample("b", "q", [11], [22])]
    assert collate(samples, packing(1, True)).tokens.tolist() == [11, 21, 11, 22]


def test_padding_is_one_document_without_rows():
    batch = collate(two_of_one_prompt(), packing(3, True))
    assert len(batch.tokens) == 9
    assert batch.boundaries.tolist() == [0, 5, 11, 12]
    assert batch.document_tokens.tolist()[-1] == 8
    assert len(batch.rows) == 5


def test_an_empty_microbatch_is_padding():
    batch = collate([], packing(4, True))
    assert batch.tokens.tolist() == [0] * 4
    assert len(batch.rows) == len(batch.reward) == 0


def test_scores_follow_their_samples():
    scores = {"b": torch.tensor([1.0, 2.0, 3.0]), "a": torch.tensor([4.0, 5.0])}
    batch = collate(two_of_one_prompt(), packing(1, True), old=scores)
    assert batch.old.tolist() == [4.0, 5.0, 1.0, 2.0, 3.0]
    assert batch.reference is None


def test_every_row_is_of_a_sample():
    batch = collate(two_of_one_prompt(), packing(1, True))
    with pytest.raises(AssertionError, match="a row of no sample"):
        replace(batch, row_sample=batch.row_sample + 1).validate()


def routed(item, routes):
    return replace(item, sample=replace(item.sample, routes=np.array(routes, np.int8).reshape(-1, 1, 2)))


def test_routes_lie_where_their_tokens_do():
    """A sample without any is replayed nowhere, and neither is padding."""
    first, second = two_of_one_prompt()
    batch = collate([routed(first, [[k, k + 1] for k in range(5)]), second], packing(4, False))
    places = batch.document_tokens.tolist()
    assert batch.routes[places[:5]].tolist() == [[[k, k + 1]] for k in range(5)]
    assert batch.routes[places[5:]].tolist() == [[[-1, -1]]] * 7
    assert collate([first, second], packing(4, False)).routes is None
    assert collate([routed(first, [[0, 1]] * 5)], packing(4, False), replays=False).routes is None


@pytest.mark.parametrize("alike", [True, False])
def test_a_prompt_is_shared_where_its_tokens_go_to_the_same_experts(alike):
    """The driver counts on the same tokens as the rank that packs them."""
    one, other = [[[1, 2]] * 5, [[1, 2] if alike else [2, 3]] + [[1, 2]] * 5]
    samples = [routed(item, routes) for item, routes in zip(two_of_one_prompt(), (one, other), strict=True)]
    batch = collate(samples, packing(1, True))
    assert len(batch.tokens) == (8 if alike else 11)
    [counted] = bundle([Lengths.of(SampleInfo.of(item.sample)) for item in samples], packing(1, True))[:1]
    assert counted.num_tokens == (8 if alike else 5)
