"""The examination of all nodes of an attempt before its run begins, and what follows from it."""

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
from megarl.core.files import replace_text
from megarl.core.versions import installed_versions
from megarl.launch.folder import Job, Verdict
from megarl.launch.named_files import named_files
from megarl.planner.doctor.examine import examine
from megarl.planner.doctor.gpus import ask
from megarl.planner.doctor.machine import RUN_DISK

POLL_S = 0.2
CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The things that a node says of itself.

    problems   of the node, lines without its name
    missing    what the recipe names and is not there, also such lines
    versions   of its packages
    address    where the first node of several listens while the others look, and the port; None of any other
    cut_off    why no connection leads from here to that address, None where one does
    """

    node: str
    problems: Sequence[str]
    missing: Sequence[str]
    versions: Mapping[str, str | None]
    address: tuple[str, int] | None = None
    cut_off: str | None = None


@dataclass(frozen=True, slots=True)
class Objection:
    """The reason why an attempt cannot begin. bad: the nodes to do without."""

    verdict: Verdict
    cause: str
    bad: Sequence[str] = ()


def look_at_node(node: str, run: Path, job: Job, config: Config) -> NodeReport:
    """Examine this node, by its name. run: the run's folder."""
    wrong = [each for each in examine(run) if each.state == "problem"]
    problems = [f"{each.name}: {each.found}; {each.fix}" for each in wrong if each.name != RUN_DISK]
    remedy = "put it on the shared file system, or mount it into the container"
    missing = [named.missing(remedy) for named in named_files(config) if not named.is_there]
    if any(each.name == RUN_DISK for each in wrong):  # it is the same one for all nodes
        missing.append(f"run.folder={config.run.folder}: its disk is full, or it cannot be written; see megarl doctor")
    if (gpus := num_gpus()) < job.gpus:
        problems.append(f"{gpus} GPUs, and the run takes {job.gpus} of each node")
    return NodeReport(node, problems, missing, installed_versions(PACKAGES))


@contextmanager
def reachable(report: NodeReport, config: Config) -> Iterator[NodeReport]:
    """Let the others of several nodes try to reach the first one as the run's processes will, while it is inside.
    Gives its report, with a problem where it has no address for them."""
    if config.cluster.nodes == 1:
        yield report
        return
    try:
        listener = listen(own_address(config.cluster.interface))
    except UserError as error:
        yield replace(report, problems=[*report.problems, str(error)])
        return
    with listener:
        listener.listen(config.cluster.nodes)  # nobody is accepted: a connection that waits for it is one
        yield replace(report, address=listener.getsockname())


def reaching(report: NodeReport, first: NodeReport) -> NodeReport:
    """Return a node's report, which says where no connection leads from it to the first one."""
    if first.address is None:
        return report
    host, port = first.address
    try:
        interface = interface_of(address_towards(host))
        socket.create_connection((host, port), CONNECT_S).close()
    except UserError as error:
        return replace(report, cut_off=str(error))
    except OSError as error:
        line = f"no connection over {interface} to {host}, port {port}, of the first node: {error}; see a firewall"
        return replace(report, cut_off=line)
    return report


def num_gpus() -> int:
    """Return the number of GPUs that this task may use, without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each])
    return sum(line.startswith("GPU ") for line in (ask(("nvidia-smi", "-L")) or "").splitlines())


def send_report(folder: Path, report: NodeReport) -> None:
    """Write a node's report for the first node. folder: the attempt's, which that node has made."""
    replace_text(folder / report.node, json.dumps(asdict(report)))


def await_reports(folder: Path, nodes: Sequence[str], timeout_s: float) -> list[NodeReport]:
    """Return the reports of these nodes, or of those that have come in the time, in the order of their names here."""
    deadline = time.monotonic() + timeout_s
    while not all((folder / node).exists() for node in nodes) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    files = [folder / node for node in nodes]
    return [NodeReport(**json.loads(file.read_text(encoding="utf-8"))) for file in files if file.exists()]


def find_objection(
    reports: Sequence[NodeReport], nodes: Sequence[str], run: Path, timeout_s: float
) -> Objection | None:
    """Return the objection to an attempt on these nodes, None where there is none.

    What is missing on all of them is an error of the user, and so is what is wrong on more than two; what is wrong on
    some makes these bad. Of two versions of a package the one on more nodes counts, or the first node's. A first node
    that none of several others reaches is the bad one.
    """
    there, many = {report.node for report in reports}, len(nodes) > 2
    if silent := [node for node in nodes if node not in there]:
        cause = f"node {', '.join(silent)}: nothing heard in {timeout_s:g} s: down, or without the files in {run}"
        # Where only the first of many has them, they are not on a shared file system, which other nodes would not mend.
        return Objection("user_error" if many and len(there) == 1 else "failed", cause, silent)
    common = set.intersection(*({*report.missing, *(report.problems if many else ())} for report in reports))
    if common:
        return Objection("user_error", "on all nodes: " + "; ".join(sorted(common)))
    cut_off = {report.node: [report.cut_off] for report in reports if report.cut_off is not None}
    if many and len(cut_off) == len(nodes) - 1:
        return Objection("failed", f"node {nodes[0]}: no other reaches it; {reports[1].cut_off}", [nodes[0]])
    versions = [report.versions for report in reports]
    usual = max(versions, key=versions.count)
    found = {
        each.node: [*each.problems, *each.missing, *cut_off.get(each.node, ()), *_differing(each.versions, usual)]
        for each in reports
    }
    wrong = {node: lines for node, lines in found.items() if lines}
    if not wrong:
        return None
    return Objection("failed", "; ".join(f"node {node}: {', '.join(lines)}" for node, lines in wrong.items()), [*wrong])


def _differing(versions: Mapping[str, str | None], usual: Mapping[str, str | None]) -> list[str]:
    names = [name for name in usual if versions.get(name) != usual[name]]
    return [f"{name} is {versions.get(name)}, elsewhere {usual[name]}" for name in names]
