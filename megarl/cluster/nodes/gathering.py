"""Wait for the run's other nodes to join."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence

import ray

from megarl.cluster.nodes.rendezvous import NodeRendezvous, Report
from megarl.core.errors import RunFailure, UserError
from megarl.core.text import counted

POLL_S = 0.2
CONNECT_S = 2.0
"""Timeout of a connection, in seconds."""


def gather(rendezvous: NodeRendezvous, count: int, timeout_s: float, run_folder: str) -> list[Report]:
    """Wait until `count` additional nodes have joined Ray, and return their reports sorted by node name. Spare nodes do
    not count. Raise UserError if a node cannot join, and RunFailure if one has failed or nodes are missing after
    timeout_s."""
    deadline, announced = time.monotonic() + timeout_s, set[str]()
    while True:
        reports = [report for report in rendezvous.reports() if not report.is_spare]
        if problems := {report.problem: report.is_failure for report in reports if report.problem is not None}:
            raise (RunFailure if any(problems.values()) else UserError)("\n".join(problems))
        addresses = alive_nodes()
        joined = [report for report in reports if report.address in addresses]
        for report in joined:
            if report.name not in announced:
                announced.add(report.name)
                size = f"{counted(report.cores, 'core')}, {counted(report.gpus, 'GPU')}"
                print(f"node {report.name}: joined from {report.address} with {size}", flush=True)
        if len(joined) >= count:
            return joined[:count]
        if time.monotonic() > deadline:
            raise RunFailure(_missing(joined, reports, count, timeout_s, run_folder))
        time.sleep(POLL_S)


def _missing(joined: Sequence[Report], reports: Sequence[Report], count: int, timeout_s: float, folder: str) -> str:
    names = ", ".join(report.name for report in joined) or "none"
    joining = [report.name for report in reports if report not in joined]
    joining_text = f". Nodes that failed to join: {', '.join(joining)} (see their ray-*.log files)" if joining else ""
    return (
        f"cluster.timeouts.start={timeout_s:g}: only {len(joined)} of {count} other nodes joined in time ({names})"
        f"{joining_text}. Fix: run megarl join {folder} on each missing node"
    )


def alive_nodes() -> Mapping[str, str]:
    """Return each live node's Ray id, by address."""
    return {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}


def accept_connections(nodes: Sequence[Report]) -> bool:
    """Return whether Ray accepts connections on all of these nodes."""
    ports = {node["NodeManagerAddress"]: node["NodeManagerPort"] for node in ray.nodes() if node["Alive"]}
    try:
        for node in nodes:
            socket.create_connection((node.address, ports[node.address]), CONNECT_S).close()
    except (OSError, KeyError):
        return False
    return True
