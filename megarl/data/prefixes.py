"""Finds what samples of a microbatch begin with alike, which then stands in their pack once.

The samples of a prompt are a tree of runs of tokens. They share the prompt; samples of one rollout, of which each goes
on from an earlier one, share all of its turns; branches share what was before they parted. Tokens that are replayed
through other experts are other tokens here: what follows them would attend to other keys and values.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import Sample
from megarl.data.packing import Packing

SHORTEST_RUN = 16
"""The tokens that samples must have in common after their prompt to share them. Responses often begin alike by chance:
to compute a few tokens once saves less than it costs to keep them apart."""

Run = tuple[int, int]
"""The place in the pack of tokens that follow each other, and their number."""


def place_runs(samples: Sequence[Sample], packing: Packing) -> tuple[list[list[Run]], int]:
    """Returns the runs of each sample's document, padding included, and the number of tokens of all.

    Depth first: what goes on from a run follows it, before anything that does not.
    """
    tree = _Tree(samples, packing)
    groups: dict[Hashable, list[int]] = {}
    for index, sample in enumerate(samples):
        # An environment may give rollouts of one prompt other beginnings, and an engine its tokens other experts.
        routes = b"" if sample.routes is None else sample.routes[: len(sample.prompt.token_ids)].tobytes()
        prompt = sample.prompt.id, sample.prompt.token_ids.tobytes(), routes
        groups.setdefault(prompt if packing.shares_prompts else index, []).append(index)
    for members in groups.values():
        tree.add_prompt(members)
    return tree.runs, tree.end


class _Tree:
    """The runs of the samples that have been placed, and the place after the last one."""

    def __init__(self, samples: Sequence[Sample], packing: Packing):
        self._samples, self._packing = samples, packing
        self._ids = [_token_ids(sample) for sample in samples]
        self.runs: list[list[Run]] = [[] for _ in samples]
        self.end = 0

    def add_prompt(self, members: Sequence[int]) -> None:
        """Places samples of one prompt."""
        length = len(self._samples[members[0]].prompt.token_ids) if len(members) > 1 else 0
        self._place(members, length)
        self._add(members, length)

    def _add(self, members: Sequence[int], depth: int) -> None:
        """Places what samples have after their first tokens, `depth` many, which they share."""
        left = list(members)
        while left:
            first, *others = left
            common = {other: self._common(first, other, depth) for other in others}
            beside = [other for other in others if common[other] >= depth + SHORTEST_RUN]
            left = [other for other in others if common[other] < depth + SHORTEST_RUN]
            stop = min((common[other] for other in beside), default=len(self._ids[first]))
            self._place([first, *beside], stop - depth)
            if beside:
                self._add([first, *beside], stop)
            else:
                self._place([first], self._packing.padded(stop) - stop)

    def _place(self, members: Sequence[int], length: int) -> None:
        """Appends a run to what these samples have."""
        if length:
            for member in members:
                self.runs[member].append((self.end, length))
            self.end += length

    def _common(self, one: int, other: int, depth: int) -> int:
        """Returns how many tokens two samples begin with alike, of which `depth` are known to be."""
        a, b = self._ids[one][depth:], self._ids[other][depth:]
        length = min(len(a), len(b))
        differing = a[:length] != b[:length]
        routes, others = self._samples[one].routes, self._samples[other].routes
        if routes is not None and others is not None:
            end = depth + length
            differing |= (routes[depth:end] != others[depth:end]).any(axis=(1, 2))
        return depth + (int(differing.argmax()) if differing.any() else length)


def _token_ids(sample: Sample) -> NDArray[np.int32]:
    return np.concatenate((sample.prompt.token_ids, sample.response_ids))
