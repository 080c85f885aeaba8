"""Frozen copies of a model's weights in host memory, exchanged with the live ones for the length of a pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


class WeightSets:
    """Named copies of this rank's parameters: the reference, older policies."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]):
        self._parameters = parameters
        self._sets: dict[str, dict[str, torch.Tensor]] = {}

    def keep(self, name: str) -> None:
        """Copies the live weights, to be used under this name."""
        self._sets[name] = {key: p.detach().to("cpu", copy=True) for key, p in self._parameters.items()}

    @contextmanager
    def swapped_in(self, name: str) -> Iterator[None]:
        """The model has the named weights inside, and its own again, bit by bit, afterwards."""
        self._exchange(name)
        try:
            yield
        finally:
            self._exchange(name)

    @torch.no_grad()
    def _exchange(self, name: str) -> None:
        for key, kept in self._sets[name].items():
            live = self._parameters[key]
            previous = live.detach().to("cpu", copy=True)
            live.copy_(kept)
            kept.copy_(previous)
