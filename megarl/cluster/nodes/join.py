"""The part of a run on each of its nodes but the first: `megarl join` starts Ray there, by which the driver starts
processes, and ends with the run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megarl.cluster.failure import RunFailure
from megarl.cluster.network import address_towards, interface_of, own_name, socket_environment
from megarl.cluster.nodes.rendezvous import NODES, Invitation, NodeRendezvous, Report
from megarl.cluster.supervision import processes
from megarl.cluster.supervision.interrupts import interrupts
from megarl.cluster.supervision.memory import MemorySampler
from megarl.core import device
from megarl.core.cores import usable_cores
from megarl.core.errors import UserError

POLL_S = 0.5
MARGIN_S = 15.0
"""The seconds that the driver may need after its grace time to end the run."""

CONNECT_S, LOST_S = 2.0, 30.0
"""The seconds that a connection to the first node may take, and those without one after which that node is lost."""


def main(folder: Path, scratch: Path, timeout_s: float) -> int:
    """Takes part in the run of this folder. Returns the exit status: 0 once the run's driver has ended its part."""
    try:
        join(NodeRendezvous(folder / NODES), scratch, timeout_s)
    except RunFailure as failure:
        print(f"megarl: error: {failure}", file=sys.stderr)
        return 1
    return 0


def join(rendezvous: NodeRendezvous, scratch: Path, timeout_s: float) -> None:
    """Takes part in a run until its driver ends it. scratch: a folder for files that are not needed after the run.

    A signal that ends the run is left to the driver, which may save first: this node stays until it has, or until
    checkpoint.grace_s is over. Raises KeyboardInterrupt then.

    Raises UserError where this node cannot join, or nobody invites it in time, and RunFailure where it loses the first
    node, or Ray ends here.
    """
    while True:
        invitation = _await_invitation(rendezvous, timeout_s)
        with interrupts.grace(invitation.grace_s + MARGIN_S, is_awaited=True):
            _take_part(rendezvous, invitation, scratch)
        if interrupts.is_told:
            raise KeyboardInterrupt
        if rendezvous.invitation() is None:
            print("the run has ended", flush=True)
            return
        processes.end_descendants()  # the run's next attempt has begun


def _take_part(rendezvous: NodeRendezvous, invitation: Invitation, scratch: Path) -> None:
    """Lends this node to one attempt of the run, until its driver withdraws the invitation or begins another."""
    report = _report(invitation)
    rendezvous.report(report)
    if report.problem is not None:
        raise UserError(report.problem)
    print(f"joins the run at {invitation.host} from {report.address} ({interface_of(report.address)})", flush=True)
    log = Path(invitation.logs, f"ray-{report.name}-{report.address}.log")
    with log.open("ab") as output, MemorySampler() as memory:
        ray = subprocess.Popen(
            _command(invitation, report, scratch),
            env={**os.environ, **socket_environment(report.address), "RAY_AUTH_TOKEN": invitation.token},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        answered, first_node = 0, FirstNode(invitation)
        while ray.poll() is None and _is_on(rendezvous, invitation) and first_node.answers():
            time.sleep(POLL_S)
            if memory.peak_gb() != report.peak_gb:
                report = replace(report, peak_gb=memory.peak_gb())
                rendezvous.report(report)
            number, files = rendezvous.wanted_stacks()
            if number > answered:
                answered = number
                processes.ask_for_stacks(files)
    if not _is_on(rendezvous, invitation):
        return
    if not first_node.answers():
        raise RunFailure(f"the first node, {invitation.host}, is lost")
    problem = f"node {report.name}: Ray ended here with status {ray.poll()}; see {log}"
    rendezvous.report(replace(report, problem=problem, is_failure=True))
    raise RunFailure(problem)


class FirstNode:
    """Watches the first node. Ray alone would wait for minutes for a machine that has vanished without a word."""

    def __init__(self, invitation: Invitation):
        self._invitation = invitation
        self._answered_at = time.monotonic()

    def answers(self) -> bool:
        """Return whether Ray has answered there in the last LOST_S seconds."""
        if _reaches(self._invitation):
            self._answered_at = time.monotonic()
        return time.monotonic() - self._answered_at < LOST_S


def _reaches(invitation: Invitation) -> bool:
    """Return whether Ray answers there."""
    with suppress(OSError):
        socket.create_connection((invitation.host, invitation.port), timeout=CONNECT_S).close()
        return True
    return False


def _await_invitation(rendezvous: NodeRendezvous, timeout_s: float) -> Invitation:
    """Wait for an invitation whose Ray answers: one of an attempt that was killed may have been left behind."""
    deadline = time.monotonic() + timeout_s
    while (invitation := rendezvous.invitation()) is None or not _reaches(invitation):
        if time.monotonic() > deadline:
            raise UserError(
                f"no run of several nodes has begun here in {timeout_s:g} s; start megarl train with cluster.nodes, "
                "and give its folder, on a file system that all nodes share"
            )
        time.sleep(POLL_S)
    return invitation


def _report(invitation: Invitation) -> Report:
    """Return what this node has, and whether it can join."""
    name, gpus, address = own_name(), device.num_gpus(), address_towards(invitation.host)
    problem = None
    if address == invitation.host:
        problem = f"node {name}: megarl train runs on it, as the first node; run megarl join on the others only"
    elif differing := invitation.differing():
        told = ", ".join(f"{package} is {here}, there {there}" for package, (there, here) in differing.items())
        problem = f"node {name}: other versions than on the first node: {told}; install the same"
    elif gpus < invitation.gpus:
        problem = f"node {name}: {gpus} GPUs, and the run takes {invitation.gpus} of each node; leave this node out"
    return Report(name, invitation.id, address, usable_cores(), gpus, problem=problem)


def _is_on(rendezvous: NodeRendezvous, invitation: Invitation) -> bool:
    now = rendezvous.invitation()
    return now is not None and now.id == invitation.id


def _command(invitation: Invitation, report: Report, scratch: Path) -> list[str]:
    options: Mapping[str, object] = {
        "address": f"{invitation.host}:{invitation.port}",
        "node-ip-address": report.address,
        "num-cpus": report.cores,
        "num-gpus": 0,  # the driver's placement, not Ray, says who has which
        "object-store-memory": invitation.object_store,
        "object-spilling-directory": scratch / "spilled",
        "temp-dir": scratch,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *words, "--block", "--disable-usage-stats"]
