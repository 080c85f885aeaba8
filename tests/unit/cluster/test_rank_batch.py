"""A rank fetches and collates each batch once per step."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch

from megarl.cluster.rank_batch import FetchedBatches, RankBatch, ScoreRef, get_scores, put_samples, put_scores
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample, SampleRef
from megarl.core.score import Baseline
from megarl.data import local_batch
from megarl.data.collate import collate
from tests.packing import packing

SAMPLES = {
    f"ref {i}": Sample(
        f"{i}", Prompt("p", "", [7, 8]), [5] * i, [-1.0] * i, [True] * i, (VersionRun(0, i),), "stop", ""
    )
    for i in range(1, 5)
}
VALUES = {f"{i}": torch.full((i,), float(i)) for i in range(1, 5)}
BLOCKS = {"values": torch.cat([*VALUES.values()])}
PARTS = {
    "1": ScoreRef("values", 0, 1),
    "2": ScoreRef("values", 1, 3),
    "3": ScoreRef("values", 3, 6),
    "4": ScoreRef("values", 6, 10),
}
BATCH = RankBatch(tuple(SampleRef.of(sample, ref) for ref, sample in SAMPLES.items()), ((0, 3), (1, 2)))


def scored(batch: RankBatch) -> RankBatch:
    """Return the same samples with additional scores."""
    samples = [
        replace(item, scalar_reward=float(i), baseline=Baseline(0.5), weight=0.1 * i, scores={"values": PARTS[f"{i}"]})
        for i, item in enumerate(batch.samples, start=1)
    ]
    return replace(batch, samples=tuple(samples))


@pytest.fixture
def store(monkeypatch) -> list[list[str]]:
    """Replace Ray's object store and record the requested references of each call."""
    calls: list[list[str]] = []

    def get(refs: Sequence[str]):
        calls.append([*refs])
        return [(SAMPLES | BLOCKS)[ref] for ref in refs]

    monkeypatch.setattr(ray, "get", get)
    return calls


@pytest.fixture
def collated(monkeypatch) -> list[int]:
    """The number of samples of each collated microbatch."""
    counts: list[int] = []
    monkeypatch.setattr(
        local_batch, "collate", lambda samples, *rest: counts.append(len(samples)) or collate(samples, *rest)
    )
    return counts


def token_batches(batch: local_batch.LocalBatch):
    return batch.token_batches(packing(), "states", True, True, torch.device("cpu"))


def test_scores_of_a_pass_are_one_object(monkeypatch):
    put: list[torch.Tensor] = []
    monkeypatch.setattr(ray, "put", lambda scores: put.append(scores) or "values")
    assert put_scores(VALUES) == PARTS
    [scores] = put
    assert torch.equal(scores, BLOCKS["values"])
    assert put_scores({}) == {} and len(put) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_hidden_states_of_a_sample_are_read_without_copying(monkeypatch, dtype):
    """Each sample's states are an object whose bytes pickle does not copy."""
    stored: list[tuple[bytes, list[pickle.PickleBuffer]]] = []

    def put(value):
        buffers: list[pickle.PickleBuffer] = []
        stored.append((pickle.dumps(value, 5, buffer_callback=buffers.append), buffers))
        return len(stored) - 1

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(ray, "get", lambda refs: [pickle.loads(stored[i][0], buffers=stored[i][1]) for i in refs])
    states = {name: torch.randn(n, 6).to(dtype) for name, n in (("1", 1), ("3", 3))}
    parts = put_scores(states)
    assert parts == {"1": ScoreRef(0, 0, 1), "3": ScoreRef(1, 0, 3)}
    fetched = get_scores(parts)
    for name, values in states.items():
        assert fetched[name].dtype == dtype and torch.equal(fetched[name], values)
        assert fetched[name].data_ptr() == values.data_ptr()


