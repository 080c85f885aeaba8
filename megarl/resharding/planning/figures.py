"""The cost of a plan, in numbers."""

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
    """The figures of a plan.

    bytes_total           bytes that travel, over all links, or are copied on a device
    bytes_wasted          of them, what its destination does not keep, or what enters a node that has it already
    bytes_by_link         "inter": between nodes, "intra": inside them, "local": on a device that both sides share
    written_once          whether it is proven that every element of every destination is written exactly once, with
                          what belongs there
    source_balance        the bytes that the busiest source gives, over the mean of its replicas. Where several sets of
                          replicas overlap, as those of experts and of other layers do, the mean is summed over them.
                          What stays on a device does not count
    predicted_seconds     the time until everything has travelled, in the order in which it is sent over a network
    floor_seconds         the busiest rank's bytes in or out, over the bandwidth of that link
    communicators         the communicators of NCCL that one rank is a member of, at most
    communicator_bytes    the bytes that communicators take on one GPU, at most: an estimate
    neighbours            the ranks with which one rank exchanges messages, at most
    operations            the messages that one rank sends and receives over NCCL, at most
    peak_staging_bytes    bytes of buckets that a rank has in hand: the one on its way from or to another node, and the
                          next
    ranks_source, ranks_destination    the numbers of processes
    plan_hash             a hash that is equal for equal plans
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
    neighbours: int
    operations: int
    peak_staging_bytes: int
    ranks_source: int
    ranks_destination: int
    plan_hash: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def figures(plan: Plan, sources: Sequence[Holder], destinations: Sequence[Holder], bandwidth: Bandwidth) -> Figures:
    """Returns a plan's figures, once the plan is proven. Raises PlanError where that fails."""
    plan = ordered(plan)
    check_plan(plan, sources, destinations)
    need = _need(sources, destinations)
    by_link = _bytes_by_link(plan)
    messages = [num_messages(bucket) for bucket in plan.buckets]
    simulated, sent = schedule(plan, bandwidth, messages), _sent(plan, messages)
    memberships = Counter(member for communicator in plan.communicators for member in communicator.members)
    return Figures(
        bytes_total=plan.num_bytes,
        bytes_wasted=plan.num_bytes - need.kept + max(0, by_link["inter"] - need.entering),
        bytes_by_link=by_link,
        written_once=True,
        source_balance=_source_balance(plan, need.fair),
        predicted_seconds=simulated.seconds,
        floor_seconds=simulated.floor_seconds,
        communicators=max(memberships.values(), default=0),
        communicator_bytes=max(_communicator_bytes(plan, sent), default=0),
        neighbours=max(map(len, sent.neighbours), default=0),
        operations=max(sent.operations, default=0),
        peak_staging_bytes=_peak_staging(plan, simulated),
        ranks_source=len(sources),
        ranks_destination=len(destinations),
        plan_hash=plan.plan_hash,
    )


class Need(NamedTuple):
    """The bytes that follow from the holders alone, whatever the plan.

    kept      bytes that the destinations keep, without padding
    entering  bytes that enter nodes, each once, where they are not there already
    fair      bytes that each source gives others if all who have something give equal parts of it
    """

    kept: int
    entering: int
    fair: list[float]


def _need(sources: Sequence[Holder], destinations: Sequence[Holder]) -> Need:
    places = [(holder.node, holder.device) for holder in (*sources, *destinations)]
    held = holdings(sources)
    kept = entering = 0
    fair = [0.0] * len(sources)
    givers: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, dict[int, float]]] = {}
    for tensor, rectangles in holdings(destinations, first=len(sources)).items():
        cuts, owners = tuple(held[tensor]), list(held[tensor].values())
        for wanted, wanting in rectangles.items():
            takers = tuple(holder for keep in wanting for holder in keep.holders)
            for part, numbers in divide(cuts, wanted).parts:
                num_bytes = num_elements(part) * ITEM_BYTES[wanting[0].dtype]
                having = tuple(holder for number in numbers for keep in owners[number] for holder in keep.holders)
                if (having, takers) not in givers:
                    givers[having, takers] = _shares(having, takers, places)
                far, shares = givers[having, takers]
                kept += num_bytes * len(takers)
                entering += num_bytes * far
                for holder, share in shares.items():
                    fair[holder] += num_bytes * share
    return Need(kept, entering, fair)


