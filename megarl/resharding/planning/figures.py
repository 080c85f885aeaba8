"""Compute the cost of a plan: bytes, seconds, balance, messages and memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from megarl.resharding.piece import ITEM_BYTES, Holder, num_elements
from megarl.resharding.planning.check import check_plan
from megarl.resharding.planning.communicators import buffer_bytes
from megarl.resharding.planning.holdings import divide, holdings
from megarl.resharding.planning.messages import num_messages
from megarl.resharding.planning.plan import Plan
from megarl.resharding.planning.schedule import Bandwidth, Schedule, ordered, schedule


@dataclass(frozen=True, slots=True)
class Figures:
    """The cost figures of a plan.

    Attributes:
        bytes_total: bytes transferred over all links, including copies within one device.
        bytes_wasted: transferred bytes that a destination does not store, or that enter a node more than once.
        bytes_by_link: bytes per kind of link: "inter" between nodes, "intra" inside a node, "local" within a device.
        written_once: whether the plan is proven to write every destination element exactly once.
        source_balance: highest ratio of the bytes that a source sends to the mean over its replicas. If sets of
            replicas overlap (expert and non-expert weights), their means add up. Copies within one device do not count.
        predicted_seconds: simulated duration of the refit on the network.
        floor_seconds: lower bound for the duration: bytes through the busiest port, divided by its bandwidth.
        communicators: maximum number of NCCL communicators per rank.
        communicator_bytes: estimated maximum memory for communicators per GPU, in bytes.
        neighbors: maximum number of peers of one rank.
        operations: maximum number of NCCL messages that one rank sends and receives.
        peak_staging_bytes: maximum size of a rank's staging buffers, which hold the current and the next bucket sent
            between nodes.
        ranks_source, ranks_destination: number of processes on each side.
    """

    bytes_total: int
    bytes_wasted: int
    bytes_by_link: dict[str, int]
    written_once: bool
    source_balance: float
    predicted_seconds: float
    floor_seconds: float
    communicators: int
    communicator_bytes: int
    neighbors: int
    operations: int
    peak_staging_bytes: int
    ranks_source: int
    ranks_destination: int
    plan_hash: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def figures(plan: Plan, sources: Sequence[Holder], destinations: Sequence[Holder], bandwidth: Bandwidth) -> Figures:
    """Check the plan and return its figures. Raise a PlanError if the check fails."""
    plan = ordered(plan)
    check_plan(plan, sources, destinations)
    demand = _demand(sources, destinations)
    by_link = _bytes_by_link(plan)
    messages = [num_messages(bucket) for bucket in plan.buckets]
    simulated, traffic = schedule(plan, bandwidth, messages), _traffic(plan, messages)
    memberships = Counter(member for communicator in plan.communicators for member in communicator.members)
    return Figures(
        bytes_total=plan.num_bytes,
        bytes_wasted=plan.num_bytes - demand.stored + max(0, by_link["inter"] - demand.entering),
        bytes_by_link=by_link,
        written_once=True,
        source_balance=_source_balance(plan, demand.fair),
        predicted_seconds=simulated.seconds,
        floor_seconds=simulated.floor_seconds,
        communicators=max(memberships.values(), default=0),
        communicator_bytes=max(_communicator_bytes(plan, traffic), default=0),
        neighbors=max(map(len, traffic.neighbors), default=0),
        operations=max(traffic.operations, default=0),
        peak_staging_bytes=_peak_staging(plan, simulated),
        ranks_source=len(sources),
        ranks_destination=len(destinations),
        plan_hash=plan.plan_hash,
    )


class Demand(NamedTuple):
    """The bytes that every plan for these holders must move. `stored` counts the bytes that the destinations store,
    without padding. `entering` counts, once per node, the bytes that must enter a node because it has no source for
    them. `fair` lists the bytes that each source sends if all replicas send the same amount."""

    stored: int
    entering: int
    fair: list[float]


def _demand(sources: Sequence[Holder], destinations: Sequence[Holder]) -> Demand:
    places = [(holder.node, holder.device) for holder in (*sources, *destinations)]
    held = holdings(sources)
    stored = entering = 0
    fair = [0.0] * len(sources)
    known_shares: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, dict[int, float]]] = {}
    for tensor, rectangles in holdings(destinations, first=len(sources)).items():
        source_rectangles, source_places = tuple(held[tensor]), list(held[tensor].values())
        for wanted, destination_places in rectangles.items():
            receivers = tuple(holder for place in destination_places for holder in place.holders)
            for part, numbers in divide(source_rectangles, wanted).parts:
                num_bytes = num_elements(part) * ITEM_BYTES[destination_places[0].dtype]
                senders = tuple(
                    holder for number in numbers for place in source_places[number] for holder in place.holders
                )
                if (senders, receivers) not in known_shares:
                    known_shares[senders, receivers] = _shares(senders, receivers, places)
                nodes_to_enter, shares = known_shares[senders, receivers]
                stored += num_bytes * len(receivers)
                entering += num_bytes * nodes_to_enter
                for holder, share in shares.items():
                    fair[holder] += num_bytes * share
    return Demand(stored, entering, fair)


def _shares(
    senders: tuple[int, ...], receivers: tuple[int, ...], places: Sequence[tuple[int, int | None]]
) -> tuple[int, dict[int, float]]:
    """Return the number of nodes that a rectangle must enter, and how often each sender sends it on average. `places`
    contains the (node, device) of each holder."""
    senders_by_node: dict[int, list[int]] = defaultdict(list)
    for holder in senders:
        senders_by_node[places[holder][0]].append(holder)
    devices = {places[holder][1] for holder in senders} - {None}
    shares: dict[int, float] = defaultdict(float)
    nodes_to_enter = {places[receiver][0] for receiver in receivers} - senders_by_node.keys()
    for holder in senders:
        shares[holder] += len(nodes_to_enter) / len(senders)
    for node, device in (places[receiver] for receiver in receivers):
        for holder in senders_by_node.get(node, ()) if device not in devices else ():
            shares[holder] += 1 / len(senders_by_node[node])
    return len(nodes_to_enter), shares


def _bytes_by_link(plan: Plan) -> dict[str, int]:
    moved = {"inter": 0, "intra": 0, "local": 0}
    for bucket in plan.buckets:
        for link in (*bucket.links, *bucket.forwards):
            node_link = "local" if plan.is_local(link) else "intra"
            moved[node_link if plan.nodes[link.source] == plan.nodes[link.destination] else "inter"] += bucket.num_bytes
    return moved


class _Traffic(NamedTuple):
    """Each rank's neighbors and number of messages."""

    neighbors: list[set[int]]
    operations: list[int]


