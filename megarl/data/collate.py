"""From training samples to the tensors of one microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from megarl.core.types import TokenBatch, TrainingSample
from megarl.data.packing import Packing, round_up

PADDING = 0
"""Any token: nothing that is trained on attends to it."""

NO_TOKEN = -1
"""Fills up a row of `TokenBatch.candidate_ids`."""

Reads = Literal["states", "tokens"]
"""Which row of the pack a head reads for a response token: that of the state in which it was sampled (the token before
it), or its own."""


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
    scores      of the response tokens: name as in TokenBatch, such as old -> sample id -> float32 [R]
    """
    pack = _Pack(packing, reads)
    for item in samples:
        pack.add(item)
    pack.pad()
    mask = torch.tensor([flag for item in samples for flag in item.sample.response_mask], dtype=torch.bool)
    row_sample = _long([i for i, item in enumerate(samples) for _ in item.sample.response_ids])
    weight = _float([item.weight for item in samples])[row_sample]
    batch = TokenBatch(
        tokens=_long(pack.tokens),
        positions=_long(pack.positions),
        document_tokens=_long([token for document in pack.documents for token in document]),
        boundaries=torch.tensor([0, *map(len, pack.documents)], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        rows=_long(pack.rows),
        targets=_long([token for item in samples for token in item.sample.response_ids]),
        row_sample=row_sample,
        rollout_logprobs=_float([value for item in samples for value in item.sample.response_logprobs]),
        mask=mask,
        weight=torch.where(mask, weight, 0.0),
        imitation_weight=torch.where(mask, _float([item.imitation_weight for item in samples])[row_sample], 0.0),
        reward=_double([item.reward for item in samples]),
        baseline=_double([item.baseline.center for item in samples]),
        scale=_double([item.baseline.scale for item in samples]),
        token_baseline=_float([item.baseline.token_center for item in samples]),
        token_scale=_float([item.baseline.token_scale for item in samples]),
        candidate_ids=_candidate_ids(samples) if truncates else None,
        **{name: _by_row(samples, by_sample) for name, by_sample in scores.items()},
    )
    batch.validate()
    return batch


class _Pack:
    """Tokens and their positions, and for every document where its tokens stand."""

    def __init__(self, packing: Packing, reads: Reads):
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.documents: list[list[int]] = []
        self.rows: list[int] = []
        self._packing, self._reads = packing, reads
        self._prompts: dict[str, list[int]] = {}

    def add(self, item: TrainingSample) -> None:
        prompt = item.sample.prompt
        standing = self._prompts.get(prompt.id) if self._packing.shares_prompts else None
        if standing is None:
            standing = self._append(prompt.token_ids, 0)
            self._prompts[prompt.id] = standing
        response = self._append(item.sample.response_ids, len(prompt.token_ids))
        document = standing + response
        # The hidden state of a token predicts the one after it.
        self.rows.extend(document[len(standing) - 1 : -1] if self._reads == "states" else response)
        missing = self._packing.padded(len(document)) - len(document)
        self.documents.append(document + self._append((PADDING,) * missing, len(document)))

    def pad(self) -> None:
        total = round_up(max(len(self.tokens), 1), self._packing.pack_multiple)
        if missing := total - len(self.tokens):
            self.documents.append(self._append((PADDING,) * missing, 0))

    def _append(self, token_ids: Sequence[int], first_position: int) -> list[int]:
        start = len(self.tokens)
        self.tokens.extend(token_ids)
        self.positions.extend(range(first_position, first_position + len(token_ids)))
        return list(range(start, len(self.tokens)))


def _by_row(samples: Sequence[TrainingSample], by_sample: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0), *(by_sample[item.sample.id].cpu() for item in samples)])


def _candidate_ids(samples: Sequence[TrainingSample]) -> torch.Tensor | None:
    """See TokenBatch."""
    rows = [ids for item in samples for ids in item.sample.candidate_ids or ((),) * len(item.sample.response_ids)]
    width = max(map(len, rows), default=0)
    return _long([[*ids, *(NO_TOKEN,) * (width - len(ids))] for ids in rows]) if width else None


def _long(values: list[int] | list[list[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _float(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _double(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
