"""The plan for a refit: which parameter rectangles are copied where, as deterministic pure data."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megarl.resharding.piece import Place


class Link(NamedTuple):
    """A connection from one holder to another, given as indices into Plan.holders."""

    source: int
    destination: int


class Move(NamedTuple):
    """A copy from one place to another with the same shape.

    If the dtypes differ, the sender casts: elements are sent as destination_dtype.
    """

    source: Place
    destination: Place
    source_dtype: str
    destination_dtype: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Moves that are sent together in one buffer.

    Attributes:
        links: links over which the buffer is sent; each source packs it once for all of its links.
        forwards: links inside a node over which a receiver forwards the buffer to destinations with the same places.
        num_bytes: size of the buffer in bytes.
    """

    links: tuple[Link, ...]
    forwards: tuple[Link, ...]
    moves: tuple[Move, ...]
    num_bytes: int

    @property
    def forward_moves(self) -> Iterator[Move]:
        """Yield the moves over forwarding links. Both ends use the place and dtype of the destination."""
        return (Move(place, place, dtype, dtype) for _, place, _, dtype in self.moves)


class Padding(NamedTuple):
    """Places in parameters that have no counterpart in the checkpoint. The holders fill them with zeros."""

    holders: tuple[int, ...]
    places: tuple[Place, ...]


class Hop(NamedTuple):
    """The transfer of one bucket, given by its index in the plan, over one of its links."""

    bucket: int
    link: Link


class Communicator(NamedTuple):
    """An NCCL communicator. `members` holds the indices of the participating holders, in rank order. If `is_inside`, it
    is used for links inside a node, otherwise for links between nodes."""

    members: tuple[int, ...]
    is_inside: bool


class Copy(NamedTuple):
    """A move over one link."""

    source: str
    destination: str
    move: Move


class Fill(NamedTuple):
    """A place that is filled with zeros."""

    destination: str
    place: Place


@dataclass(frozen=True, slots=True)
class Writes:
    """All copies and fills into one holder, in plan order."""

    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]

    def grouped_by(self, key: Callable[[str], str]) -> dict[str, Writes]:
        """Group the writes by key(name of the written parameter)."""
        copies, fills = defaultdict(list), defaultdict(list)
        for copy in self.copies:
            copies[key(copy.move.destination.parameter)].append(copy)
        for fill in self.fills:
            fills[key(fill.place.parameter)].append(fill)
        return {name: Writes(tuple(copies[name]), tuple(fills[name])) for name in dict.fromkeys((*copies, *fills))}


@dataclass(frozen=True)
class Plan:
    """All copies from sources to destinations. One bucket covers all replicas that have the same moves.

    Attributes:
        holders: names of the holders, sources before destinations.
        nodes: node index of each holder.
        num_sources: number of sources among the holders.
        buckets: buckets in an executable order: a holder receives a bucket before it forwards it.
        padding: places that are filled with zeros.
        devices: device index of each holder; empty if no holders share a device.
        order: order of all hops, computed by schedule.ordered; empty if not computed.
        communicators: NCCL communicators for the hops, computed together with `order`.

    A process that reads its sources directly executes into(name). A process that sends or receives executes the hops
    that start or end at it, in `order`, and packs and unpacks each bucket in the order of its moves. All processes have
    parts of the same plan, so they need no additional coordination.
    """

    holders: tuple[str, ...]
    nodes: tuple[int, ...]
    num_sources: int
    buckets: tuple[Bucket, ...]
    padding: tuple[Padding, ...]
    devices: tuple[int | None, ...] = ()
    order: tuple[Hop, ...] = ()
    communicators: tuple[Communicator, ...] = ()

    @cached_property
    def plan_hash(self) -> str:
        """The SHA-256 of the plan, without its order and communicators."""
        head = [self.holders, self.nodes, self.num_sources, self.padding, *([self.devices] if self.devices else [])]
        digest = hashlib.sha256(json.dumps(head).encode())
        for bucket in self.buckets:
            digest.update(json.dumps([bucket.links, bucket.forwards, bucket.moves]).encode())
        return digest.hexdigest()

    @cached_property
    def crosses_nodes(self) -> bool:
        """Whether any link connects two nodes."""
        links = (link for bucket in self.buckets for link in (*bucket.links, *bucket.forwards))
        return any(self.nodes[source] != self.nodes[destination] for source, destination in links)

    @cached_property
    def node_local(self) -> Plan:
        """The part of the plan that destinations can read directly from sources on their own node."""
        return self._only(self.is_node_local, is_remote=False)

    @cached_property
    def remote(self) -> Plan:
        """The part of the plan that processes send: transfers between nodes, and forwarding by destinations."""
        return self._only(lambda link: not self.is_node_local(link), is_remote=True)

    def is_node_local(self, link: Link) -> bool:
        """Return whether the link connects a source to a destination on the same node."""
        return link.source < self.num_sources and self.nodes[link.source] == self.nodes[link.destination]

    def communicator_of(self, link: Link) -> int:
        """Return the index of the communicator for a link: the first one that contains both ends."""
        is_inside = self.nodes[link.source] == self.nodes[link.destination]
        return next(
            number
            for number, communicator in enumerate(self.communicators)
            if communicator.is_inside == is_inside and {*link} <= {*communicator.members}
        )

    def _only(self, wanted: Callable[[Link], bool], is_remote: bool) -> Plan:
        """Return a copy of the plan with only the wanted links. Buckets keep their indices.

        Forwarding links and the order are kept only if `is_remote`.
        """
        buckets = (
            replace(bucket, links=tuple(filter(wanted, bucket.links)), forwards=bucket.forwards if is_remote else ())
            for bucket in self.buckets
        )
        order = (hop for hop in self.order if is_remote and wanted(hop.link))
        return replace(self, buckets=tuple(buckets), order=tuple(order))

    def into(self, name: str) -> Writes:
        """Return the writes into one destination. Raise a ValueError if `name` is not a destination."""
        if name not in self.holders[self.num_sources :]:
            raise ValueError(
                f"{name} is not a destination in the plan. Its destinations are {', '.join(self.destinations)}. Fix: "
                "use one of these names"
            )
        holder = self.holders.index(name, self.num_sources)
        copies = tuple(
            Copy(self.holders[source], name, move)
            for bucket in self.buckets
            for links, moves in ((bucket.links, bucket.moves), (bucket.forwards, bucket.forward_moves))
            for source, destination in links
            if destination == holder
            for move in moves
        )
        fills = (Fill(name, place) for padding in self.padding if holder in padding.holders for place in padding.places)
        return Writes(copies, tuple(fills))

    def moves_from(self, name: str) -> Iterator[Move]:
        """Yield the moves that a source sends."""
        number = self.holders.index(name)
        return (move for b in self.buckets if any(link.source == number for link in b.links) for move in b.moves)

    def is_local(self, link: Link) -> bool:
        """Return whether both ends of the link share a device."""
        return bool(self.devices) and self.devices[link.source] == self.devices[link.destination] is not None

    @property
    def sources(self) -> tuple[str, ...]:
        return self.holders[: self.num_sources]

    @property
    def destinations(self) -> tuple[str, ...]:
        return self.holders[self.num_sources :]

    @property
    def num_bytes(self) -> int:
        """Total number of bytes transferred over all links."""
        return sum(bucket.num_bytes * (len(bucket.links) + len(bucket.forwards)) for bucket in self.buckets)
