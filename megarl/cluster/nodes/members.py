"""The nodes of a run by number, and the spare nodes that may replace them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megarl.cluster.network import own_name
from megarl.cluster.nodes.gathering import POLL_S, accept_connections, alive_nodes
from megarl.cluster.nodes.rendezvous import NodeRendezvous, Report

NODE_LOSS_S = 30.0
"""Seconds that Ray's health checks need to detect a lost node. See session.HEALTH_CHECKS."""

SHUTDOWN_S = 6.0
"""If a node shuts down, Ray exits within this many seconds after the first of the node's processes is lost, even if the
node is busy."""


class Members:
    """The run's nodes. More nodes may join at any time as spare nodes. A spare node that replaces a lost or dismissed
    one takes over its number."""

    def __init__(self, first: str, others: Sequence[Report] = (), rendezvous: NodeRendezvous | None = None):
        """first: Ray's id for the driver's node (number 0). others: reports of the other nodes."""
        self._others, self._rendezvous = list(others), rendezvous
        addresses = alive_nodes() if others else {}
        self._ray_ids = [first, *(addresses[report.address] for report in others)]
        """Ray's id for each node, by node number."""
        self._announced = set[str]()
        self._dismissed = set[str]()
        """Ray's ids of live nodes that are leaving the run."""

    def __len__(self) -> int:
        return len(self._ray_ids)

    def ray_id(self, number: int) -> str:
        return self._ray_ids[number]

    def name(self, number: int) -> str:
        return self._others[number - 1].name if number else own_name()

    def leave_requests(self) -> dict[int, str]:
        """Return the reasons for the pending requests to replace nodes, by node number."""
        requests = {} if self._rendezvous is None else self._rendezvous.leave_requests()
        return {number: requests[name] for number in range(len(self)) if (name := self.name(number)) in requests}

    def dismiss(self, number: int) -> None:
        """Treat a live node as lost. The node leaves the run once a spare node has replaced it."""
        self._dismissed.add(self._ray_ids[number])

    def lost(self, patience_s: float = 0.0) -> list[int]:
        """Return the numbers of dismissed nodes and of nodes that Ray has detected as lost. Because a lost process is
        often the first sign of a lost node, wait up to patience_s seconds for Ray to detect one, unless all nodes still
        accept connections."""
        begin = time.monotonic()
        while self._others:
            alive, waited_s = {*alive_nodes().values()} - self._dismissed, time.monotonic() - begin
            # Skip node 0, the driver's own: Watchdog ends the driver if that node is lost.
            lost = [number for number, ray_id in enumerate(self._ray_ids) if number and ray_id not in alive]
            if lost or waited_s > patience_s or (waited_s > SHUTDOWN_S and accept_connections(self._others)):
                return lost
            time.sleep(POLL_S)
        return []

    def spare_nodes(self) -> list[Report]:
        """Return the reports of the spare nodes, in the order of their names. Print a line for each new one. Spare
        nodes with a request to replace them leave the run."""
        if self._rendezvous is None:
            return []
        used, requests = {*self._ray_ids, *self._dismissed}, self._rendezvous.leave_requests()
        unused = {address: ray_id for address, ray_id in alive_nodes().items() if ray_id not in used}
        reports = [report for report in self._rendezvous.reports() if not report.problem and report.address in unused]
        for report in [report for report in reports if report.name in requests]:
            reports.remove(report)
            self._dismissed.add(unused[report.address])
            self._rendezvous.release(report)
        for report in reports:
            if unused[report.address] not in self._announced:
                self._announced.add(unused[report.address])
                print(f"node {report.name}: joined from {report.address} as a spare node", flush=True)
        return reports

    def replace(self, lost: Sequence[int]) -> None:
        """Replace lost and dismissed nodes with spare nodes. There must be enough of them."""
        addresses = alive_nodes()
        for number, spare in zip(lost, self.spare_nodes(), strict=False):
            print(f"recovery: node {spare.name} ({spare.address}) replaces node {self.name(number)}", flush=True)
            if self._rendezvous is not None and self._ray_ids[number] in self._dismissed:
                self._rendezvous.release(self._others[number - 1])
            self._others[number - 1], self._ray_ids[number] = spare, addresses[spare.address]
