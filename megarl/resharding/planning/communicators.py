"""The communicators of NCCL over which buckets are sent: few, however many neighbours a rank has.

A rank does the batches of a communicator one after the other. So what travels between nodes and what is handed on
inside one have communicators of their own: the slow ones would hold up the fast ones. Between nodes trainers only send
and engines only receive, which takes one port of a rank, and one batch at a time is all that it can do.

No communicator takes two ranks on one GPU. Where trainers and engines share GPUs, those that send and those that
receive are told apart by their nodes: two different numbers differ in a bit, and a communicator has the trainers of the
nodes with one value of that bit and the engines of those with the other.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from megarl.resharding.planning.plan import Communicator, Link, Plan

COMMUNICATOR_BYTES = 512 * 2**20
"""The bytes of a GPU that a communicator takes for buffers. An estimate: it has not been measured."""


class _Place(NamedTuple):
    """What a link has in common with others of its communicator.

    node    the node inside which it is, or None
    bit     the bit in which the numbers of its two nodes differ, where GPUs are shared
    value   the bit's value at the node that it comes from
    """

    node: int | None
    bit: int = 0
    value: int = 0


def communicators(plan: Plan) -> tuple[Communicator, ...]:
    """Returns the communicators of what is sent, each with the ranks that have something to send or receive over it.
    Where both sides share devices, destinations read what is on their own node, and it is not sent."""
    links: dict[_Place, set[Link]] = defaultdict(set)
    for bucket in plan.buckets:
        for link in (*bucket.links, *bucket.onward):
            if not (plan.devices and plan.is_near(link)):
                links[_place(plan, link)].add(link)
    return tuple(
        Communicator(tuple(sorted({rank for link in links[place] for rank in link})), place.node is not None)
        for place in sorted(links, key=lambda place: (place.node is not None, place))
    )


def _place(plan: Plan, link: Link) -> _Place:
    source, destination = (plan.nodes[rank] for rank in link)
    if source == destination:
        return _Place(source)
    if not plan.devices:
        return _Place(None)
    differing = source ^ destination
    bit = (differing & -differing).bit_length() - 1
    return _Place(None, bit, source >> bit & 1)
