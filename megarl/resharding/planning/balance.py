"""Decides who sends to whom: load is spread over replicas, and there is one way into every node."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import cycle
from math import gcd
from typing import NamedTuple

from megarl.resharding.planning.plan import Link


class Way(NamedTuple):
    """The links by which something travels.

    links    from those who have it to those who want it
    forwards   between the latter, inside their nodes
    """

    links: tuple[Link, ...]
    forwards: tuple[Link, ...]


class Balance:
    """The choice of links. A destination takes from a source on its own device, or else on its own node, where there is
    one. Otherwise one destination of the node takes from a source elsewhere, and hands on to the others: a byte enters
    a node once.

    Replicas share the load: next to give is who is least ahead of its fair share, which is the same part for all who
    could have given; what stays on a device is no load. Those who bring bytes into their node take turns in the same
    way.
    """

    def __init__(self, nodes: Sequence[int], devices: Sequence[int | None]):
        """Takes the node and the device of each holder, by its number."""
        self._nodes, self._devices = nodes, devices
        self._ahead = [0.0] * len(nodes)
        """The bytes that each holder has given, less its fair share."""
        self._entered: dict[tuple[int, ...], list[int]] = {}
        self._groups: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        self._ways: dict[tuple[tuple[int, ...], tuple[int, ...], int], Way] = {}

    def even_parts(self, having: tuple[int, ...], wanting: tuple[int, ...]) -> int:
        """Returns how many equal parts something must be cut into, so that all who have it can give the same."""
        if len(having) == 1:
            return 1
        groups = self.by_node(wanting)
        near = {self._nodes[holder] for holder in having}
        if any(self._nodes[group[0]] in near for group in groups):
            return 1
        return len(having) // gcd(len(having), len(groups))

    def way(self, having: tuple[int, ...], wanting: tuple[int, ...], num_bytes: int) -> Way:
        """Returns the way from the holders of some elements (`having`) to those that are to get them (`wanting`), and
        counts its bytes."""
        order = having if len(having) == 1 else tuple(sorted(having, key=self._ahead.__getitem__))
        key = order, wanting, self._turn(wanting, num_bytes)
        if key not in self._ways:
            self._ways[key] = self._make_way(*key)
        way = self._ways[key]
        if len(having) > 1:
            givers = [link.source for link in way.links if not self._is_local(*link)]
            for holder in having:
                self._ahead[holder] -= num_bytes * len(givers) / len(having)
            for holder, times in Counter(givers).items():
                self._ahead[holder] += num_bytes * times
        return way

    def by_node(self, holders: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the holders of each node together."""
        if holders not in self._groups:
            groups = defaultdict(list)
            for holder in holders:
                groups[self._nodes[holder]].append(holder)
            self._groups[holders] = tuple(map(tuple, groups.values()))
        return self._groups[holders]

    def _turn(self, wanting: tuple[int, ...], num_bytes: int) -> int:
        """Returns which holder of each node, by its place in its group, brings something in."""
        size = max(map(len, self.by_node(wanting)))
        if size == 1:
            return 0
        entered = self._entered.setdefault(wanting, [0] * size)
        turn = entered.index(min(entered))
        entered[turn] += num_bytes
        return turn

    def _make_way(self, order: tuple[int, ...], wanting: tuple[int, ...], turn: int) -> Way:
        """Returns the way. order: those who have it, the next to give first."""
        links, forwards = [], []
        far = 0
        for group in self.by_node(wanting):
            near = [holder for holder in order if self._nodes[holder] == self._nodes[group[0]]]
            if near:
                links += self._inside(near, group)
                continue
            entry = group[turn % len(group)]
            links.append(Link(order[far % len(order)], entry))
            forwards += [Link(entry, other) for other in group if other != entry]
            far += 1
        return Way(tuple(links), tuple(forwards))

    def _inside(self, near: Sequence[int], takers: Sequence[int]) -> Iterator[Link]:
        """Yields links from those on a node that have it, the next to give first, to those on it that want it."""
        taking = cycle(near)
        for taker in takers:
            local = next((holder for holder in near if self._is_local(holder, taker)), None)
            yield Link(next(taking) if local is None else local, taker)

    def _is_local(self, one: int, other: int) -> bool:
        return self._devices[one] == self._devices[other] is not None
