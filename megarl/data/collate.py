"""From training samples to the tensors of one microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megarl.batch import TokenBatch, TrainingSample


def collate(
    samples: Sequence[TrainingSample],
    multiple: int,
    old: Mapping[str, torch.Tensor] | None = None,
    reference: Mapping[str, torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> TokenBatch:
    """Packs the samples one after the other; padding, one document at the end, rounds T up to a multiple.

    samples          none for an empty microbatch, which consists of padding
    multiple         what sequence parallelism needs T to divide by
    old, reference   sample id -> float32 [R], log-probs per response token
    """
    tokens: list[int] = []
    positions: list[int] = []
    boundaries = [0]
    rows: list[int] = []
    targets: list[int] = []
    row_sample: list[int] = []
    for index, item in enumerate(samples):
        prompt, response = item.sample.prompt.token_ids, item.sample.response_ids
        first_row = len(tokens) + len(prompt) - 1
        rows.extend(range(first_row, first_row + len(response)))
        targets.extend(response)
        row_sample.extend([index] * len(response))
        tokens.extend(prompt)
        tokens.extend(response)
        positions.extend(range(len(prompt) + len(response)))
        boundaries.append(len(tokens))
    padding = (-len(tokens)) % multiple if tokens else multiple
    if padding:
        tokens.extend([0] * padding)
        positions.extend(range(padding))
        boundaries.append(len(tokens))
    mask = torch.tensor([flag for item in samples for flag in item.sample.response_mask], dtype=torch.bool)
    per_row = torch.tensor([item.weight for item in samples], dtype=torch.float32)[_long(row_sample)]
    batch = TokenBatch(
        tokens=_long(tokens),
        positions=_long(positions),
        boundaries=torch.tensor(boundaries, dtype=torch.int32),
        rows=_long(rows),
        targets=_long(targets),
        row_sample=_long(row_sample),
        behaviour=_float([value for item in samples for value in item.sample.response_logprobs]),
        mask=mask,
        weight=torch.where(mask, per_row, 0.0),
        reward=_float([item.reward for item in samples]),
        group_mean=_float([item.group.mean for item in samples]),
        group_std=_float([item.group.std for item in samples]),
        old=_gather(samples, old),
        reference=_gather(samples, reference),
    )
    batch.validate()
    return batch if device is None else batch.to(device)


def _gather(samples: Sequence[TrainingSample], by_sample: Mapping[str, torch.Tensor] | None):
    if by_sample is None:
        return None
    return torch.cat([torch.empty(0), *(by_sample[item.sample.id].cpu() for item in samples)])


def _long(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _float(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)
