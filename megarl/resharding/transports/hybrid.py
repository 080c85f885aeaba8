"""Read weights directly on the same node, and receive the rest as messages.

Used when engines share GPUs with trainers and each node holds only part of the weights. NCCL cannot send from a GPU to
itself, and never has to: processes that share a GPU read weights directly. Links between nodes, and links between the
ranks of an engine, always connect two different GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megarl.resharding.planning.plan import Copy, Plan
from megarl.resharding.transports.p2p import PointToPoint, Rendezvous
from megarl.resharding.transports.transport import Channel, Delivery, Transport


@dataclass(frozen=True, slots=True)
class RemoteRendezvous(Rendezvous):
    """A rendezvous for the holders in the remote part of a plan."""

    def open(
        self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool = True
    ) -> PointToPoint:
        return PointToPoint(self, member, parameters, plan.remote, in_place)


_connections: dict[str, tuple[RemoteRendezvous, PointToPoint]] = {}
"""Open connections in this process: member -> its rendezvous and transport. Connections stay open when trainers publish
their parameters again after moving them, because connecting takes far longer than publishing."""


@dataclass(frozen=True, slots=True)
class HybridTransport:
    """A Channel that combines direct reads inside a node with messages between processes."""

    node_local: Channel
    remote: RemoteRendezvous

    def open(self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool = True) -> Reader:
        rendezvous, connection = _connections.get(member, (None, None))
        if rendezvous != self.remote:
            if connection is not None:
                connection.close()
            _connections[member] = self.remote, self.remote.open(member, parameters, plan, in_place)
        node_local = self.node_local.open(member, parameters, plan.node_local, in_place)
        return Reader(member, plan, node_local, _connections[member][1])


class Reader:
    """The transport of one reader."""

    def __init__(self, member: str, plan: Plan, node_local: Transport, remote: PointToPoint):
        self._node_local, self._remote = node_local, remote
        self._local_sources = {copy.source for copy in plan.node_local.into(member).copies}

    @property
    def staging_bytes(self) -> int:
        """See Transport."""
        return self._node_local.staging_bytes + self._remote.staging_bytes

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        """See Transport."""
        return (self._node_local if source in self._local_sources else self._remote).dtype(source, parameter)

    def deliver(self, copies: Sequence[Copy]) -> Delivery:
        """Deliver the node-local copies first, because a rank forwards some of them."""
        yield from self._node_local.deliver([copy for copy in copies if copy.source in self._local_sources])
        yield from self._remote.deliver([copy for copy in copies if copy.source not in self._local_sources])
