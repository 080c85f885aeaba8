"""Choose the links in a plan: balance the load over replicas, and send each byte to a node only once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import cycle
from math import gcd
from typing import NamedTuple

from megarl.resharding.planning.plan import Link


class Route(NamedTuple):
    """The links over which a rectangle is sent. `links` start at sources, `forwards` at destinations."""

    links: tuple[Link, ...]
    forwards: tuple[Link, ...]


class Balance:
    """Chooses links and balances the number of bytes that replicas send.

    A destination receives from a source on its own device or, if there is none, from one on its own node. If the node
    has no source, one of its destinations receives and forwards to the rest, so each byte enters a node once.

    The next sender is the replica that has sent the fewest bytes relative to its fair share: each transfer counts
    equally toward the shares of all replicas that could send it. Copies within one device do not count. The destination
    that receives for its node is the one that has received the fewest bytes in this role.
    """

    def __init__(self, nodes: Sequence[int], devices: Sequence[int | None]):
        """`nodes` and `devices` contain the node and the device of each holder."""
        self._nodes, self._devices = nodes, devices
        self._ahead = [0.0] * len(nodes)
        """Number of bytes assigned to each sender so far, minus its fair share."""
        self._entered: dict[tuple[int, ...], list[int]] = {}
        self._holders_by_node: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        self._routes: dict[tuple[tuple[int, ...], tuple[int, ...], int], Route] = {}

    def even_parts(self, sources: tuple[int, ...], destinations: tuple[int, ...]) -> int:
        """Return how many equal parts to split a rectangle into so that every source sends the same amount."""
        if len(sources) == 1:
            return 1
        receivers = self.by_node(destinations)
        source_nodes = {self._nodes[holder] for holder in sources}
        if any(self._nodes[on_node[0]] in source_nodes for on_node in receivers):
            return 1
        return len(sources) // gcd(len(sources), len(receivers))

    def route(self, sources: tuple[int, ...], destinations: tuple[int, ...], num_bytes: int) -> Route:
        """Return the route from the sources to the destinations, and add its bytes to the load of the senders."""
        order = sources if len(sources) == 1 else tuple(sorted(sources, key=self._ahead.__getitem__))
        key = order, destinations, self._turn(destinations, num_bytes)
        if key not in self._routes:
            self._routes[key] = self._make_route(*key)
        route = self._routes[key]
        if len(sources) > 1:
            senders = [link.source for link in route.links if not self._is_local(*link)]
            for holder in sources:
                self._ahead[holder] -= num_bytes * len(senders) / len(sources)
            for holder, times in Counter(senders).items():
                self._ahead[holder] += num_bytes * times
        return route

    def by_node(self, holders: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Group the holders by node."""
        if holders not in self._holders_by_node:
            nodes = defaultdict(list)
            for holder in holders:
                nodes[self._nodes[holder]].append(holder)
            self._holders_by_node[holders] = tuple(map(tuple, nodes.values()))
        return self._holders_by_node[holders]

    def _turn(self, destinations: tuple[int, ...], num_bytes: int) -> int:
        """Return the index, among the destinations on each node, of the one that receives for the node."""
        size = max(map(len, self.by_node(destinations)))
        if size == 1:
            return 0
        entered = self._entered.setdefault(destinations, [0] * size)
        turn = entered.index(min(entered))
        entered[turn] += num_bytes
        return turn

    def _make_route(self, order: tuple[int, ...], destinations: tuple[int, ...], turn: int) -> Route:
        """Build the route. `order` lists the sources, starting with the next sender."""
        links, forwards = [], []
        remote_nodes = 0
        for receivers in self.by_node(destinations):
            senders = [holder for holder in order if self._nodes[holder] == self._nodes[receivers[0]]]
            if senders:
                links += self._links_inside(senders, receivers)
                continue
            entry = receivers[turn % len(receivers)]
            links.append(Link(order[remote_nodes % len(order)], entry))
            forwards += [Link(entry, other) for other in receivers if other != entry]
            remote_nodes += 1
        return Route(tuple(links), tuple(forwards))

    def _links_inside(self, senders: Sequence[int], receivers: Sequence[int]) -> Iterator[Link]:
        """Yield links inside one node, preferring a sender on the receiver's device."""
        next_senders = cycle(senders)
        for receiver in receivers:
            local = next((holder for holder in senders if self._is_local(holder, receiver)), None)
            yield Link(next(next_senders) if local is None else local, receiver)

    def _is_local(self, one: int, other: int) -> bool:
        return self._devices[one] == self._devices[other] is not None
