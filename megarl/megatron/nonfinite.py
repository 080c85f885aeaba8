"""The rule for a gradient that is not finite: its update is skipped, and several in a row end the run.

All ranks follow it together, because all judge the same number: the norm of the whole gradient, which Megatron sums
over the ranks. It is NaN or infinite if any element of the gradient is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megarl.core.types import TrainingSample
from megarl.megatron.metric_sums import Sums, read
from megarl.megatron.model.build import named_parameters, named_weights


class SkippedUpdates:
    """The updates that were skipped.

    total      since the run began
    in_a_row   since the last update that was not
    """

    def __init__(self) -> None:
        self.total = self.in_a_row = 0

    def add(self, is_skipped: bool, counts: bool = True) -> None:
        """counts: whether a skipped one is one more in a row, and not the price of a scale of the loss."""
        self.total += is_skipped
        self.in_a_row = self.in_a_row + counts if is_skipped else 0

    def counters(self) -> dict[str, float]:
        return {"skipped_updates": self.total, "skipped_in_a_row": self.in_a_row}

    def restore(self, counters: Mapping[str, float]) -> None:
        """Take up the counts of a checkpoint. One of format 1 has none: its run would have ended at the first."""
        self.total, self.in_a_row = counters.get("skipped_updates", 0), counters.get("skipped_in_a_row", 0)


class RouterBiases:
    """A copy of the biases of routers, which follow the load of the experts without a gradient, and before the gradient
    is known."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]):
        names = named_weights(chunks).keys() - named_parameters(chunks).keys()
        self._copies = [(bias, bias.clone()) for name, bias in named_weights(chunks).items() if name in names]

    @torch.no_grad()
    def restore(self) -> None:
        for bias, copy in self._copies:
            bias.copy_(copy)


def describe_worst(members: Sequence[Sequence[TrainingSample]], sums: Sequence[Sums], loss: str) -> str:
    """Describe the worst microbatch of all ranks, the same on each: the first one with a metric that is not finite,
    else the one with the largest loss, since its gradient alone has overflown.

    members   the samples of each microbatch of this rank
    sums      the metrics of each, none before the last stage
    loss      the name of the metric of the loss
    """
    found = [_describe(*pair, loss) for pair in zip(members, sums, strict=False)]
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, max(found, key=lambda item: item[0], default=(-1.0, "")))
    _, description = max(gathered, key=lambda item: item[0])
    return description


def _describe(members: Sequence[TrainingSample], sums: Sums, loss: str) -> tuple[float, str]:
    """Return how bad a microbatch is, and its description in words."""
    values = {name: metric.value for name, metric in read(sums).items()}
    nonfinite = {name: value for name, value in values.items() if not math.isfinite(value)}
    shown = ", ".join(f"{name} {value:g}" for name, value in (nonfinite or {loss: values[loss]}).items())
    severity = math.inf if nonfinite else abs(values[loss])
    return severity, f"{shown}; samples {', '.join(item.sample.id for item in members)}"
