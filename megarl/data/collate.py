"""Collates training samples into the tensors of one microbatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.algorithms.kl import UNSCORED
from megarl.algorithms.returns import turns_of
from megarl.core.completion import NO_ROUTE, CandidateIds
from megarl.core.prompt_images import PromptImage
from megarl.core.row_batch import PARTIAL_SCORES, TEACHER
from megarl.core.sample import Sample, SampleRef
from megarl.core.token_batch import ImageBatch, TeacherStates, TokenBatch
from megarl.data.packing import Packing, round_up
from megarl.data.prefixes import place_runs
from megarl.data.rotary_positions import rotary_positions

PADDING = 0
"""Token id used as padding. Any id works, since no trained token attends to it."""

NO_TOKEN = -1
"""Padding id in rows of `TokenBatch.candidate_ids`."""

Reads = Literal["states", "tokens"]
"""The position in the pack at which a head reads the hidden state for a response token: `states` is the preceding
position, whose hidden state predicts the token; `tokens` is the token's own position."""

TokenScores = Mapping[str, Mapping[str, torch.Tensor]]
"""Per-token scores from passes and other models: field name of TokenBatch (old, …) or teacher/NAME -> sample id ->
float32 [R]."""

Pixels = Callable[[PromptImage], torch.Tensor]
"""Computes the normalized patches of an image, float32 [P, channels · time · height · width of a patch]."""


def collate(
    samples: Sequence[SampleRef],
    packing: Packing,
    reads: Reads = "states",
    truncates: bool = True,
    replays: bool = True,
    pixels: Pixels | None = None,
    **scores: Mapping[str, torch.Tensor],
) -> TokenBatch:
    """Pack samples back to back. One padding document at the end rounds T up to `packing.pack_multiple`.

    Args:
        samples: may be empty; the microbatch then consists of padding.
        truncates: whether log-probs are normalized over the engine's candidate tokens only.
        replays: whether to replay the engine's expert routes.
        pixels: computes an image's patches; None on ranks without a vision tower.
        scores: as in TokenScores.
    """
    members = [item.sample for item in samples]
    layout = _Layout.of(members, packing)
    lengths = [len(sample.response_ids) for sample in members]
    mask = torch.from_numpy(_concatenate((sample.response_mask for sample in members), np.bool_))
    row_sample = torch.from_numpy(np.repeat(np.arange(len(samples)), lengths))
    batch = TokenBatch(
        tokens=torch.from_numpy(layout.tokens(members)),
        positions=torch.from_numpy(layout.positions()),
        document_tokens=torch.from_numpy(layout.document_tokens),
        boundaries=torch.from_numpy(layout.boundaries.astype(np.int32)),
        rows=torch.from_numpy(layout.rows(reads)),
        targets=torch.from_numpy(_concatenate((sample.response_ids for sample in members), np.int64)),
        row_sample=row_sample,
        rollout_logprobs=torch.from_numpy(_concatenate((sample.response_logprobs for sample in members), np.float32)),
        mask=mask,
        stale=torch.tensor([item.is_stale for item in samples]) if any(item.is_stale for item in samples) else None,
        given=torch.tensor([item.is_given for item in samples]) if any(item.is_given for item in samples) else None,
        candidate_ids=_candidate_ids(members) if truncates else None,
        labels=_labels(members),
        rotary_positions=layout.rotary_positions(members),
        images=None if pixels is None else layout.images(members, pixels),
        routes=layout.routes(members) if replays else None,
        **scalars(samples, row_sample, mask),
    )
    batch = add_scores(batch, samples, scores)
    batch.validate()
    return batch


def add_scalars(batch: TokenBatch, samples: Sequence[SampleRef]) -> TokenBatch:
    """Return the batch with the current rewards, baselines and weights of its samples."""
    return replace(batch, **scalars(samples, batch.row_sample, batch.mask))


def add_scores(batch: TokenBatch, samples: Sequence[SampleRef], scores: TokenScores) -> TokenBatch:
    """Return the batch with per-token scores of its samples added. The teachers' log-probs become the columns of one
    field. Rows of a sample without scores in PARTIAL_SCORES are UNSCORED by teachers, and have a NaN reward."""
    device = batch.tokens.device

    def joined(token_scores: Mapping[str, torch.Tensor], default: float | None = None) -> torch.Tensor:
        parts = [
            token_scores[item.sample.id].to(device)
            if default is None or item.sample.id in token_scores
            else torch.full((len(item.sample.response_ids),), default, device=device)
            for item in samples
        ]
        return torch.cat([torch.empty(0, device=device), *parts])

    fields = {
        name: joined(values, math.nan if name in PARTIAL_SCORES else None)
        for name, values in scores.items()
        if not name.startswith(TEACHER)
    }
    teachers = [joined(values, UNSCORED) for name, values in scores.items() if name.startswith(TEACHER)]
    if teachers:
        fields["teachers"] = torch.stack(teachers, -1)
    return replace(batch, **fields)


