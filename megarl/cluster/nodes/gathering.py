"""The driver's wait for the other nodes of its run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import ray

from megarl.cluster.failure import RunFailure
from megarl.cluster.nodes.rendezvous import NodeRendezvous, Report
from megarl.core.errors import UserError

POLL_S = 0.2
VERDICT_S = 30.0
"""The time in which Ray finds out that a node is lost, by its health checks: see session.HEALTH_CHECKS."""


def gather(rendezvous: NodeRendezvous, count: int, timeout_s: float, run_folder: str) -> list[Report]:
    """Return the reports of the first `count` other nodes, in the order of their names, once Ray has them all.

    Raises UserError for a node that cannot join, and RunFailure where some are missing in time.
    """
    deadline, told = time.monotonic() + timeout_s, set[str]()
    while True:
        reports = rendezvous.reports()
        if problems := [report for report in reports if report.problem is not None]:
            kind = RunFailure if any(report.is_failure for report in problems) else UserError
            raise kind("\n".join(report.problem for report in problems))
        addresses = alive_nodes()
        joined = [report for report in reports if report.address in addresses]
        for report in joined:
            if report.name not in told:
                told.add(report.name)
                print(
                    f"node {report.name}: joined, {report.address}, {report.cores} cores, {report.gpus} GPUs",
                    flush=True,
                )
        if len(joined) >= count:
            return joined[:count]
        if time.monotonic() > deadline:
            raise RunFailure(_missing(joined, reports, count, timeout_s, run_folder))
        time.sleep(POLL_S)


def _missing(joined: Sequence[Report], reports: Sequence[Report], count: int, timeout_s: float, folder: str) -> str:
    there = ", ".join(report.name for report in joined) or "none"
    began = [report.name for report in reports if report not in joined]
    on_the_way = f"; {', '.join(began)} began to, see their ray-*.log in the logs" if began else ""
    return (
        f"nodes: of {count} other nodes {len(joined)} joined in cluster.timeouts.start={timeout_s:g} s ({there})"
        f"{on_the_way}; run megarl join {folder} on each of the others"
    )


def alive_nodes() -> Mapping[str, str]:
    """Return Ray's ids of the nodes that it has, by their addresses."""
    return {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}


def lost_nodes(nodes: Sequence[Report], patience_s: float) -> list[str]:
    """Return the names of those of these nodes that Ray has lost, as soon as it knows of one, for which a lost process
    is the first sign."""
    deadline = time.monotonic() + patience_s
    while nodes:
        addresses = alive_nodes()
        lost = [node.name for node in nodes if node.address not in addresses]
        if lost or time.monotonic() > deadline:
            return lost
        time.sleep(POLL_S)
    return []
