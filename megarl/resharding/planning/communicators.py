"""Choose the NCCL communicators for a plan. Their number does not depend on how many neighbors a rank has.

A rank executes the batches in a communicator one by one. Transfers between nodes and forwarding inside a node therefore
use separate communicators, so that slow transfers do not delay fast ones. Between nodes, trainers only send and engines
only receive; one communicator is enough, because a rank's port carries only one batch at a time.

NCCL does not allow two ranks in a communicator to use the same GPU. If trainers and engines share GPUs, links between
nodes are therefore grouped by the lowest bit in which the two node numbers differ. A communicator contains the trainers
on all nodes with one value of that bit, and the engines on all nodes with the opposite value.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from megarl.resharding.planning.plan import Communicator, Link, Plan

MIB = 2**20

CONNECTION = (10 + 2) * MIB
"""Bytes of NCCL buffers per channel per peer inside a node: receive FIFOs for three protocols (8 steps: LL 0.5 MiB,
LL128 4.69 MiB, Simple NCCL_BUFFSIZE = 4 MiB) and a send header, each rounded up to multiples of 2 MiB (init.cc:
computeBuffSizes; p2p.cc: CUDA_IPC_MIN). NVIDIA/nccl issue 1685 shows allocations of these two sizes."""

EXCHANGE_CHANNELS = 32
"""Number of channels between two ranks on one node, for a communicator inside the node (NVIDIA/nccl issue 1685)."""

NETWORK_BUFFERS = 2 * 32 * 16 * 128 * 1024
"""Bytes of a rank's send and receive buffers for transfers between nodes: 32 channels, each with 16 steps of
NCCL_P2P_NET_CHUNKSIZE (net.cc: sharedBuffersInit)."""


class _Key(NamedTuple):
    """Identifies a communicator: links with the same key share it.

    Attributes:
        node: the node, for links inside a node; None for links between nodes.
        bit: lowest bit in which the two node numbers differ, if GPUs are shared.
        value: value of that bit at the source node.
    """

    node: int | None
    bit: int = 0
    value: int = 0


def communicators(plan: Plan) -> tuple[Communicator, ...]:
    """Return the communicators for a plan, each with the ranks that send or receive over it.

    If sources and destinations share devices, links from sources on the same node are excluded: destinations read these
    sources directly.
    """
    links: dict[_Key, set[Link]] = defaultdict(set)
    for bucket in plan.buckets:
        for link in (*bucket.links, *bucket.forwards):
            if not (plan.devices and plan.is_node_local(link)):
                links[_key(plan, link)].add(link)
    return tuple(
        Communicator(tuple(sorted({rank for link in links[key] for rank in link})), key.node is not None)
        for key in sorted(links, key=lambda key: (key.node is not None, key))
    )


def _key(plan: Plan, link: Link) -> _Key:
    source, destination = (plan.nodes[rank] for rank in link)
    if source == destination:
        return _Key(source)
    if not plan.devices:
        return _Key(None)
    differing = source ^ destination
    bit = (differing & -differing).bit_length() - 1
    return _Key(None, bit, source >> bit & 1)


def buffer_bytes(between: int, near: int) -> int:
    """Estimate the GPU memory of a rank's communicator buffers, in bytes. The estimate has not been verified by a
    measurement. Each of the `between` communicators across nodes has one set of buffers, as does the connection to each
    of the `near` neighbors in the node."""
    return between * NETWORK_BUFFERS + near * EXCHANGE_CHANNELS * CONNECTION