def teacher_states(samples: Sequence[SampleRef], states: Mapping[str, torch.Tensor]) -> TeacherStates:
    """Return a teacher's hidden states or most probable tokens for a microbatch of these samples. `states`: sample id
    -> [R, h] or [R, 2k + 1] in host memory; absent for samples that the teacher does not score."""
    is_scored = [item.sample.id in states for item in samples]
    lengths = [len(item.sample.response_ids) for item in samples]
    rows = torch.from_numpy(np.repeat(is_scored, lengths).nonzero()[0])
    return TeacherStates(rows, tuple(states[item.sample.id] for item in samples if item.sample.id in states))


def scalars(samples: Sequence[SampleRef], row_sample: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """Return the fields derived from the samples' scalars, on the device of the rows."""
    device = row_sample.device

    def vector(values: Iterable[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([*values], dtype=dtype, device=device)

    def spread_over_trained_rows(values: Iterable[float]) -> torch.Tensor:
        return torch.where(mask, vector(values, torch.float32)[row_sample], 0.0)

    def spread_over_turns(values: Sequence[float]) -> torch.Tensor | None:
        if not values:
            return None
        turn = turns_of(mask, row_sample)
        assert int(turn[-1]) + 1 == len(values), f"{len(values)} advantages for {int(turn[-1]) + 1} turns"
        return torch.where(mask, vector(values, torch.float32)[turn.clamp(min=0)], 0.0)

    baselines = [item.baseline for item in samples]
    return {
        "weight": spread_over_trained_rows(item.weight for item in samples),
        "imitation_weight": spread_over_trained_rows(item.imitation_weight for item in samples),
        "reward": vector((item.scalar_reward for item in samples), torch.float64),
        "baseline": vector((baseline.center for baseline in baselines), torch.float64),
        "scale": vector((baseline.scale for baseline in baselines), torch.float64),
        "token_baseline": vector((baseline.token_center for baseline in baselines), torch.float32),
        "token_scale": vector((baseline.token_scale for baseline in baselines), torch.float32),
        "turn_advantage": spread_over_turns([advantage for item in samples for advantage in item.turn_advantages]),
    }


@dataclass(frozen=True, slots=True)
class _Layout:
    """Token positions of S samples in a pack.

    A sample's document consists of runs of its tokens, followed by padding. The first runs may be shared with other
    samples.

    Attributes:
        prompt_lengths, response_lengths: int64 [S].
        boundaries: int64 [D + 1], offset of each document in document_tokens. Padding at the end of the pack, if any,
            is the last document.
        document_tokens: as in TokenBatch.
    """

    prompt_lengths: NDArray[np.int64]
    response_lengths: NDArray[np.int64]
    boundaries: NDArray[np.int64]
    document_tokens: NDArray[np.int64]
    num_tokens: int

    @classmethod
    def of(cls, samples: Sequence[Sample], packing: Packing) -> _Layout:
        prompts, responses = [len(s.prompt.token_ids) for s in samples], [len(s.response_ids) for s in samples]
        for sample, num_prompt, num_response in zip(samples, prompts, responses, strict=True):
            assert num_prompt or not num_response, f"sample {sample.id}: its response has no preceding token"
        runs, end = place_runs(samples, packing)
        num_tokens = round_up(max(end, 1), packing.pack_multiple)
        if num_tokens > end:
            runs.append([(end, num_tokens - end)])
        lengths = [sum(length for _, length in document_runs) for document_runs in runs]
        flat_runs = [run for document_runs in runs for run in document_runs]
        starts, sizes = np.array(flat_runs, np.int64).reshape(-1, 2).T
        return cls(
            np.array(prompts, np.int64),
            np.array(responses, np.int64),
            np.cumsum([0, *lengths], dtype=np.int64),
            _ranges(starts, sizes),
            num_tokens,
        )

    def tokens(self, samples: Sequence[Sample]) -> NDArray[np.int64]:
        """Return the tokens of the pack, with tokens shared by several samples stored once."""
        lengths = np.diff(self.boundaries).tolist()
        parts: list[np.ndarray] = []
        for sample, length in zip(samples, lengths, strict=False):
            parts += (sample.prompt.token_ids, sample.response_ids)
            if padding := length - len(sample.prompt.token_ids) - len(sample.response_ids):
                parts.append(np.full(padding, PADDING, np.int32))
        values = _concatenate(parts, np.int64)
        tokens = np.full(self.num_tokens, PADDING, np.int64)
        tokens[self.document_tokens[: len(values)]] = values
        return tokens

    def routes(self, samples: Sequence[Sample]) -> torch.Tensor | None:
        """Return the routes of the pack's tokens, NO_ROUTE for padding and for samples without routes. Samples share
        tokens only if their routes agree."""
        routed = [(sample.routes, first) for sample, first in zip(samples, self.boundaries, strict=False)]
        known = [(routes, first) for routes, first in routed if routes is not None]
        if not known:
            return None
        per_token = known[0][0].shape[1:]
        packed = np.full((self.num_tokens, *per_token), NO_ROUTE, np.result_type(*(routes for routes, _ in known)))
        for routes, first in known:
            packed[self.document_tokens[first : first + len(routes)]] = routes
        return torch.from_numpy(packed)

    def positions(self) -> NDArray[np.int64]:
        """Return each token's position within its document, which is the same in all documents that share the token."""
        positions = np.empty(self.num_tokens, np.int64)
        positions[self.document_tokens] = _ranges(np.zeros_like(self.boundaries[:-1]), np.diff(self.boundaries))
        return positions

    def rotary_positions(self, samples: Sequence[Sample]) -> torch.Tensor | None:
        """Return the positions of tokens in time, height and width; None if there are no images."""
        if not any(sample.images for sample in samples):
            return None
        positions = np.tile(self.positions(), (3, 1))
        for sample, first, stop in zip(samples, self.boundaries, self.boundaries[1:], strict=False):
            if images := sample.images:
                positions[:, self.document_tokens[first:stop]] = rotary_positions(int(stop - first), images)
        return torch.from_numpy(positions)

    def images(self, samples: Sequence[Sample], pixels: Pixels) -> ImageBatch | None:
        """Return the images in the pack, each once, with the pack positions of their features; None without images."""
        first_features: dict[str, int] = {}
        """Digest -> index of the image's first feature."""
        places_of_source: dict[tuple[str, int], tuple[int, NDArray[np.int64]]] = {}
        """(digest, first position in the pack) -> index of the image's first feature, and all its pack positions."""
        found: list[PromptImage] = []
        num_features = 0
        for sample, first in zip(samples, self.boundaries, strict=False):
            for image in sample.images:
                if image.digest not in first_features:
                    first_features[image.digest] = num_features
                    num_features += image.num_tokens
                    found.append(image)
                places = self.document_tokens[first + image.start : first + image.stop]
                places_of_source[image.digest, int(places[0])] = first_features[image.digest], places
        if not found:
            return None
        sources = [np.arange(start, start + len(places)) for start, places in places_of_source.values()]
        return ImageBatch(
            lambda: torch.cat(tuple(map(pixels, found))),
            torch.tensor([image.grid for image in found]),
            torch.from_numpy(_concatenate(sources, np.int64)),
            torch.from_numpy(_concatenate((places for _, places in places_of_source.values()), np.int64)),
        )

    def rows(self, reads: Reads) -> NDArray[np.int64]:
        """Return the pack position that the head reads for each response token; see `Reads`."""
        firsts = self.boundaries[: len(self.prompt_lengths)] + self.prompt_lengths - (reads == "states")
        return self.document_tokens[_ranges(firsts, self.response_lengths)]


def _ranges(firsts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the ranges first, first + 1, …, first + length − 1."""
    ends = np.cumsum(lengths)
    return np.arange(lengths.sum()) + np.repeat(firsts - ends + lengths, lengths)


def _concatenate(arrays: Iterable[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """Concatenate arrays; return an empty array if there are none."""
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="same_kind")


def _labels(samples: Sequence[Sample]) -> torch.Tensor | None:
    """Return `TokenBatch.labels`, which is an empty tensor for an empty microbatch."""
    labels = [sample.labels for sample in samples if sample.labels is not None]
    return torch.from_numpy(_concatenate(labels, np.float32)) if len(labels) == len(samples) else None


def _candidate_ids(samples: Sequence[Sample]) -> torch.Tensor | None:
    """Return `TokenBatch.candidate_ids`, or None if every token was sampled from the whole vocabulary."""
    if all(sample.candidate_ids is None for sample in samples):
        return None
    lists = [sample.candidate_ids or CandidateIds.none(len(sample.response_ids)) for sample in samples]
    counts = _concatenate((np.diff(candidates.offsets) for candidates in lists), np.int64)
    width = int(counts.max(initial=0))
    if width == 0:
        return None
    rows = np.full((len(counts), width), NO_TOKEN, np.int64)
    rows[np.arange(width) < counts[:, None]] = _concatenate((candidates.ids for candidates in lists), np.int64)
    return torch.from_numpy(rows)
