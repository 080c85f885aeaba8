"""Samples: their validation and their pickling."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from megarl.core.completion import CandidateIds, VersionRun
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample, SampleRef

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
def test_sample_survives_pickling(num_tokens, protocol):
    candidates = CandidateIds.of([SOURCE.integers(99, size=SOURCE.integers(4)) for _ in range(num_tokens)])
    original = sample(num_tokens, candidate_ids=candidates)
    restored = pickle.loads(pickle.dumps(original, protocol))
    assert restored == original and hash(restored) == hash(original)
    for name, dtype in (("response_ids", np.int32), ("response_logprobs", np.float32), ("response_mask", np.bool_)):
        assert getattr(restored, name).dtype == dtype and not getattr(restored, name).flags.writeable
    assert not restored.prompt.token_ids.flags.writeable and not restored.candidate_ids.ids.flags.writeable


@pytest.mark.parametrize("num_tokens", [1000, 2000, 8000])
def test_pickled_sample_takes_at_most_nine_bytes_per_token(num_tokens):
    assert len(pickle.dumps(sample(num_tokens), 5)) <= 9 * num_tokens


def test_samples_pickled_together_share_their_prompt():
    prompt = Prompt("p", "", SOURCE.integers(150_000, size=5000))
    pickled = pickle.dumps([sample(10, prompt=prompt) for _ in range(8)], 5)
    assert len(pickled) < 2 * 4 * 5000
    restored = pickle.loads(pickled)
    assert all(other.prompt is restored[0].prompt for other in restored)


def test_images_must_be_in_their_part_of_the_sample():
    prompt, response = PromptImage(8, 2, (1, 2, 4), "a"), PromptImage(10, 2, (1, 2, 4), "b")
    ids = Prompt("p", "", range(10), images=(prompt,))
    assert sample(2, prompt=ids, response_images=(response,)).images == (prompt, response)
    for wrong in (dict(prompt=replace(ids, images=(replace(prompt, start=9),))), dict(response_images=(prompt,))):
        with pytest.raises(AssertionError, match=r"an image is in prompt\.images instead"):
            sample(2, **wrong)


def test_sample_arrays_are_read_only_but_their_sources_are_not():
    ids = np.arange(3, dtype=np.int32)
    frozen = sample(3, response_ids=ids)
    with pytest.raises(ValueError, match="read-only"):
        frozen.response_ids[0] = 7
    ids[0] = 0


def test_samples_with_different_tokens_are_not_equal():
    one = sample(4)
    assert one == replace(one)
    assert one != replace(one, response_mask=~one.response_mask)
    assert one != replace(one, prompt=Prompt("p", "", [1, 2]))
    assert one != replace(one, candidate_ids=CandidateIds.none(4))


def test_candidate_ids_of_lists_round_trips():
    candidates = CandidateIds.of([(21, 7, 8), (), (3,)])
    assert candidates.offsets.tolist() == [0, 3, 3, 4] and len(candidates) == 3
    assert [ids.tolist() for ids in candidates] == [[21, 7, 8], [], [3]]
    assert [ids.tolist() for ids in CandidateIds.none(2)] == [[], []]
    assert list(CandidateIds.none(0)) == []


def test_sample_with_fields_of_different_lengths_fails():
    with pytest.raises(AssertionError, match="differ in length"):
        sample(3, response_mask=[True])
    with pytest.raises(AssertionError, match="differ in length"):
        sample(3, candidate_ids=CandidateIds.none(2))


def test_sample_info_counts_trained_tokens():
    info = SampleRef.of(sample(3, response_mask=[True, False, True]))
    assert info.num_trained_tokens == 2 and type(info.num_trained_tokens) is int
