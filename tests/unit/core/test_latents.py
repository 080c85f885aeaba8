from __future__ import annotations

import pickle

import numpy as np
import pytest

from megarl.core.completion import VersionRun
from megarl.core.latents import Conditioning, LatentSample, canaries
from megarl.core.prompt import Prompt


def sample(**changes) -> LatentSample:
    fields = dict(
        id="0.0.1",
        prompt=Prompt("0", "a cat", ()),
        sigmas=[1, 0.8, 0.5, 0],
        steps=[0, 1],
        latents=np.arange(36.0).reshape(3, 1, 3, 4),
        logprobs=[-1, -2],
        versions=(VersionRun(3, 1), VersionRun(4, 2)),
        embedding=Conditioning(np.ones((5, 2)), np.ones(3)),
        empty_embedding=None,
        num_tokens=64,
    )
    return LatentSample(**fields | changes)


def test_sample_has_fixed_dtypes_and_read_only_arrays():
    item = sample(image=np.zeros((6, 8, 3)))
    dtypes = [getattr(item, name).dtype for name in ("sigmas", "steps", "latents", "logprobs", "image")]
    assert dtypes == [np.float64, np.int32, np.float32, np.float32, np.uint8]
    for array in (item.latents, item.embedding.tokens, item.embedding.pooled):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert item.embedding.tokens.dtype == item.embedding.pooled.dtype == np.float32


def test_sample_survives_pickling():
    copy = pickle.loads(pickle.dumps(sample()))
    assert copy == sample() and copy.latents.dtype == np.float32
    assert copy != sample(logprobs=[-1, -3])
    assert copy != sample(embedding=Conditioning(np.ones((5, 2)), np.zeros(3)))
    assert copy != sample(embedding=Conditioning(np.ones((5, 2))))


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": [-1]},
        {"latents": np.zeros((2, 1, 3, 4))},
        {"versions": (VersionRun(3, 2),)},
        {"steps": [], "logprobs": []},
        {"latents": np.zeros((3, 12))},
        {"latents": np.zeros((0, 1, 3, 4)), "logprobs": []},
        {"latents": np.zeros((0, 1, 3, 4)), "final": np.zeros((1, 3, 4))},
    ],
)
def test_inconsistent_sample_is_refused(changes):
    with pytest.raises(AssertionError):
        sample(**changes)


def test_noised_sample_has_only_its_final_latents():
    item = sample(steps=[0, 2], latents=np.zeros((0, 1, 3, 4)), logprobs=[], final=np.zeros((1, 3, 4)))
    assert item.is_noised and item.ref.num_trained_tokens == 2
    assert not sample(final=np.zeros((1, 3, 4))).is_noised


def test_canaries_are_fixed_and_differ_in_size():
    inputs = canaries(channels=4, caption_channels=6, patch=2)
    assert inputs == canaries(channels=4, caption_channels=6, patch=2)
    assert all(item.caption.pooled is None for item in inputs)
    assert all(item.caption.pooled.shape == (3,) for item in canaries(4, 6, 2, pooled_channels=3))
    assert len({(item.latents.shape, item.caption.tokens.shape) for item in inputs}) == len(inputs)
