"""Copies of a model's weights in host memory, which can be swapped with the live weights during a pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from megarl.core import device

Weights = dict[str, torch.Tensor]


class WeightSnapshots:
    """Named copies of this rank's weights, such as the reference weights."""

    def __init__(self, weights: Mapping[str, torch.Tensor]):
        self._weights = weights
        self._sets: dict[str, Weights] = {}
        self._means: dict[str, Weights] = {}
        self._shares: dict[str, float] = {}

    def keep(self, name: str, share: float | None = None) -> None:
        """Copy the live weights into the snapshot `name`. `share` is the weight of the live weights in each `renew`, in
        (0, 1]; None makes the snapshot immutable. Below 1, the snapshot is a moving average. It is kept in float32,
        because bfloat16 would round small changes away."""
        kept = {key: device.host_empty_like(live).copy_(live) for key, live in self._live()}
        self._sets[name] = kept
        if share is not None:
            self._shares[name] = share
            self._means[name] = kept if share == 1 else {key: weight.float() for key, weight in kept.items()}

    def renew(self, name: str) -> None:
        """Update the named snapshot: share · live + (1 − share) · snapshot."""
        for key, live in self._live():
            mean = self._means[name][key]
            mean.lerp_(live.to(mean), self._shares[name])
            self._sets[name][key].copy_(mean)

    def state(self) -> dict[str, Weights]:
        """Return snapshot name -> weights for the mutable snapshots, without copying."""
        return dict(self._means)

    def restore(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Restore the snapshots from a `state` bit for bit."""
        for name, weights in state.items():
            for key, mean in self._means[name].items():
                mean.copy_(weights[key])
                self._sets[name][key].copy_(mean)

    @contextmanager
    def swapped_in(self, name: str) -> Iterator[None]:
        """Return a context manager that swaps the named snapshot into the model while entered, and restores the live
        weights bit for bit afterwards. The optimizer's float32 main weights are unchanged."""
        self._exchange(name)
        try:
            yield
        finally:
            self._exchange(name)

    def _exchange(self, name: str) -> None:
        """Exchange the live weights with the named snapshot. At most one parameter is on the device twice."""
        kept = self._sets[name]
        for key, live in self._live():
            previous = live.clone()
            live.copy_(kept[key], non_blocking=True)
            kept[key].copy_(previous, non_blocking=True)
        device.synchronize()

    def _live(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((key, weight.detach()) for key, weight in self._weights.items())
