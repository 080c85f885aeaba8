"""Handles non-finite gradients: the update is skipped, and the run fails after several consecutive skipped updates.

All ranks make the same decision because they check the same number: `step.gradient_norm`, which is reduced over the
ranks. It is NaN or infinite if any gradient element is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megarl.core.sample import SampleRef
from megarl.megatron.metric_sums import Sums, read
from megarl.megatron.model.build import named_parameters, named_weights


class SkippedUpdates:
    """Counts skipped updates: `total` since the start of the run, `consecutive` since the last applied update."""

    def __init__(self) -> None:
        self.total = self.consecutive = 0

    def add(self, is_skipped: bool, counts: bool = True) -> None:
        """Record an update. `counts` is False for an update skipped to reduce the loss scale, which does not increase
        `consecutive`."""
        self.total += is_skipped
        self.consecutive = self.consecutive + counts if is_skipped else 0

    def counters(self) -> dict[str, float]:
        return {"skipped_updates": self.total, "skipped_in_a_row": self.consecutive}

    def restore(self, counters: Mapping[str, float]) -> None:
        """Restore the counts from a checkpoint. Missing counts are 0."""
        self.total = int(counters.get("skipped_updates", 0))
        self.consecutive = int(counters.get("skipped_in_a_row", 0))


class RouterBiases:
    """A copy of the router biases, to restore them after a skipped update. The biases follow expert load without a
    gradient and change before it is known whether the gradient is finite."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]):
        names = named_weights(chunks).keys() - named_parameters(chunks).keys()
        self._copies = [(bias, bias.clone()) for name, bias in named_weights(chunks).items() if name in names]

    @torch.no_grad()
    def restore(self) -> None:
        for bias, copy in self._copies:
            bias.copy_(copy)


def describe_worst(members: Sequence[Sequence[SampleRef]], sums: Sequence[Sums], loss: str) -> str:
    """Return a description of the worst microbatch over all ranks. Every rank returns the same one. Collective.

    The worst microbatch is the first one with a non-finite metric. If only the gradient overflowed, it is the one with
    the largest absolute loss. `members` and `sums` hold the samples and the metrics for each of this rank's
    microbatches (no metrics before the last stage), and `loss` is the name of the loss metric.
    """
    descriptions = [_describe(*pair, loss) for pair in zip(members, sums, strict=False)]
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, max(descriptions, key=lambda item: item[0], default=(-1.0, "")))
    _, description = max(gathered, key=lambda item: item[0])
    return description


def _describe(members: Sequence[SampleRef], sums: Sums, loss: str) -> tuple[float, str]:
    """Return a microbatch's severity and description."""
    values = {name: metric.value for name, metric in read(sums).items()}
    nonfinite = {name: value for name, value in values.items() if not math.isfinite(value)}
    shown = ", ".join(f"{name} {value:g}" for name, value in (nonfinite or {loss: values[loss]}).items())
    severity = math.inf if nonfinite else abs(values[loss])
    return severity, f"{shown}; samples {', '.join(item.sample.id for item in members)}"
