"""Batches for data-parallel ranks: samples by reference, and their microbatches.

Only functions that use Ray's object store import Ray, so that one rank can train without it.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from megarl.core.latents import AnySample, LatentSample
from megarl.core.sample import Sample, SampleRef
from megarl.data.packing import Lengths, Microbatch, Packing, schedule

if TYPE_CHECKING:
    import numpy as np
    import ray
    import torch
    from numpy.typing import NDArray

    from megarl.data.local_batch import LocalBatch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoreRef:
    """A sample's slice [begin, end) in an object that holds the scores for many samples. Storing each sample's scores
    in a separate object would take a millisecond per sample."""

    scores: ray.ObjectRef
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


Scores = dict[str, ScoreRef]
"""References to a model's scores: sample id -> float32 [R] for response tokens, [R, h] for a teacher's hidden states,
float32 [R, 2k + 1] for its packed TopTokens, or int64 [A] for a judge's answers."""

Replacement: TypeAlias = "NDArray[np.int32] | ScoreRef"
"""Token ids that replace those of a prompt in a pass, int32 [P], or a reference to them."""


@dataclass(frozen=True, slots=True)
class StoredStates:
    """A sample's hidden states or TopTokens in Ray's object store, as bytes so that readers map them without a copy.

    Attributes:
        content: uint8 [R, bytes of a row].
        dtype: the dtype of the states, such as "bfloat16". NumPy has no such dtype.
    """

    content: NDArray[np.uint8]
    dtype: str

    @classmethod
    def of(cls, states: torch.Tensor) -> StoredStates:
        import torch

        return cls(states.contiguous().view(torch.uint8).numpy(), str(states.dtype).removeprefix("torch."))

    @property
    def states(self) -> torch.Tensor:
        import torch

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(self.content).view(getattr(torch, self.dtype))


def put_scores(scores: Mapping[str, torch.Tensor | NDArray[Any] | Sequence[float]]) -> Scores:
    """Put scores into Ray's object store. They stay there while a reference to any of them exists. Each sample's hidden
    states are a separate object, because they are large, and a rank fetches only those of its own samples."""
    if not scores:
        return {}
    import ray
    import torch

    tensors = {sample: torch.as_tensor(values) for sample, values in scores.items()}
    if next(iter(tensors.values())).dim() == 2:
        return {id: ScoreRef(ray.put(StoredStates.of(states)), 0, len(states)) for id, states in tensors.items()}
    ref = ray.put(torch.cat(list(tensors.values())))
    ends = list(accumulate(map(len, scores.values())))
    return {sample: ScoreRef(ref, begin, end) for sample, begin, end in zip(scores, [0, *ends[:-1]], ends, strict=True)}


def get_scores(scores: Scores) -> dict[str, torch.Tensor]:
    """Fetch the scores, by sample id."""
    fetched = _get(part.scores for part in scores.values())
    return {sample: fetched[part.scores][part.begin : part.end] for sample, part in scores.items()}


def join_by_sample(parts: Sequence[Mapping[str, T]]) -> dict[str, T]:
    """Merge scores or other results by sample id from several processes."""
    return {sample: value for part in parts for sample, value in part.items()}


