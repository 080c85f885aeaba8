"""A task of a job's step, one on each of its nodes: the first drives the run, the others join it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.nodes.rendezvous import NODES, NodeRendezvous
from megarl.config.load import load
from megarl.core.errors import UserError
from megarl.core.files import replace_text
from megarl.launch.folder import JobFolder, Verdict
from megarl.launch.preflight import await_reports, find_objection, look_at_node, reachable, reaching, send_report
from megarl.run.attempts import Attempt, Attempts
from megarl.run.checkpoints import Checkpoints
from megarl.run.effective_time import ALLOCATED, effective_time
from megarl.run.folder import RunFolder

MEGARL = (sys.executable, "-m", "megarl.cli")
HEAR_S = 300.0
"""The time in which all nodes of an attempt report to the first: images are fetched, and file systems remember for a
while that a file is not there."""

JUDGE_S = 60.0
"""The time that a task whose part has failed leaves the first one to find out why; srun ends it with the others."""

JOIN_S = 120.0
"""The time in which the driver invites the others, after its own checks."""

POLL_S, TOUCH_S = 0.5, 10.0
ERROR = "megarl: error: "
VERDICTS: Mapping[int, Verdict] = {0: "done", 2: "user_error", 130: "told"}
"""The meaning of the exit status of `megarl train`; any other is a failure that may not come again."""


@dataclass(frozen=True, slots=True)
class Task:
    """This task, as Slurm tells it.

    number      of the task in its step; 0 drives
    node        the name of its node
    nodes       those of the step, the first task's first
    job         the job's number
    restart     how often it has been in the queue again
    step        the number of the step in this allocation
    allocated   when the allocation began, in seconds since 1970
    """

    number: int
    node: str
    nodes: tuple[str, ...]
    job: str
    restart: int
    step: str
    allocated: float

    @classmethod
    def of_environment(cls) -> Task:
        """Raise UserError outside of a job's step."""
        environ = os.environ
        if not {"SLURM_PROCID", "MEGARL_NODES"} <= environ.keys():
            raise UserError("megarl node: this is for the script of a job, which runs it by srun; see megarl launch")
        return cls(
            number=int(environ["SLURM_PROCID"]),
            node=environ["SLURMD_NODENAME"],
            nodes=tuple(environ["MEGARL_NODES"].split()),
            job=environ["SLURM_JOB_ID"],
            restart=int(environ.get("SLURM_RESTART_COUNT", "0")),
            step=environ["SLURM_STEP_ID"],
            allocated=float(environ[ALLOCATED]),
        )

    @property
    def attempt(self) -> str:
        """The name of the attempt, by the numbers that tell it from others."""
        return f"{self.job}.{self.restart}.{self.step}"


def main(run: Path) -> int:
    """Take part in an attempt at the run of this folder. Return the exit status."""
    task, folder = Task.of_environment(), JobFolder.of(run)
    if task.number == 0:
        try:
            return drive(task, folder)
        except UserError as error:
            return _judge(folder, "user_error", "; ".join(str(error).splitlines()))
    _await_folder(folder.preflight(task.attempt))
    job = folder.job()
    os.chdir(job.folder)
    config = load(folder.recipe_on(len(task.nodes)))
    preflight = folder.preflight(task.attempt)
    report = look_at_node(task.node, run, job, config)
    first = await_reports(preflight, task.nodes[:1], HEAR_S)
    send_report(preflight, reaching(report, first[0]) if first else report)
    joining = subprocess.Popen([*MEGARL, "join", str(run), f"--wait={JOIN_S + HEAR_S:g}"])
    signal.signal(signal.SIGTERM, lambda *_: joining.terminate())
    status = joining.wait()
    if status:
        time.sleep(JUDGE_S)
    return status


def _await_folder(folder: Path) -> None:
    """Wait for the first node to make a folder. Raises UserError where it is not seen in HEAR_S seconds, by when the
    first node has missed this one."""
    deadline = time.monotonic() + HEAR_S
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise UserError(
                f"{folder}: the first node's files are not seen here; put run.folder on a shared file system"
            )
        time.sleep(POLL_S)


def drive(task: Task, folder: JobFolder) -> int:
    """Make an attempt at the run, from this node, and judges how it ended. Return the exit status."""
    run, job = folder.path.parent, folder.job()
    os.chdir(job.folder)
    config = load(folder.recipe_on(len(task.nodes)))
    checkpoints = Checkpoints(RunFolder.of(config).checkpoints)
    saved = max(checkpoints.steps(), default=0)
    attempts = Attempts(run)
    if len(attempts.without_progress(saved, task.job)) >= job.stalled:
        cause = (
            f"{job.stalled} attempts have saved nothing after step {saved}, the cause told last: {folder.last_cause()}"
        )
        return _judge(folder, "stalled", cause)
    preflight = folder.preflight(task.attempt)
    preflight.mkdir(parents=True)
    report = look_at_node(task.node, run, job, config)
    with reachable(report, config) as report:
        send_report(preflight, report)
        reports = await_reports(preflight, task.nodes, HEAR_S)
    if objection := find_objection(reports, task.nodes, run, HEAR_S):
        return _judge(folder, objection.verdict, objection.cause, objection.bad)
    attempt = attempts.begin(Attempt(task.job, task.restart, task.allocated, time.time(), saved))
    status, cause = _train(task, folder, attempt)
    verdict = VERDICTS.get(status, "failed")
    lost = NodeRendezvous(run / NODES).lost() if verdict == "failed" and len(task.nodes) > 1 else ()
    cause = cause or f"megarl train ended with status {status}; see {run / 'logs'}"
    status = _judge(folder, verdict, cause, lost)
    print(f"job: {effective_time(run)}", flush=True)
    return status


def _judge(folder: JobFolder, verdict: Verdict, cause: str, bad: Sequence[str] = ()) -> int:
    """Say how the attempt ended, and returns the exit status, by which srun ends the other tasks."""
    folder.judge(verdict, cause, bad)
    return 0 if verdict == "done" else 1


def _train(task: Task, folder: JobFolder, attempt: Path) -> tuple[int, str]:
    """Run `megarl train` to its end. SIGTERM to this task goes to it alone. Return its exit status, and the first
    line in which it names an error: others may follow from that."""
    command = [*MEGARL, "train", str(folder.recipe_on(len(task.nodes)))]
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="backslashreplace")
    signal.signal(signal.SIGTERM, lambda *_: driver.terminate())
    replace_text(folder.driver, f"{task.node} {os.getpid()}\n")
    causes: list[str] = []
    reader = threading.Thread(target=_show, args=(driver.stderr, causes))
    reader.start()
    while driver.poll() is None:
        os.utime(attempt)
        with suppress(subprocess.TimeoutExpired):
            driver.wait(TOUCH_S)
    reader.join()
    return driver.returncode, causes[0] if causes else ""


def _show(lines: Iterable[str], causes: list[str]) -> None:
    """Print the lines, and appends those that name an error to the list."""
    for line in lines:
        print(line, end="", file=sys.stderr, flush=True)
        if line.startswith(ERROR):
            causes.append(line.strip())
