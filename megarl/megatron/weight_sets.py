"""Frozen copies of a model's weights in host memory, exchanged with the live ones for the length of a pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from megarl import device


class WeightSets:
    """Named copies of this rank's weights, such as the reference's."""

    def __init__(self, weights: Mapping[str, torch.Tensor]):
        self._weights = weights
        self._sets: dict[str, dict[str, torch.Tensor]] = {}

    def keep(self, name: str) -> None:
        """Copies the live weights, to be used under this name."""
        self._sets[name] = {key: device.host_empty_like(live).copy_(live) for key, live in self._live()}

    @contextmanager
    def swapped_in(self, name: str) -> Iterator[None]:
        """The model has the named weights inside, and its own again, bit by bit, afterwards. The optimizer's float32
        main weights stay as they are."""
        self._exchange(name)
        try:
            yield
        finally:
            self._exchange(name)

    def _exchange(self, name: str) -> None:
        """One parameter after the other, so that no more than the largest is on the device twice."""
        kept = self._sets[name]
        for key, live in self._live():
            previous = live.clone()
            live.copy_(kept[key], non_blocking=True)
            kept[key].copy_(previous, non_blocking=True)
        device.synchronize()

    def _live(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((key, weight.detach()) for key, weight in self._weights.items())