def join_named_scores(parts: Sequence[Mapping[str, Scores]]) -> dict[str, Scores]:
    """Merge scores from several processes, separately for each name."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: join_by_sample([part.get(name, {}) for part in parts]) for name in names}


def put_sample(sample: AnySample, images: dict[str, ray.ObjectRef] | None = None) -> SampleRef:
    """Put the sample into Ray's object store. It stays there while a reference to it exists. Encoded images become
    separate objects.

    Args:
        images: cache of references by digest, updated in place. Pass the same dict to store equal images once.
    """
    import ray

    if isinstance(sample, LatentSample):
        trained = SampleRef.of(sample, ray.put(sample.for_training))
        return replace(trained, pictured=ray.put(sample.for_rewards))
    known, files = {} if images is None else images, []
    for image in sample.images:
        if isinstance(image.file, bytes) and image.digest not in known:
            known[image.digest] = ray.put(image.file)
        files.append(known[image.digest] if isinstance(image.file, bytes) else image.file)
    found = SampleRef.of(sample, ray.put(sample.without_files))
    if not any(file is not None for file in files):
        return found
    assert None not in files, f"sample {sample.id} has images with and without files"
    return replace(found, image_files=tuple(files))


def put_samples(samples: Sequence[AnySample]) -> list[SampleRef]:
    """Put samples into the object store. Equal images are stored once."""
    images: dict[str, ray.ObjectRef] = {}
    return [put_sample(sample, images) for sample in samples]


def get_samples(refs: Sequence[SampleRef]) -> list[AnySample]:
    """Fetch whole samples, without encoded images."""
    fetched = _get(part for ref in refs for part in (ref.sample, ref.scored))
    images = (None if ref.pictured is None else fetched[ref.pictured].image for ref in refs)
    samples = (fetched[ref.sample] for ref in refs)
    return [
        sample if image is None else replace(sample, image=image) for sample, image in zip(samples, images, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One data-parallel rank's part of an update or a forward-only pass. Microbatches index into its samples.
    `privileged`: sample id -> token ids that replace the prompt's in this pass; empty: none are replaced."""

    samples: tuple[SampleRef, ...]
    microbatches: tuple[Microbatch, ...]
    privileged: Mapping[str, Replacement] = field(default_factory=dict, compare=False)

    @classmethod
    def split(
        cls, samples: Sequence[SampleRef], packing: Packing, units: Sequence[Sequence[int]] | None = None
    ) -> list[RankBatch]:
        """Return the batches of all data-parallel ranks. See `schedule`."""
        return [cls.of(samples, members) for members in schedule(list(map(Lengths.of, samples)), packing, units)]

    @classmethod
    def split_privileged(
        cls,
        samples: Sequence[SampleRef],
        packing: Packing,
        privileged: Mapping[str, Replacement],
    ) -> list[RankBatch]:
        """Return the batches for a pass with all prompts replaced by these token ids, given by sample id. Samples of a
        prompt share the prefix if its ids are passed by value instead of by reference. Expert routes are dropped,
        because the engine chose them for the original prompts."""

        def replaced(item: SampleRef) -> SampleRef:
            ids = privileged[item.id]
            beginning = zlib.crc32(item.id.encode()) if isinstance(ids, ScoreRef) else 0
            return replace(item, num_prompt_tokens=len(ids), beginning=beginning)

        batches = cls.split(list(map(replaced, samples)), packing)
        return [
            replace(batch, privileged={item.id: privileged[item.id] for item in batch.samples}) for batch in batches
        ]

    @classmethod
    def of(cls, sample_refs: Sequence[SampleRef], microbatches: Sequence[Microbatch]) -> RankBatch:
        """Return a rank's batch with only the samples in its microbatches. microbatches: indices into sample_refs."""
        indices = sorted(index for microbatch in microbatches for index in microbatch)
        position = {index: i for i, index in enumerate(indices)}
        return cls(
            samples=tuple(sample_refs[index] for index in indices),
            microbatches=tuple(tuple(position[index] for index in members) for members in microbatches),
        )

    def add_scores(self, name: str, scores: Scores) -> RankBatch:
        """Return the same batch with an additional model's token scores under this name."""
        samples = [replace(item, scores={**item.scores, name: scores[item.id]}) for item in self.samples]
        return replace(self, samples=tuple(samples))

    @property
    def key(self) -> tuple:
        """A key that is equal for batches with the same samples and microbatches, even if rewards or scores differ."""
        return tuple(item.sample for item in self.samples), self.microbatches

    def fetch_samples(self, samples: Sequence[Sample] | None = None, with_files: bool = True) -> list[SampleRef]:
        """Fetch all objects referenced by the batch in one call. Return its samples with the objects in place of the
        references.

        Args:
            samples: the batch's samples if already fetched; None: fetch them.
            with_files: whether to fetch encoded images. Privileged prompts contain no images.
        """
        with_files = with_files and not self.privileged
        wanted = [part.scores for item in self.samples for part in item.scores.values()]
        wanted += [ids.scores for ids in self.privileged.values() if isinstance(ids, ScoreRef)]
        unfetched = self.samples if samples is None else ()
        images = [item.image_files if with_files else () for item in unfetched]
        parts = [part for item, refs in zip(unfetched, images, strict=True) for part in (item.sample, *refs)]
        fetched = _get([*parts, *wanted])
        if samples is None:
            pairs = zip(self.samples, images, strict=True)
            samples = [with_images(fetched[item.sample], [fetched[ref] for ref in refs]) for item, refs in pairs]
        if self.privileged:
            ids = {
                name: fetched[part.scores][part.begin : part.end].numpy() if isinstance(part, ScoreRef) else part
                for name, part in self.privileged.items()
            }
            samples = [with_prompt(sample, ids[sample.id]) for sample in samples]
        scores = [
            {name: fetched[part.scores][part.begin : part.end] for name, part in item.scores.items()}
            for item in self.samples
        ]
        rows = zip(self.samples, samples, scores, strict=True)
        return [replace(item, sample=sample, scores=part) for item, sample, part in rows]

    def fetch(self, with_files: bool = True) -> LocalBatch:
        """Fetch the batch; see `fetch_samples`."""
        from megarl.data.local_batch import LocalBatch

        return LocalBatch(self.fetch_samples(with_files=with_files), self.microbatches)


