"""Finds prefixes shared by the samples of a microbatch, so that shared tokens appear once in their pack.

The samples of a prompt form a tree whose nodes are runs of tokens. All samples share the prompt. Samples of one rollout
that continue an earlier sample share its turns, and branches share the tokens before their branching point. Equal
tokens are not shared if they are replayed through different experts, or if they are placeholders of different images,
because their keys and values differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from megarl.core.sample import Sample
from megarl.data.packing import Packing

SHORTEST_RUN = 16
"""Minimum number of tokens that samples must share after their prompt. Responses often start alike by chance, and
saving the computation of a few tokens is not worth the cost of tracking them."""

Run = tuple[int, int]
"""Position in the pack and length of a run of consecutive tokens."""


def place_runs(samples: Sequence[Sample], packing: Packing) -> tuple[list[list[Run]], int]:
    """Return the runs of each sample's document, including padding, and the total number of tokens in the pack. The
    order is depth-first: all continuations of a run follow it directly."""
    tree = _Tree(samples, packing)
    indices_by_prompt: dict[Hashable, list[int]] = {}
    for index, sample in enumerate(samples):
        # Rollouts of one prompt may start with different tokens from the environment or different routes from the
        # engine.
        routes = b"" if sample.routes is None else sample.routes[: len(sample.prompt.token_ids)].tobytes()
        images = tuple((image.start, image.digest) for image in sample.prompt.images)
        prompt = sample.prompt.id, sample.prompt.token_ids.tobytes(), images, routes
        indices_by_prompt.setdefault(prompt if packing.shares_prompts else index, []).append(index)
    for indices in indices_by_prompt.values():
        length = len(samples[indices[0]].prompt.token_ids) if len(indices) > 1 else 0
        tree.place(indices, length)
        tree.add(indices, length)
    return tree.runs, tree.end


class _Tree:
    """The runs of the samples placed so far, and the position after the last run."""

    def __init__(self, samples: Sequence[Sample], packing: Packing):
        self._samples, self._packing = samples, packing
        self._ids = list(map(_comparable_ids, samples))
        self.runs: list[list[Run]] = [[] for _ in samples]
        self.end = 0

    def add(self, members: Sequence[int], depth: int) -> None:
        """Place the samples' tokens from position `depth` on. The samples share all earlier tokens."""
        remaining = list(members)
        while remaining:
            first, *others = remaining
            common = {other: self._common(first, other, depth) for other in others}
            sharing = [other for other in others if common[other] >= depth + SHORTEST_RUN]
            remaining = [other for other in others if common[other] < depth + SHORTEST_RUN]
            stop = min((common[other] for other in sharing), default=len(self._ids[first]))
            self.place([first, *sharing], stop - depth)
            if sharing:
                self.add([first, *sharing], stop)
            else:
                self.place([first], self._packing.padded(stop) - stop)

    def place(self, members: Sequence[int], length: int) -> None:
        """Append a run to each of these samples."""
        if length:
            for member in members:
                self.runs[member].append((self.end, length))
            self.end += length

    def _common(self, one: int, other: int, depth: int) -> int:
        """Return the length of the common prefix of two samples, whose first `depth` tokens are known to be equal."""
        a, b = self._ids[one][depth:], self._ids[other][depth:]
        length = min(len(a), len(b))
        differing = a[:length] != b[:length]
        routes, other_routes = self._samples[one].routes, self._samples[other].routes
        if routes is not None and other_routes is not None:
            end = depth + length
            differing |= (routes[depth:end] != other_routes[depth:end]).any(axis=(1, 2))
        stop = depth + (int(differing.argmax()) if differing.any() else length)
        # Routes may diverge inside an image, but a run must contain whole images.
        return min([stop, *(image.start for image in self._samples[one].images if image.start < stop < image.stop)])


def _comparable_ids(sample: Sample) -> NDArray[np.int64]:
    """Return the token ids with each image's placeholders replaced by a negative hash of its digest."""
    ids = sample.token_ids.astype(np.int64)
    for image in sample.images:
        number = int.from_bytes(hashlib.blake2b(image.digest.encode(), digest_size=7).digest())
        ids[image.start : image.stop] = -1 - number
    return ids
