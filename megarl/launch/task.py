"""A task in a Slurm job step. There is one task per node. The first task drives the run, and the others join it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.cluster.nodes.rendezvous import NODES, NodeRendezvous
from megarl.config.load import load
from megarl.core.errors import ERROR, InfrastructureFailure, UserError
from megarl.core.files import replace_text
from megarl.core.interpreter import MEGARL
from megarl.launch.folder import JobFolder, Verdict
from megarl.launch.preflight import (
    await_reports,
    check_connection,
    examine_node,
    find_objection,
    listen_for_nodes,
    send_report,
)
from megarl.run.attempts import ALLOCATED, Attempt, Attempts
from megarl.run.checkpoints import Checkpoints
from megarl.run.folder import RunFolder
from megarl.run.time_ledger import read_ledger

REPORT_TIMEOUT_S = 300.0
"""Seconds that nodes wait for each other's reports. Nodes may have to pull images, and network file systems may cache
the absence of a report for a while."""

VERDICT_S = 60.0
"""Seconds that the driver has to write its verdict after a task fails, before srun stops all tasks."""

JOIN_S = 120.0
"""Seconds that the driver has to open its rendezvous after its own checks."""

POLL_S, TOUCH_S = 0.5, 10.0
VERDICTS: Mapping[int, Verdict] = {
    0: "done",
    UserError.exit_code: "user_error",
    InfrastructureFailure.exit_code: "infrastructure",
    130: "signaled",
}
"""Verdict for each exit status of `megarl train`. Any other status is a failure that may be transient."""


@dataclass(frozen=True, slots=True)
class Task:
    """This task, as described by Slurm's environment variables.

    Attributes:
        number: rank of the task in its step. Task 0 is the driver.
        nodes: nodes in the step. The driver's node comes first.
        restart: number of times that the job was requeued.
        step: number of the job step in this allocation.
        allocated: start of the allocation in seconds since the epoch.
        submitted, noticed, num_allocated: see Attempt; 0 if the job script's template does not pass them on.
    """

    number: int
    node: str
    nodes: tuple[str, ...]
    job: str
    restart: int
    step: str
    allocated: float
    submitted: float = 0.0
    noticed: float = 0.0
    num_allocated: int = 0

    @classmethod
    def of_environment(cls) -> Task:
        """Return the task that this process runs. Raise UserError outside a job step."""
        environ = os.environ
        if not {"SLURM_PROCID", "MEGARL_NODES"} <= environ.keys():
            raise UserError(
                "megarl node: this command runs only inside the job script of megarl launch. Fix: use megarl launch "
                "RECIPE --nodes N --time TIME"
            )
        return cls(
            number=int(environ["SLURM_PROCID"]),
            node=environ["SLURMD_NODENAME"],
            nodes=tuple(environ["MEGARL_NODES"].split()),
            job=environ["SLURM_JOB_ID"],
            restart=int(environ.get("SLURM_RESTART_COUNT", "0")),
            step=environ["SLURM_STEP_ID"],
            allocated=float(environ[ALLOCATED]),
            submitted=float(environ.get("MEGARL_SUBMITTED") or 0.0),
            noticed=float(environ.get("MEGARL_NOTICED") or 0.0),
            num_allocated=int(environ.get("MEGARL_ALLOCATED_NODES") or 0),
        )

    @property
    def attempt(self) -> str:
        """Unique name of the attempt."""
        return f"{self.job}.{self.restart}.{self.step}"


def main(run: Path) -> int:
    """Run this task of an attempt and return its exit status. Task 0 drives the run, and the other tasks join it."""
    task, folder = Task.of_environment(), JobFolder(run)
    if task.number == 0:
        try:
            return drive(task, folder)
        except UserError as error:
            return _write_verdict(folder, "user_error", "; ".join(str(error).splitlines()))
    preflight = folder.preflight(task.attempt)
    _await_folder(preflight)
    job = folder.job()
    os.chdir(job.folder)
    report = examine_node(task.node, run, job, load(folder.recipe_on(len(task.nodes))))
    first = await_reports(preflight, task.nodes[:1], REPORT_TIMEOUT_S)
    send_report(preflight, check_connection(report, first[0]) if first else report)
    member = subprocess.Popen([*MEGARL, "join", str(run), f"--wait={JOIN_S + REPORT_TIMEOUT_S:g}"])
    signal.signal(signal.SIGTERM, lambda *_: member.terminate())
    while (status := member.poll()) is None:
        time.sleep(POLL_S)  # poll, because a signal just before a blocking wait would be handled only after it
    if status:
        await_verdict(folder)
        if not folder.verdict.exists() and task.node in NodeRendezvous(run / NODES).lost():
            return 0  # a spare node has replaced this one, so the other tasks must not stop
    return status


def await_verdict(folder: JobFolder) -> None:
    """Wait until the driver has written its verdict, but at most VERDICT_S seconds, because srun stops all tasks when a
    failed one exits."""
    deadline = time.monotonic() + VERDICT_S
    while not folder.verdict.exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _await_folder(folder: Path) -> None:
    """Wait for the first node to create a folder. Raise UserError after REPORT_TIMEOUT_S seconds, because the first
    node then stops waiting for this one."""
    deadline = time.monotonic() + REPORT_TIMEOUT_S
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise UserError(
                f"{folder}: not visible on this node, but the first node created it. Fix: put run.folder on a file "
                "system that all nodes share"
            )
        time.sleep(POLL_S)


def drive(task: Task, folder: JobFolder) -> int:
    """Run one attempt from this node and record its verdict. Return the exit status."""
    run, job = folder.path.parent, folder.job()
    os.chdir(job.folder)
    config = load(folder.recipe_on(len(task.nodes)))
    checkpoints = Checkpoints(RunFolder.of(config).checkpoints)
    saved = max(checkpoints.steps(), default=0)
    attempts = Attempts(run)
    if len(attempts.without_progress(saved, task.job)) >= job.stalled:
        cause = f"{job.stalled} attempts saved no checkpoint after step {saved}. Last cause: {folder.last_cause()}"
        return _write_verdict(folder, "stalled", cause)
    preflight = folder.preflight(task.attempt)
    preflight.mkdir(parents=True)
    report = examine_node(task.node, run, job, config)
    with listen_for_nodes(report, config) as report:
        send_report(preflight, report)
        reports = await_reports(preflight, task.nodes, REPORT_TIMEOUT_S)
    record = Attempt(
        task.job,
        task.restart,
        task.allocated,
        time.time(),
        saved,
        submitted=task.submitted,
        nodes=max(task.num_allocated, len(task.nodes)),
        noticed=task.noticed,
    )
    if objection := find_objection(reports, task.nodes, run, REPORT_TIMEOUT_S, has_run=bool(attempts.all())):
        if objection.verdict == "infrastructure":
            attempts.begin(record)  # count this attempt, so that `stalled` also limits these
        return _write_verdict(folder, objection.verdict, objection.cause, objection.bad_nodes)
    attempt = attempts.begin(record)
    status, cause = _train(task, folder, attempt)
    attempts.end(attempt, replace(record, ended=time.time()))
    verdict = VERDICTS.get(status, "failed")
    failed = verdict in ("failed", "infrastructure")
    lost = NodeRendezvous(run / NODES).lost() if failed and len(task.nodes) > 1 else ()
    cause = cause or f"megarl train exited with status {status}. Its logs are in {run / 'logs'}"
    status = _write_verdict(folder, verdict, cause, lost)
    print(f"job: {read_ledger(run, now=time.time()).describe()}", flush=True)
    return status


def _write_verdict(folder: JobFolder, verdict: Verdict, cause: str, bad_nodes: Sequence[str] = ()) -> int:
    """Record the verdict. Return the exit status, which makes srun stop the other tasks after a failure."""
    folder.write_verdict(verdict, cause, bad_nodes)
    return 0 if verdict == "done" else 1


def _train(task: Task, folder: JobFolder, attempt: Path) -> tuple[int, str]:
    """Run `megarl train` and forward SIGTERM to it. Return its exit status and its first error line, because later
    errors are often consequences of the first."""
    command = [*MEGARL, "train", str(folder.recipe_on(len(task.nodes)))]
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="backslashreplace")
    signal.signal(signal.SIGTERM, lambda *_: driver.terminate())
    replace_text(folder.driver, f"{task.node} {os.getpid()}\n")
    causes: list[str] = []
    reader = threading.Thread(target=_show, args=(driver.stderr, causes))
    reader.start()
    while driver.poll() is None:
        with suppress(OSError):  # the user may have deleted the run folder's files
            os.utime(attempt)
        with suppress(subprocess.TimeoutExpired):
            driver.wait(TOUCH_S)
    reader.join()
    return driver.returncode, causes[0] if causes else ""


def _show(lines: Iterable[str], causes: list[str]) -> None:
    """Print the lines, and append the error lines to `causes`."""
    for line in lines:
        print(line, end="", file=sys.stderr, flush=True)
        if line.startswith(ERROR):
            causes.append(line.strip())