Updates = Sequence[Sequence[RankBatch]]
"""Each update's batches, one per data-parallel rank."""


def add_scores(updates: Updates, scores: Mapping[str, Scores]) -> list[list[RankBatch]]:
    """Return the same batches with additional token scores from other models, keyed by their names in TokenBatch."""
    return [[reduce(lambda b, item: b.add_scores(*item), scores.items(), batch) for batch in u] for u in updates]


class FetchedBatches:
    """The batches that a rank has fetched in this epoch, so that passes and updates fetch a sample only once."""

    def __init__(self) -> None:
        self._fetched: dict[tuple, tuple[RankBatch, LocalBatch]] = {}

    def fetch(self, rank_batch: RankBatch, with_files: bool = True) -> LocalBatch:
        """Return the batch. `with_files`: whether the rank needs encoded images."""
        if rank_batch.privileged:
            return rank_batch.fetch()
        earlier, batch = self._fetched.get(rank_batch.key, (None, None))
        if batch is None:
            batch = rank_batch.fetch(with_files)
        elif earlier != rank_batch:  # rewards, baselines or scores were added since the earlier fetch
            batch = batch.renewed(rank_batch.fetch_samples([item.sample for item in batch.samples], with_files=False))
        self._fetched[rank_batch.key] = rank_batch, batch
        return batch

    def clear(self) -> None:
        """Drop all batches at the end of an epoch."""
        self._fetched.clear()


def with_prompt(sample: Sample, token_ids: NDArray[np.int32]) -> Sample:
    """Return the sample with the token ids of its prompt replaced, int32 [P], and its images and routes removed."""
    prompt = replace(sample.prompt, token_ids=token_ids, images=())
    return replace(sample, prompt=prompt, response_images=(), routes=None)


def with_images(sample: Sample, files: Sequence[Any]) -> Sample:
    """Attach encoded images, or references to them, to the sample's images. Without `files`, return the sample
    unchanged."""
    return sample.with_files(files) if files else sample


def _get(refs: Iterable[ray.ObjectRef]) -> dict[ray.ObjectRef, Any]:
    unique = list(dict.fromkeys(refs))
    if not unique:
        return {}
    import ray

    values = (value.states if isinstance(value, StoredStates) else value for value in ray.get(unique))
    return dict(zip(unique, values, strict=True))
