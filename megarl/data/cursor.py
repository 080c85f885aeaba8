"""The order of prompts: each epoch has its own permutation."""

from __future__ import annotations

import random
from typing import TypedDict


class CursorState(TypedDict):
    num_prompts: int
    seed: int
    shuffle: bool
    epoch: int
    position: int


class PromptCursor:
    """Iterates over prompt indices; every epoch contains each index exactly once. With `shuffle`, each epoch has a new
    order that depends only on (seed, epoch, num_prompts)."""

    def __init__(self, num_prompts: int, seed: int, shuffle: bool) -> None:
        assert num_prompts > 0, "num_prompts must be positive"
        self._num_prompts, self._seed, self._shuffle = num_prompts, seed, shuffle
        self._start_epoch(0)

    def take(self, n: int) -> list[int]:
        """Return the next n indices, which may span several epochs."""
        taken: list[int] = []
        while len(taken) < n:
            if self._position == self._num_prompts:
                self._start_epoch(self._epoch + 1)
            part = self._order[self._position : self._position + n - len(taken)]
            self._position += len(part)
            taken += part
        return taken

    def state(self) -> CursorState:
        """Return the JSON-serializable state for `restore`."""
        return CursorState(
            num_prompts=self._num_prompts,
            seed=self._seed,
            shuffle=self._shuffle,
            epoch=self._epoch,
            position=self._position,
        )

    @classmethod
    def restore(cls, state: CursorState) -> PromptCursor:
        cursor = cls(state["num_prompts"], state["seed"], state["shuffle"])
        cursor._start_epoch(state["epoch"])
        cursor._position = state["position"]
        return cursor

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = list(range(self._num_prompts))
        if self._shuffle:
            # Sort by random(), because Python guarantees only its sequence across versions.
            generator = random.Random(f"epoch {self._seed} {epoch}")
            self._order.sort(key=lambda _: generator.random())
