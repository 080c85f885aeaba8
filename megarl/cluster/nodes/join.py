"""`megarl join`, for every node except the first: start Ray for the driver, and exit when the run ends."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megarl.cluster.network import address_towards, interface_of, own_name, socket_environment
from megarl.cluster.nodes.rendezvous import NODES, Invitation, NodeRendezvous, Report
from megarl.cluster.supervision import processes
from megarl.cluster.supervision.interrupts import interrupts
from megarl.cluster.supervision.memory import MemorySampler
from megarl.cluster.supervision.scratch import ray_folder, remove_memory_folder
from megarl.core import device
from megarl.core.cores import usable_cores
from megarl.core.errors import RunFailure, UserError, print_error
from megarl.core.interpreter import PYTHON
from megarl.core.text import counted

POLL_S = 0.5
MARGIN_S = 15.0
"""Seconds that the driver may need to end the run after its grace period."""

CONNECT_S, LOST_S = 2.0, 30.0
"""Timeout in seconds for connecting to the first node, and maximum time in seconds without a connection to it before it
counts as lost."""


def main(folder: Path, scratch: Path, timeout_s: float, is_spare: bool) -> int:
    """Join the run in this folder, as a spare node if `is_spare`. Return the exit status: 0 if the driver ended the
    run or a spare node has replaced this one, 1 after a failure."""
    try:
        join(NodeRendezvous(folder / NODES), scratch, timeout_s, is_spare)
    except RunFailure as failure:
        print_error(failure)
        return 1
    return 0


def join(rendezvous: NodeRendezvous, scratch: Path, timeout_s: float, is_spare: bool) -> None:
    """Serve a run from this node until the driver ends the run or releases the node.

    A signal to this node does not end the process at once, because the driver may save a checkpoint first, or replace
    this node. The process exits when the driver has ended the run or released the node, or shortly after
    checkpoint.grace_s has passed.

    Raises:
        UserError: this node cannot join, or no invitation arrives before the timeout.
        RunFailure: the first node is lost, or Ray has exited on this node.
        KeyboardInterrupt: a signal ended the run.
    """
    while True:
        invitation = _await_invitation(rendezvous, timeout_s)
        with interrupts.grace(invitation.grace_s + MARGIN_S, is_awaited=True):
            is_released = _take_part(rendezvous, invitation, scratch, is_spare)
        if is_released:
            print("this node leaves the run", flush=True)
            return
        if interrupts.is_signaled:
            raise KeyboardInterrupt
        if rendezvous.invitation() is None:
            print("the run has ended", flush=True)
            return
        # The run's next attempt has started and must not restore the previous attempt's copies of the state.
        processes.end_descendants()
        remove_memory_folder(scratch)


def _take_part(rendezvous: NodeRendezvous, invitation: Invitation, scratch: Path, is_spare: bool) -> bool:
    """Serve one attempt of the run, until the driver withdraws the invitation, starts a new attempt, or releases this
    node. Return whether it has released the node."""
    report = replace(_report(invitation), is_spare=is_spare, id=secrets.token_hex(8))
    rendezvous.report(report)
    if report.problem is not None:
        raise UserError(report.problem)
    print(f"joining the run at {invitation.host} from {report.address} ({interface_of(report.address)})", flush=True)
    log = Path(invitation.logs, f"ray-{report.name}-{report.address}.log")
    with log.open("ab") as output, MemorySampler() as memory:
        ray = subprocess.Popen(
            _command(invitation, report, scratch),
            env={**os.environ, **socket_environment(report.address), "RAY_AUTH_TOKEN": invitation.token},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        answered, has_requested, first_node = 0, False, FirstNode(invitation)
        while ray.poll() is None and _is_current(rendezvous, invitation) and first_node.answers():
            time.sleep(POLL_S)
            if rendezvous.is_released(report):
                return True
            if interrupts.is_signaled and not has_requested:
                has_requested = True
                rendezvous.request_leave(report.name, "megarl join received a signal on this node")
            if memory.peak_gb() != report.peak_gb:
                report = replace(report, peak_gb=memory.peak_gb())
                rendezvous.report(report)
            number, files = rendezvous.requested_stacks()
            if number > answered:
                answered = number
                processes.request_stacks(files)
    if not _is_current(rendezvous, invitation):
        return False
    if not first_node.answers():
        raise RunFailure(
            f"lost the connection to the first node, {invitation.host}. Fix: resolve the error in the "
            "driver's output on that node"
        )
    problem = f"node {report.name}: Ray exited with status {ray.poll()}. Fix: resolve the error in {log}"
    rendezvous.report(replace(report, problem=problem, is_failure=True))
    raise RunFailure(problem)


class FirstNode:
    """Monitors the first node. Ray alone would wait for minutes after that machine disappears."""

    def __init__(self, invitation: Invitation):
        self._invitation = invitation
        self._answered_at = time.monotonic()

    def answers(self) -> bool:
        """Return whether Ray on the first node has accepted a connection in the last LOST_S seconds."""
        if _reaches(self._invitation):
            self._answered_at = time.monotonic()
        return time.monotonic() - self._answered_at < LOST_S


def _reaches(invitation: Invitation) -> bool:
    """Return whether the Ray instance in the invitation accepts connections."""
    with suppress(OSError):
        socket.create_connection((invitation.host, invitation.port), timeout=CONNECT_S).close()
        return True
    return False


def _await_invitation(rendezvous: NodeRendezvous, timeout_s: float) -> Invitation:
    """Wait for an invitation whose Ray instance accepts connections. A killed attempt may have left a stale one."""
    deadline = time.monotonic() + timeout_s
    while (invitation := rendezvous.invitation()) is None or not _reaches(invitation):
        if time.monotonic() > deadline:
            raise UserError(
                f"no multi-node run started in this folder within {timeout_s:g} s. Fix: start megarl train with "
                "cluster.nodes above 1, and pass its run folder, which must be on a file system that all nodes share"
            )
        time.sleep(POLL_S)
    return invitation


def _report(invitation: Invitation) -> Report:
    """Return this node's report: its resources and, if it cannot join, the reason."""
    name, gpus, address = own_name(), device.num_gpus(), address_towards(invitation.host)
    problem = None
    if address == invitation.host:
        problem = (
            f"node {name}: megarl train runs here, as the first node. Fix: run megarl join only on the other nodes"
        )
    elif differing := invitation.differing():
        versions = ", ".join(f"{package} {local} instead of {first}" for package, (first, local) in differing.items())
        problem = (
            f"node {name}: packages differ from the first node's: {versions}. Fix: install the first node's versions"
        )
    elif gpus < invitation.gpus:
        problem = (
            f"node {name}: this node has {counted(gpus, 'GPU')}, but the run uses {invitation.gpus} per node. "
            f"Fix: run megarl join on a node with at least {invitation.gpus}"
        )
    return Report(name, invitation.id, address, usable_cores(), gpus, problem=problem)


def _is_current(rendezvous: NodeRendezvous, invitation: Invitation) -> bool:
    now = rendezvous.invitation()
    return now is not None and now.id == invitation.id


def _command(invitation: Invitation, report: Report, scratch: Path) -> list[str]:
    options: Mapping[str, object] = {
        "address": f"{invitation.host}:{invitation.port}",
        "node-ip-address": report.address,
        "num-cpus": report.cores,
        "num-gpus": 0,  # the driver assigns GPUs instead of Ray
        "object-store-memory": invitation.object_store,
        "object-spilling-directory": scratch / "spilled",
        "temp-dir": ray_folder(scratch),
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [*PYTHON, "-m", "megarl.cluster.services", "start", *flags, "--block", "--disable-usage-stats"]
