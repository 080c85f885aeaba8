"""Reads what lies on the reader's own node, and gets the rest from process to process: for engines on the devices of
trainers of which each node has only a part of the weights.

NCCL does not send from a GPU to itself. It need not: both ends of such a way are on one node, where the weights are
read. A way from node to node, or from an engine's rank to another on its node, has two GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megarl.resharding.planning.plan import Copy, Plan
from megarl.resharding.transports.p2p import PointToPoint, Rendezvous
from megarl.resharding.transports.transport import Channel, Delivery, Transport


@dataclass(frozen=True, slots=True)
class FarRendezvous(Rendezvous):
    """The rendezvous for what travels where not all of the plan does."""

    def open(
        self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool = True
    ) -> PointToPoint:
        return PointToPoint(self, member, parameters, plan.far, in_place)


_far_ends: dict[str, tuple[FarRendezvous, PointToPoint]] = {}
"""This process's end of the connections, by the member that it is. It stays when the near parameters are published
anew, because they have moved: to connect takes far longer than that."""


@dataclass(frozen=True, slots=True)
class HybridTransport:
    """The two ways. A Channel, for those that read."""

    near: Channel
    far: FarRendezvous

    def open(self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool = True) -> Reader:
        rendezvous, end = _far_ends.get(member, (None, None))
        if rendezvous != self.far:
            if end is not None:
                end.close()
            _far_ends[member] = self.far, self.far.open(member, parameters, plan, in_place)
        near = self.near.open(member, parameters, plan.near, in_place)
        return Reader(member, plan, near, _far_ends[member][1])


class Reader:
    """One reader's end of both."""

    def __init__(self, member: str, plan: Plan, near: Transport, far: PointToPoint):
        self._near, self._far = near, far
        self._near_sources = {copy.source for copy in plan.near.into(member).copies}

    @property
    def staging_bytes(self) -> int:
        """See Transport."""
        return self._near.staging_bytes + self._far.staging_bytes

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        """See Transport."""
        return (self._near if source in self._near_sources else self._far).dtype(source, parameter)

    def deliver(self, copies: Sequence[Copy]) -> Delivery:
        """Delivers the near copies first: a rank hands some of them on to others."""
        yield from self._near.deliver([copy for copy in copies if copy.source in self._near_sources])
        yield from self._far.deliver([copy for copy in copies if copy.source not in self._near_sources])
