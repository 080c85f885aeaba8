"""The nodes of a run by number, and the spare nodes that may replace them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megarl.cluster.nodes.gathering import POLL_S, accept_connections, alive_nodes
from megarl.cluster.nodes.rendezvous import NodeRendezvous, Report

NODE_LOSS_S = 30.0
"""Seconds that Ray's health checks need to detect a lost node. See session.HEALTH_CHECKS."""

SHUTDOWN_S = 3.0
"""If a node shuts down, Ray exits within this many seconds after the first of the node's processes is lost."""


class Members:
    """The run's nodes. Further nodes may join at any time and are spare nodes. A spare node that replaces a lost one
    takes over its number."""

    def __init__(self, first: str, others: Sequence[Report] = (), rendezvous: NodeRendezvous | None = None):
        """first: Ray's id for the driver's node, which has the number 0. others: reports of the other nodes."""
        self._others, self._rendezvous = list(others), rendezvous
        addresses = alive_nodes() if others else {}
        self._ray_ids = [first, *(addresses[report.address] for report in others)]
        """Ray's id for each node, by node number."""
        self._announced = set[str]()

    def __len__(self) -> int:
        return len(self._ray_ids)

    def ray_id(self, number: int) -> str:
        return self._ray_ids[number]

    def name(self, number: int) -> str:
        """Return the name of a node other than the driver's."""
        return self._others[number - 1].name

    def lost(self, patience_s: float = 0.0) -> list[int]:
        """Return the numbers of nodes that Ray has detected as lost. Because a lost process is often the first sign of
        a lost node, wait up to patience_s seconds for Ray to detect one, unless all nodes still accept connections."""
        begin = time.monotonic()
        while self._others:
            alive, waited_s = {*alive_nodes().values()}, time.monotonic() - begin
            # Skip node 0, the driver's own: Watchdog ends the driver if that node is lost.
            lost = [number for number, ray_id in enumerate(self._ray_ids) if number and ray_id not in alive]
            if lost or waited_s > patience_s or (waited_s > SHUTDOWN_S and accept_connections(self._others)):
                return lost
            time.sleep(POLL_S)
        return []

    def spare_nodes(self) -> list[Report]:
        """Return the reports of the spare nodes, in the order of their names. Print a line for each new one."""
        if self._rendezvous is None:
            return []
        unused = {address: ray_id for address, ray_id in alive_nodes().items() if ray_id not in self._ray_ids}
        reports = [report for report in self._rendezvous.reports() if not report.problem and report.address in unused]
        for report in reports:
            if unused[report.address] not in self._announced:
                self._announced.add(unused[report.address])
                print(f"node {report.name}: joined from {report.address} as a spare node", flush=True)
        return reports

    def replace(self, lost: Sequence[int]) -> None:
        """Replace lost nodes with spare nodes. There must be enough of them."""
        addresses = alive_nodes()
        for number, spare in zip(lost, self.spare_nodes(), strict=False):
            print(f"recovery: node {spare.name} ({spare.address}) replaces node {self.name(number)}", flush=True)
            self._others[number - 1], self._ray_ids[number] = spare, addresses[spare.address]
