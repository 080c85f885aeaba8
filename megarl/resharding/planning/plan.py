"""A plan says which rectangle of which parameter goes where. Pure data, the same on every process that computes it."""

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
    """A way from one holder to another, by their numbers in Plan.holders."""

    source: int
    destination: int


class Move(NamedTuple):
    """A rectangle's way: the elements of a place become those of a place of the same shape.

    Where the dtypes differ they are cast, by who sends them: what travels has destination_dtype.
    """

    source: Place
    destination: Place
    source_dtype: str
    destination_dtype: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Moves that travel together, as one buffer.

    links      the links over each of which the buffer goes: a source packs it once for all of its replicas'
               destinations
    onward     links inside a node: who has received the buffer hands it on to others, which keep it at the same places
    num_bytes  bytes of the buffer
    """

    links: tuple[Link, ...]
    onward: tuple[Link, ...]
    moves: tuple[Move, ...]
    num_bytes: int

    @property
    def onward_moves(self) -> Iterator[Move]:
        """The moves over the links of `onward`."""
        return (Move(place, place, dtype, dtype) for _, place, _, dtype in self.moves)


class Padding(NamedTuple):
    """Places that become zero at each of these holders: they have no counterpart in the checkpoint."""

    holders: tuple[int, ...]
    places: tuple[Place, ...]


class Hop(NamedTuple):
    """A bucket, by its number in the plan, over one of its links."""

    bucket: int
    link: Link


class Communicator(NamedTuple):
    """A communicator of NCCL.

    members    the numbers of its holders, in their order
    is_inside  whether it is for links inside a node, else for those between nodes
    """

    members: tuple[int, ...]
    is_inside: bool


class Copy(NamedTuple):
    """A move over one link."""

    source: str
    destination: str
    move: Move


class Fill(NamedTuple):
    """A place whose elements become zero."""

    destination: str
    place: Place


@dataclass(frozen=True, slots=True)
class Writes:
    """All that is written into one holder, in the order of the plan."""

    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]

    def grouped_by(self, key: Callable[[str], str]) -> dict[str, Writes]:
        """Returns the writes in parts, by what `key` says of the parameter that is written."""
        copies, fills = defaultdict(list), defaultdict(list)
        for copy in self.copies:
            copies[key(copy.move.destination.parameter)].append(copy)
        for fill in self.fills:
            fills[key(fill.place.parameter)].append(fill)
        return {name: Writes(tuple(copies[name]), tuple(fills[name])) for name in dict.fromkeys((*copies, *fills))}


@dataclass(frozen=True)
class Plan:
    """Everything that moves, said once for all replicas that it is true of.

    holders       their names, sources before destinations
    nodes         the machine of each holder
    num_sources   how many of the holders are sources
    buckets       in the order in which they may be executed: what is handed on was received before
    padding       the places that become zero
    devices       the device of each holder, where some share one; empty where none do
    order         the order of everything that travels, as schedule.ordered finds it (empty: nobody has asked)
    communicators the communicators over which NCCL would send it, all that a plan with an order needs

    To execute it, a process needs into(its name), or, where buffers travel, the hops that it is an end of: it sends and
    receives in their order, and packs and unpacks the moves of a bucket in theirs. No other agreement is needed, as
    every process has its part of the same plan.
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
        """SHA-256 of the contents: equal on processes that have the same plan."""
        head = [self.holders, self.nodes, self.num_sources, self.padding, *([self.devices] if self.devices else [])]
        digest = hashlib.sha256(json.dumps(head).encode())
        for bucket in self.buckets:
            digest.update(json.dumps([bucket.links, bucket.onward, bucket.moves]).encode())
        return digest.hexdigest()

    @cached_property
    def crosses_nodes(self) -> bool:
        """Whether something travels from one machine to another."""
        links = (link for bucket in self.buckets for link in (*bucket.links, *bucket.onward))
        return any(self.nodes[source] != self.nodes[destination] for source, destination in links)

    @cached_property
    def near(self) -> Plan:
        """The part of the plan that its destinations can read at its sources, on their own node."""
        return self._only(self.is_near, is_far=False)

    @cached_property
    def far(self) -> Plan:
        """The other part: what comes from other nodes, and what destinations hand on."""
        return self._only(lambda link: not self.is_near(link), is_far=True)

    def is_near(self, link: Link) -> bool:
        """Returns whether it leads from a source to a destination on the same node."""
        return link.source < self.num_sources and self.nodes[link.source] == self.nodes[link.destination]

    def communicator_of(self, link: Link) -> int:
        """Returns which of the communicators a link uses, by its number: the first that has both ends."""
        is_inside = self.nodes[link.source] == self.nodes[link.destination]
        return next(
            number
            for number, communicator in enumerate(self.communicators)
            if communicator.is_inside == is_inside and {*link} <= {*communicator.members}
        )

    def _only(self, wanted: Callable[[Link], bool], is_far: bool) -> Plan:
        """Returns the plan with the wanted links alone, and their order if they are far. Buckets keep their numbers."""
        buckets = (
            replace(bucket, links=tuple(filter(wanted, bucket.links)), onward=bucket.onward if is_far else ())
            for bucket in self.buckets
        )
        order = (hop for hop in self.order if is_far and wanted(hop.link))
        return replace(self, buckets=tuple(buckets), order=tuple(order))

    def into(self, name: str) -> Writes:
        """Returns what is written into one holder. Raises ValueError for a name that is not a destination's."""
        if name not in self.holders[self.num_sources :]:
            raise ValueError(f"{name} is not a destination of the plan; it has {', '.join(self.destinations)}")
        holder = self.holders.index(name, self.num_sources)
        copies = tuple(
            Copy(self.holders[source], name, move)
            for bucket in self.buckets
            for links, moves in ((bucket.links, bucket.moves), (bucket.onward, bucket.onward_moves))
            for source, destination in links
            if destination == holder
            for move in moves
        )
        fills = (Fill(name, place) for padding in self.padding if holder in padding.holders for place in padding.places)
        return Writes(copies, tuple(fills))

    def is_local(self, link: Link) -> bool:
        """Returns whether both ends are on one device."""
        return bool(self.devices) and self.devices[link.source] == self.devices[link.destination] is not None

    @property
    def sources(self) -> tuple[str, ...]:
        return self.holders[: self.num_sources]

    @property
    def destinations(self) -> tuple[str, ...]:
        return self.holders[self.num_sources :]

    @property
    def num_bytes(self) -> int:
        """The bytes that travel, over all links."""
        return sum(bucket.num_bytes * (len(bucket.links) + len(bucket.onward)) for bucket in self.buckets)