def _traffic(plan: Plan, messages: Sequence[int]) -> _Traffic:
    """Return each rank's neighbors and the number of messages that it exchanges. `messages` contains each bucket's
    number of messages per link. If sources and destinations share devices, reads within a node need no messages."""
    traffic = _Traffic([set() for _ in plan.holders], [0] * len(plan.holders))
    for bucket, count in zip((plan.remote if plan.devices else plan).buckets, messages, strict=True):
        for source, destination in (*bucket.links, *bucket.forwards):
            traffic.neighbors[source].add(destination)
            traffic.neighbors[destination].add(source)
            traffic.operations[source] += count
            traffic.operations[destination] += count
    return traffic


def _communicator_bytes(plan: Plan, traffic: _Traffic) -> list[int]:
    """Return the bytes used by communicators on each GPU, summed over the ranks that share the GPU."""
    between = Counter(member for members, is_inside in plan.communicators if not is_inside for member in members)
    num_bytes: dict[tuple[int, int], int] = defaultdict(int)
    for rank, neighbors in enumerate(traffic.neighbors):
        device = plan.devices[rank] if plan.devices else None
        near = sum(plan.nodes[neighbor] == plan.nodes[rank] for neighbor in neighbors)
        num_bytes[plan.nodes[rank], rank if device is None else -1 - device] += buffer_bytes(between[rank], near)
    return [*num_bytes.values()]


def _source_balance(plan: Plan, fair: Sequence[float]) -> float:
    sent = [0] * len(fair)
    for bucket in plan.buckets:
        for link in bucket.links:
            if link.source < plan.num_sources and not plan.is_local(link):
                sent[link.source] += bucket.num_bytes
    return max((sent_bytes / share for sent_bytes, share in zip(sent, fair, strict=True) if share), default=1.0)


def _peak_staging(plan: Plan, simulated: Schedule) -> int:
    """Return the maximum number of bytes that one rank stages.

    Only transfers between nodes are staged; inside a node, a process reads the sender's memory directly.
    """
    last_sizes: dict[tuple[int, bool], int] = defaultdict(int)
    peak = 0
    for number, (source, destination), _, _ in simulated.transfers:
        if plan.nodes[source] != plan.nodes[destination]:
            size = plan.buckets[number].num_bytes
            for port in ((source, True), (destination, False)):
                peak = max(peak, last_sizes[port] + size)
                last_sizes[port] = size
    return peak