def test_images_are_fetched_once_with_their_samples(store, monkeypatch):
    """Two samples of a prompt share its images."""
    images = tuple(PromptImage(i, 1, (1, 2, 2), digest) for i, digest in enumerate("aba"))
    stored = {
        ref: replace(SAMPLES[ref], prompt=Prompt("p", "", [9, 9, 9], images=images)) for ref in ("ref 1", "ref 2")
    }
    files = {"a ref": b"a", "b ref": b"b"}
    monkeypatch.setattr(ray, "get", lambda refs: store.append([*refs]) or [(stored | files)[ref] for ref in refs])
    refs = [
        replace(SampleRef.of(sample, ref), image_files=("a ref", "b ref", "a ref")) for ref, sample in stored.items()
    ]
    fetched = RankBatch(tuple(refs), ((0, 1),)).fetch_samples()
    assert store == [["ref 1", "a ref", "b ref", "ref 2"]]
    for item in fetched:
        assert [image.file for image in item.sample.prompt.images] == [b"a", b"b", b"a"]
    assert all(image.file is None for sample in stored.values() for image in sample.prompt.images)
    store.clear()
    batch = RankBatch(tuple(refs), ((0, 1),))
    without = FetchedBatches().fetch(batch, with_files=False)
    assert all(image.file is None for item in without.samples for image in item.sample.prompt.images)
    replace(batch, privileged={sample.id: np.array([7], np.int32) for sample in stored.values()}).fetch()
    assert store == [["ref 1", "ref 2"]] * 2


def test_images_of_environments_are_stored_apart_once(monkeypatch):
    """Images loaded from a file are bytes; all others are references. Images of the data are attached later."""
    stored = []
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or f"ref {len(stored)}")
    a, b = (PromptImage(0, 1, (1, 2, 2), digest, file) for digest, file in (("a", b"a"), ("b", "ref of b")))
    prompt, response = Prompt("p", "", [9], images=(a,)), replace(b, start=1)
    samples = [replace(SAMPLES[name], prompt=prompt, response_images=(response,)) for name in ("ref 1", "ref 2")]
    refs = put_samples(samples)
    assert [ref.image_files for ref in refs] == [("ref 1", "ref of b")] * 2
    assert stored[0] == b"a" and all(image.file is None for sample in stored[1:] for image in sample.images)
    plain = put_samples([samples[0].without_files])[0]
    assert plain.image_files == () and stored[-1] == stored[1]
    with pytest.raises(AssertionError, match="sample 1 has images with and without files"):
        put_samples([replace(samples[0], response_images=(replace(response, file=None),))])


def test_all_objects_of_a_batch_are_fetched_in_one_call(store):
    fetched = scored(BATCH).fetch()
    assert store == [[*SAMPLES, *BLOCKS]]
    assert [item.sample.id for item in fetched.samples] == ["1", "2", "3", "4"]
    assert [item.scores["values"].tolist() for item in fetched.samples] == [own.tolist() for own in VALUES.values()]
    assert [[item.sample.id for item in members] for members in fetched.members] == [["1", "4"], ["2", "3"]]


def test_batch_is_fetched_and_collated_once_per_step(store, collated):
    batches = FetchedBatches()
    first = token_batches(batches.fetch(BATCH))
    assert token_batches(batches.fetch(replace(BATCH))) is first  # an equal copy, as if deserialized
    assert store == [[*SAMPLES]] and collated == [2, 2]
    batches.clear()
    batches.fetch(BATCH)
    assert len(store) == 2


def test_later_scores_are_added_to_the_collated_batch(store, collated):
    batches = FetchedBatches()
    token_batches(batches.fetch(BATCH))
    later = batches.fetch(scored(BATCH))
    ours = token_batches(later)
    assert store == [[*SAMPLES], [*BLOCKS]] and collated == [2, 2]
    for own, members in zip(ours, later.members, strict=True):
        anew = collate(members, packing())
        for name in ("tokens", "weight", "imitation_weight", "reward", "baseline", "scale", "token_baseline"):
            assert torch.equal(getattr(own, name), getattr(anew, name)), name
    assert [item.scores["values"].tolist() for item in later.samples] == [own.tolist() for own in VALUES.values()]


def test_different_microbatches_make_a_different_batch(store):
    batches = FetchedBatches()
    fetched = [batches.fetch(replace(BATCH, microbatches=order)) for order in (((0, 1), (2, 3)), ((0, 2), (1, 3)))]
    assert [[item.sample.id for item in members] for members in fetched[1].members] == [["1", "3"], ["2", "4"]]
    assert fetched[0] is not fetched[1]


def test_rank_without_samples_fetches_nothing(store):
    fetched = RankBatch((), ((), ())).fetch()
    assert store == [] and [len(batch.rows) for batch in token_batches(fetched)] == [0, 0]