def _shares(
    having: tuple[int, ...], takers: tuple[int, ...], places: Sequence[tuple[int, int | None]]
) -> tuple[int, dict[int, float]]:
    """Returns how many nodes something must enter, and how many times each of those who have it gives it to others.
    places: node and device of each."""
    near: dict[int, list[int]] = defaultdict(list)
    for holder in having:
        near[places[holder][0]].append(holder)
    devices = {places[holder][1] for holder in having} - {None}
    shares: dict[int, float] = defaultdict(float)
    far = {places[taker][0] for taker in takers} - near.keys()
    for holder in having:
        shares[holder] += len(far) / len(having)
    for node, device in (places[taker] for taker in takers):
        for holder in near.get(node, ()) if device not in devices else ():
            shares[holder] += 1 / len(near[node])
    return len(far), shares


def _bytes_by_link(plan: Plan) -> dict[str, int]:
    moved = {"inter": 0, "intra": 0, "local": 0}
    for bucket in plan.buckets:
        for link in (*bucket.links, *bucket.forwards):
            node_link = "local" if plan.is_local(link) else "intra"
            moved[node_link if plan.nodes[link.source] == plan.nodes[link.destination] else "inter"] += bucket.num_bytes
    return moved


class _Sent(NamedTuple):
    """What each rank exchanges in messages: with whom, and how many."""

    neighbours: list[set[int]]
    operations: list[int]


def _sent(plan: Plan, messages: Sequence[int]) -> _Sent:
    """Returns what is sent. Where both sides share devices, destinations read what is on their own node, and it is not.
    messages: of each bucket."""
    sent = _Sent([set() for _ in plan.holders], [0] * len(plan.holders))
    for bucket, count in zip((plan.remote if plan.devices else plan).buckets, messages, strict=True):
        for source, destination in (*bucket.links, *bucket.forwards):
            sent.neighbours[source].add(destination)
            sent.neighbours[destination].add(source)
            sent.operations[source] += count
            sent.operations[destination] += count
    return sent


def _communicator_bytes(plan: Plan, sent: _Sent) -> list[int]:
    """Returns the bytes of the communicators on each GPU, of one rank or of two that share it."""
    between = Counter(member for members, is_inside in plan.communicators if not is_inside for member in members)
    found: dict[tuple[int, int], int] = defaultdict(int)
    for rank, neighbours in enumerate(sent.neighbours):
        device = plan.devices[rank] if plan.devices else None
        near = sum(plan.nodes[neighbour] == plan.nodes[rank] for neighbour in neighbours)
        found[plan.nodes[rank], rank if device is None else -1 - device] += buffer_bytes(between[rank], near)
    return [*found.values()]


def _source_balance(plan: Plan, fair: Sequence[float]) -> float:
    given = [0] * len(fair)
    for bucket in plan.buckets:
        for link in bucket.links:
            if link.source < plan.num_sources and not plan.is_local(link):
                given[link.source] += bucket.num_bytes
    return max((bytes_given / share for bytes_given, share in zip(given, fair, strict=True) if share), default=1.0)


def _peak_staging(plan: Plan, simulated: Schedule) -> int:
    """Returns the peak of staged bytes. Inside a node nothing is staged: a process can read what another one has where
    it lies."""
    last_sizes: dict[tuple[int, bool], int] = defaultdict(int)
    peak = 0
    for number, (source, destination), _, _ in simulated.transfers:
        if plan.nodes[source] != plan.nodes[destination]:
            size = plan.buckets[number].num_bytes
            for port in ((source, True), (destination, False)):
                peak = max(peak, last_sizes[port] + size)
                last_sizes[port] = size
    return peak
