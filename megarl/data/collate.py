"""Makes the tensors of one microbatch from training samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.core.types import CandidateIds, Sample, TokenBatch, TrainingSample
from megarl.data.packing import Packing, round_up

PADDING = 0
"""Any token: nothing that is trained on attends to it."""

NO_TOKEN = -1
"""The id that fills up a row of `TokenBatch.candidate_ids`."""

Reads = Literal["states", "tokens"]
"""The row of the pack that a head reads for a response token: that of the state in which it was sampled (the token
before it), or its own."""

TokenScores = Mapping[str, Mapping[str, torch.Tensor]]
"""The scores that passes and other models give response tokens: name as in TokenBatch (old, …) -> sample id -> float32
[R]."""


def collate(
    samples: Sequence[TrainingSample],
    packing: Packing,
    reads: Reads = "states",
    truncates: bool = True,
    **scores: Mapping[str, torch.Tensor],
) -> TokenBatch:
    """Packs the samples one after the other; padding, one document at the end, rounds T up to a multiple.

    samples     none for an empty microbatch, which consists of padding
    truncates   whether log-probs are of the tokens only that the engine kept
    scores      as in TokenScores
    """
    members = [item.sample for item in samples]
    layout = _Layout.of(members, packing)
    lengths = [len(sample.response_ids) for sample in members]
    mask = torch.from_numpy(_concatenate((sample.response_mask for sample in members), np.bool_))
    row_sample = torch.from_numpy(np.repeat(np.arange(len(samples)), lengths))
    batch = TokenBatch(
        tokens=torch.from_numpy(layout.tokens(members)),
        positions=torch.from_numpy(layout.positions()),
        document_tokens=torch.from_numpy(layout.document_tokens()),
        boundaries=torch.from_numpy(layout.boundaries()),
        rows=torch.from_numpy(layout.rows(reads)),
        targets=torch.from_numpy(_concatenate((sample.response_ids for sample in members), np.int64)),
        row_sample=row_sample,
        rollout_logprobs=torch.from_numpy(_concatenate((sample.response_logprobs for sample in members), np.float32)),
        mask=mask,
        candidate_ids=_candidate_ids(members) if truncates else None,
        **_scalars(samples, row_sample, mask),
    )
    batch = with_scores(batch, samples, scores)
    batch.validate()
    return batch


def with_scalars(batch: TokenBatch, samples: Sequence[TrainingSample]) -> TokenBatch:
    """Returns the batch of these samples, which had other rewards, baselines or weights when it was collated."""
    return replace(batch, **_scalars(samples, batch.row_sample, batch.mask))


def with_scores(batch: TokenBatch, samples: Sequence[TrainingSample], scores: TokenScores) -> TokenBatch:
    """Returns the batch of these samples with the scores that their tokens have got since."""
    return replace(
        batch, **{name: _concatenate_scores(batch, samples, token_scores) for name, token_scores in scores.items()}
    )


def _concatenate_scores(
    batch: TokenBatch, samples: Sequence[TrainingSample], token_scores: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    device = batch.tokens.device
    parts = [token_scores[item.sample.id].to(device) for item in samples]
    return torch.cat([torch.empty(0, device=device), *parts])


def _scalars(
    samples: Sequence[TrainingSample], row_sample: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Returns the fields that samples bring beside their tokens, on the device of their rows."""
    device = row_sample.device

    def vector(values: Iterable[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([*values], dtype=dtype, device=device)

    def spread_over_trained_rows(values: Iterable[float]) -> torch.Tensor:
        return torch.where(mask, vector(values, torch.float32)[row_sample], 0.0)

    baselines = [item.baseline for item in samples]
    return {
        "weight": spread_over_trained_rows(item.weight for item in samples),
        "imitation_weight": spread_over_trained_rows(item.imitation_weight for item in samples),
        "reward": vector((item.reward for item in samples), torch.float64),
        "baseline": vector((baseline.center for baseline in baselines), torch.float64),
        "scale": vector((baseline.scale for baseline in baselines), torch.float64),
        "token_baseline": vector((baseline.token_center for baseline in baselines), torch.float32),
        "token_scale": vector((baseline.token_scale for baseline in baselines), torch.float32),
    }


@dataclass(frozen=True, slots=True)
class _Layout:
    """The places of the tokens of S samples in a pack. A sample's document is its prompt, which may stand before
    another sample's response, and then its response with the padding after it.

    prompt_starts, prompt_lengths         int64 [S]
    prompt_is_new                         bool [S]: whether the prompt stands right before this sample's response
    response_starts, response_lengths     int64 [S]
    paddings                              int64 [S]
    num_tokens                            tokens of all samples
    last_padding                          tokens of the document that fills up the pack
    """

    prompt_starts: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    prompt_is_new: NDArray[np.bool_]
    response_starts: NDArray[np.int64]
    response_lengths: NDArray[np.int64]
    paddings: NDArray[np.int64]
    num_tokens: int
    last_padding: int

    @classmethod
    def of(cls, samples: Sequence[Sample], packing: Packing) -> _Layout:
        places: list[tuple[int, int, bool, int, int, int]] = []
        start_by_prompt: dict[str, int] = {}
        end = 0
        for sample in samples:
            prompt, num_response = sample.prompt, len(sample.response_ids)
            num_prompt = len(prompt.token_ids)
            assert num_prompt or not num_response, f"sample {sample.id}: no token comes before its response"
            start = start_by_prompt.get(prompt.id) if packing.shares_prompts else None
            is_new = start is None
            if is_new:
                start = start_by_prompt[prompt.id] = end
                end += num_prompt
            padding = packing.padded(num_prompt + num_response) - num_prompt - num_response
            places.append((start, num_prompt, is_new, end, num_response, padding))
            end += num_response + padding
        columns = np.array(places, np.int64).reshape(-1, 6).T
        last_padding = round_up(max(end, 1), packing.pack_multiple) - end
        starts, prompts, are_new, responses, lengths, paddings = columns
        return cls(starts, prompts, are_new.astype(np.bool_), responses, lengths, paddings, end, last_padding)

    def tokens(self, samples: Sequence[Sample]) -> NDArray[np.int64]:
        segments = []
        for sample, is_new, padding in zip(samples, self.prompt_is_new.tolist(), self.paddings.tolist(), strict=True):
            if is_new:
                segments.append(sample.prompt.token_ids)
            segments.append(sample.response_ids)
            if padding:
                segments.append(np.full(padding, PADDING, np.int32))
        segments.append(np.full(self.last_padding, PADDING, np.int32))
        return _concatenate(segments, np.int64)

    def positions(self) -> NDArray[np.int64]:
        """Returns each token's position within its document. Positions go on from a prompt to its response, even where
        the prompt stands elsewhere."""
        new_prompts = np.where(self.prompt_is_new, self.prompt_lengths, 0)
        lengths = new_prompts + self.response_lengths + self.paddings
        return _ranges(np.append(self.prompt_lengths - new_prompts, 0), np.append(lengths, self.last_padding))

    def document_tokens(self) -> NDArray[np.int64]:
        firsts = np.stack((self.prompt_starts, self.response_starts), 1).ravel()
        lengths = np.stack((self.prompt_lengths, self.response_lengths + self.paddings), 1).ravel()
        return _ranges(np.append(firsts, self.num_tokens), np.append(lengths, self.last_padding))

    def boundaries(self) -> NDArray[np.int32]:
        lengths = self.prompt_lengths + self.response_lengths + self.paddings
        last = [self.last_padding] if self.last_padding else []
        return np.cumsum(np.concatenate(([0], lengths, last)), dtype=np.int32)

    def rows(self, reads: Reads) -> NDArray[np.int64]:
        """Returns the row that the head reads for each response token: the hidden state of a token predicts the
        next."""
        rows = _ranges(self.response_starts, self.response_lengths)
        if reads == "tokens":
            return rows
        rows -= 1
        first = (np.cumsum(self.response_lengths) - self.response_lengths)[self.response_lengths > 0]
        rows[first] = (self.prompt_starts + self.prompt_lengths - 1)[self.response_lengths > 0]
        return rows


def _ranges(firsts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns first, first + 1, … of each range, one range after the other."""
    ends = np.cumsum(lengths)
    return np.arange(lengths.sum()) + np.repeat(firsts - ends + lengths, lengths)


def _concatenate(arrays: Iterable[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """Returns the arrays one after the other, and an empty one where there are none."""
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="same_kind")


def _candidate_ids(samples: Sequence[Sample]) -> torch.Tensor | None:
    """Returns `TokenBatch.candidate_ids`, or None where every token is a candidate."""
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
