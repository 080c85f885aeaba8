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

MIB = 2**20

CONNECTION = (10 + 2) * MIB
"""NCCL's buffers for one channel from one peer of the node and to one: to receive, the FIFOs of its three protocols (8
steps: 0.5 MiB of LL, 4.69 of LL128, NCCL_BUFFSIZE = 4 of Simple), and a header to send, in multiples of 2 MiB
(init.cc: computeBuffSizes; p2p.cc: CUDA_IPC_MIN). NVIDIA/nccl issue 1685 shows allocations of these two sizes."""

EXCHANGE_CHANNELS = 32
"""The channels between two ranks of a node that send to each other over a communicator that stays in the node (issue
1685)."""

NETWORK_BUFFERS = 2 * 32 * 16 * 128 * 1024
"""The memory that a rank sends to other nodes from, and receives into: for 32 channels 16 steps of
NCCL_P2P_NET_CHUNKSIZE each (net.cc: sharedBuffersInit)."""


class _Place(NamedTuple):
    """The things that a link has in common with others of its communicator.

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
        for link in (*bucket.links, *bucket.forwards):
            if not (plan.devices and plan.is_node_local(link)):
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


def buffer_bytes(between: int, near: int) -> int:
    """Returns what the buffers of a rank's communicators take of its GPU, an estimate that has not been measured.

    between   its communicators between nodes, each with some that all other nodes share
    near      its neighbours inside its node, of which each has some
    """
    return between * NETWORK_BUFFERS + near * EXCHANGE_CHANNELS * CONNECTION
