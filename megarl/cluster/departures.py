"""Nodes that should leave the run before they fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

SLOWDOWN = 1.5
"""A node is slow if its speed probe takes more than this many times as long as the median node's."""

NUM_SLOW = 5
"""A node should leave after this many consecutive slow steps."""


class DeviceState(NamedTuple):
    """The state of a rank's device: see device.error_counts and device.probe_seconds."""

    error_counts: Mapping[str, int]
    probe_s: float


class Departures:
    """Tracks nodes whose devices have new errors or are slow, by node number. `observe` is called after each step."""

    def __init__(self) -> None:
        self._first: dict[int, dict[str, Mapping[str, int]]] = {}
        """The error counts at the first observation, by rank."""
        self._new_errors: dict[int, str] = {}
        self._num_slow: Counter[int] = Counter()
        self.slowdown: float | None = None
        """Duration of the slowest node's probe relative to the median node's; None if the ranks are on one node."""

    def observe(self, nodes: Mapping[str, int], states: Sequence[DeviceState]) -> None:
        """Observe the devices of all ranks after a step. nodes: each rank's node, by the rank's name."""
        seconds: dict[int, float] = {}
        for (name, node), state in zip(nodes.items(), states, strict=True):
            first = self._first.setdefault(node, {}).setdefault(name, state.error_counts)
            if new := [kind for kind, count in state.error_counts.items() if count > first.get(kind, 0)]:
                self._new_errors[node] = f"the device of {name} has new {' and '.join(new)}"
            seconds[node] = max(seconds.get(node, 0.0), state.probe_s)
        if len(seconds) < 2:
            return
        median = median_low(seconds.values())
        self.slowdown = max(seconds.values()) / median
        for node, node_s in seconds.items():
            self._num_slow[node] = self._num_slow[node] + 1 if node_s > SLOWDOWN * median else 0

    def reasons(self) -> dict[int, str]:
        """Return the nodes that should leave, with the reasons."""
        probes = f"{NUM_SLOW} consecutive speed probes"
        slow = f"its devices took more than {SLOWDOWN:g} times as long as the median node's in {probes}"
        return {node: slow for node, count in self._num_slow.items() if count >= NUM_SLOW} | self._new_errors

    def forget(self, node: int) -> None:
        """Forget the observations of a node, because another node takes over its number."""
        for observed in (self._first, self._new_errors, self._num_slow):
            observed.pop(node, None)
