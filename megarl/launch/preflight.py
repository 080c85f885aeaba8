"""Examines an attempt's nodes before the run starts."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megarl.cluster.network import address_towards, interface_of, listen, own_address
from megarl.cluster.nodes.rendezvous import PACKAGES
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.core.files import read_record, replace_text
from megarl.core.versions import installed_versions
from megarl.launch.folder import Job, Verdict
from megarl.launch.named_files import named_files
from megarl.planner.doctor.examine import examine
from megarl.planner.doctor.gpus import run_command
from megarl.planner.doctor.machine import RUN_DISK

POLL_S = 0.2
CONNECT_S = 10.0


DISK = "run.folder="
"""Prefix of the line that reports a full disk."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The report on one node.

    Attributes:
        problems: one line per problem with the node, without the node's name.
        missing: one line per path in the recipe that is missing on the node.
        address: address and port on which the first node listens for the other nodes. None on the other nodes.
        connection_error: why this node cannot connect to that address, or None.
    """

    node: str
    problems: Sequence[str]
    missing: Sequence[str]
    versions: Mapping[str, str | None]
    address: tuple[str, int] | None = None
    connection_error: str | None = None


@dataclass(frozen=True, slots=True)
class Objection:
    """The reason why an attempt cannot start. bad_nodes: nodes to exclude from later attempts."""

    verdict: Verdict
    cause: str
    bad_nodes: Sequence[str] = ()


def examine_node(node: str, run: Path, job: Job, config: Config) -> NodeReport:
    """Examine this node, named `node`, for the run in the folder `run`."""
    findings = [finding for finding in examine(run) if finding.state == "problem"]
    problems = [f"{item.name}: {item.found}; {item.fix}" for item in findings if item.name != RUN_DISK]
    remedy = "put it on the shared file system, or mount it into the container"
    missing = [named.missing_error(remedy) for named in named_files(config) if not named.exists]
    if any(item.name == RUN_DISK for item in findings):  # all nodes share this disk, so do not blame this node
        missing.append(
            f"{DISK}{config.run.folder}: the disk is full or not writable. Fix: run megarl doctor for details"
        )
    if (gpus := num_gpus()) < job.gpus:
        problems.append(f"found {gpus} GPUs, but the run needs {job.gpus} per node")
    return NodeReport(node, problems, missing, installed_versions(PACKAGES))


@contextmanager
def listen_for_nodes(report: NodeReport, config: Config) -> Iterator[NodeReport]:
    """Listen on the first node, so that the other nodes can test their connection on the run's interface. Yield the
    node's report with the address, or with a problem if it cannot listen."""
    if config.cluster.nodes == 1:
        yield report
        return
    try:
        listener = listen(own_address(config.cluster.interface))
    except UserError as error:
        yield replace(report, problems=[*report.problems, str(error)])
        return
    with listener:
        listener.listen(config.cluster.nodes)  # no accept: peers only test that they can connect
        yield replace(report, address=listener.getsockname())


def check_connection(report: NodeReport, first: NodeReport) -> NodeReport:
    """Connect to the first node. Return the node's report, with the connection error if that fails."""
    if first.address is None:
        return report
    host, port = first.address
    try:
        interface = interface_of(address_towards(host))
    except UserError as error:
        return replace(report, connection_error=str(error))
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        line = (
            f"cannot connect over {interface} to the first node at {host}:{port}: {error}. Fix: open the firewall "
            "between nodes"
        )
        return replace(report, connection_error=line)
    return report


def num_gpus() -> int:
    """Return the number of GPUs that this task may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([gpu for gpu in visible.split(",") if gpu])
    return sum(line.startswith("GPU ") for line in (run_command(("nvidia-smi", "-L")) or "").splitlines())


def send_report(folder: Path, report: NodeReport) -> None:
    """Write a node's report into the attempt's preflight folder, which the first node creates."""
    replace_text(folder / report.node, json.dumps(asdict(report)))


def await_reports(folder: Path, nodes: Sequence[str], timeout_s: float) -> list[NodeReport]:
    """Wait for the reports of these nodes. Return those that arrive in time, in the order of `nodes`."""
    deadline = time.monotonic() + timeout_s
    while not all((folder / node).exists() for node in nodes) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    files = [folder / node for node in nodes]
    return [read_record(file, NodeReport) for file in files if file.exists()]


def find_objection(
    reports: Sequence[NodeReport], nodes: Sequence[str], run: Path, timeout_s: float, has_run: bool = False
) -> Objection | None:
    """Return the reason why an attempt cannot start on these nodes, or None.

    A path that is missing on all nodes is a user error. With more than two nodes, so is any problem that all of them
    share. If an earlier attempt has run (`has_run`), a full disk is an infrastructure failure instead. Otherwise, nodes
    with problems are bad. Package versions must match the most common ones, or the first node's if there is a tie. With
    more than two nodes, the first node is bad if no other node can connect to it.
    """
    reporting, many = {report.node for report in reports}, len(nodes) > 2
    if silent := [node for node in nodes if node not in reporting]:
        cause = (
            f"node {', '.join(silent)}: no report within {timeout_s:g} s (the node is down or cannot read the files in "
            f"{run})"
        )
        # If only the first of many nodes reports, the file system is not shared, so replacing nodes would not help.
        return Objection("user_error" if many and len(reporting) == 1 else "failed", cause, silent)
    common = set.intersection(*({*report.missing, *(report.problems if many else ())} for report in reports))
    if common:
        is_disk_only = all(line.startswith(DISK) for line in common)
        verdict: Verdict = "infrastructure" if has_run and is_disk_only else "user_error"
        return Objection(verdict, "on all nodes: " + "; ".join(sorted(common)))
    unconnected = {each.node: [each.connection_error] for each in reports if each.connection_error is not None}
    if many and len(unconnected) == len(nodes) - 1:
        cause = f"node {nodes[0]}: no other node can connect to it: {reports[1].connection_error}"
        return Objection("failed", cause, [nodes[0]])
    versions = [report.versions for report in reports]
    reference = max(versions, key=versions.count)
    problems = {
        each.node: [
            *each.problems,
            *each.missing,
            *unconnected.get(each.node, ()),
            *_version_mismatches(each.versions, reference),
        ]
        for each in reports
    }
    bad = {node: lines for node, lines in problems.items() if lines}
    if not bad:
        return None
    return Objection("failed", "; ".join(f"node {node}: {', '.join(lines)}" for node, lines in bad.items()), [*bad])


def _version_mismatches(versions: Mapping[str, str | None], reference: Mapping[str, str | None]) -> list[str]:
    names = [name for name in reference if versions.get(name) != reference[name]]
    return [f"{name} is {versions.get(name)}, but other nodes have {reference[name]}" for name in names]
