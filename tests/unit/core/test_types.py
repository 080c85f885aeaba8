"""Samples: what one is made of, and what it is after a journey between two processes."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from megarl.core.types import CandidateIds, Prompt, Sample, SampleInfo, VersionRun

SOURCE = np.random.default_rng(0)


def sample(num_tokens: int, **changes) -> Sample:
    fields = dict(
        id="1.0.0",
        prompt=Prompt("p", "", SOURCE.integers(150_000, size=10)),
        response_ids=SOURCE.integers(150_000, size=num_tokens),
        response_logprobs=-SOURCE.random(num_tokens, np.float32),
        response_mask=SOURCE.random(num_tokens) < 0.7,
        versions=(VersionRun(3, num_tokens),),
        finish_reason="stop",
        text="",
    )
    return Sample(**(fields | changes))


@pytest.mark.parametrize("num_tokens", [0, 1, 8, 1003])
@pytest.mark.parametrize("protocol", [4, 5])
def test_a_sample_travels_as_it_is(num_tokens, protocol):
    kept = CandidateIds.of([SOURCE.integers(99, size=SOURCE.integers(4)) for _ in range(num_tokens)])
    sent = sample(num_tokens, candidate_ids=kept)
    came = pickle.loads(pickle.dumps(sent, protocol))
    assert came == sent and hash(came) == hash(sent)
    for name, dtype in (("response_ids", np.int32), ("response_logprobs", np.float32), ("response_mask", np.bool_)):
        assert getattr(came, name).dtype == dtype and not getattr(came, name).flags.writeable
    assert not came.prompt.token_ids.flags.writeable and not came.candidate_ids.ids.flags.writeable


@pytest.mark.parametrize("num_tokens", [1000, 2000, 8000])
def test_a_response_costs_at_most_nine_bytes_a_token(num_tokens):
    assert len(pickle.dumps(sample(num_tokens), 5)) <= 9 * num_tokens


def test_samples_of_a_group_that_travel_together_share_their_prompt():
    prompt = Prompt("p", "", SOURCE.integers(150_000, size=5000))
    sent = pickle.dumps([sample(10, prompt=prompt) for _ in range(8)], 5)
    assert len(sent) < 2 * 4 * 5000
    came = pickle.loads(sent)
    assert all(other.prompt is came[0].prompt for other in came)


def test_nobody_writes_into_a_sample_nor_does_it_into_what_it_was_given():
    ids = np.arange(3, dtype=np.int32)
    made = sample(3, response_ids=ids)
    with pytest.raises(ValueError, match="read-only"):
        made.response_ids[0] = 7
    ids[0] = 0


def test_samples_differ_where_any_of_their_tokens_does():
    one = sample(4)
    assert one == replace(one)
    assert one != replace(one, response_mask=~one.response_mask)
    assert one != replace(one, prompt=Prompt("p", "", [1, 2]))
    assert one != replace(one, candidate_ids=CandidateIds.none(4))


def test_candidates_are_given_token_by_token():
    kept = CandidateIds.of([(21, 7, 8), (), (3,)])
    assert kept.offsets.tolist() == [0, 3, 3, 4] and len(kept) == 3
    assert [ids.tolist() for ids in kept] == [[21, 7, 8], [], [3]]
    assert [ids.tolist() for ids in CandidateIds.none(2)] == [[], []]
    assert list(CandidateIds.none(0)) == []


def test_a_sample_whose_parts_differ_in_length_is_a_bug():
    with pytest.raises(AssertionError, match="differ in length"):
        sample(3, response_mask=[True])
    with pytest.raises(AssertionError, match="differ in length"):
        sample(3, candidate_ids=CandidateIds.none(2))


def test_the_driver_counts_trained_tokens():
    info = SampleInfo.of(sample(3, response_mask=[True, False, True]))
    assert info.num_trained_tokens == 2 and type(info.num_trained_tokens) is int
