"""Runs launched as jobs of a Slurm cluster."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from pathlib import Path

from tests.cluster.reference import COMMON
from tests.cluster.slurm import Slurm
from tests.e2e.run import MEGARL, megarl
from tests.metrics import complete_rows
from tests.paths import ROOT
from tests.timing import ASK_S, RUN_S, wait_until

ATTEMPT = "job: attempt on "
REWARD = """
import time
from pathlib import Path


def digit_shares(prompts, responses, answers):
    if Path(__file__).with_name("slow").exists():
        time.sleep(0.5)
    return [sum(c.isdigit() for c in response) / max(1, len(response)) for response in responses]
"""
"""A reward that makes each step take half a second while the file `slow` exists."""

ELSEWHERE = "/var/tmp"
"""TMPDIR of the launch command. The shared folder is in /tmp, and launch rejects runs in a machine's TMPDIR."""


def write_rewards(shared: Path) -> None:
    (shared / "rewards.py").write_text(REWARD)
    (shared / "slow").touch()


def launch(
    cluster: Slurm, shared: Path, name: str, *arguments: str, vllm: bool = False, megatron: bool = False
) -> subprocess.CompletedProcess[str]:
    """Launch a run as a job. For `vllm` and `megatron`, see tests.e2e.run.megarl."""
    program, needed = megarl(vllm, megatron)
    command = [] if vllm else [f"--command={shlex.join(program)}"]
    keys = [f"run.folder={shared}/runs", f"run.name={name}", *COMMON, *needed, *command]
    command = [*MEGARL, "launch", str(shared / "tiny.yaml"), *keys, *arguments]
    return cluster.run("env", f"TMPDIR={ELSEWHERE}", *command, "--gpus-per-node=0", "--grace=60", cwd=ROOT)


class Launched:
    """A run launched as a job."""

    def __init__(
        self, cluster: Slurm, shared: Path, name: str, *arguments: str, vllm: bool = False, megatron: bool = False
    ):
        self.cluster, self.folder = cluster, shared / "runs" / name
        done = launch(cluster, shared, name, *arguments, vllm=vllm, megatron=megatron)
        assert done.returncode == 0, done.stderr
        self.number = (self.folder / "launch/submitted").read_text().strip()

    @property
    def log(self) -> str:
        file = self.folder / f"launch/job-{self.number}.log"
        return file.read_text() if file.exists() else ""

    @property
    def job(self) -> dict[str, str]:
        return self.cluster.job(self.number)

    @property
    def attempts(self) -> list[str]:
        """The nodes of each of the job's attempts."""
        return [line.removeprefix(ATTEMPT) for line in self.log.splitlines() if line.startswith(ATTEMPT)]

    @property
    def steps(self) -> int:
        return len(complete_rows(self.folder / "metrics.jsonl"))

    @property
    def goodputs(self) -> list[float]:
        return [row["cluster/goodput"] for row in complete_rows(self.folder / "metrics.jsonl")]

    @property
    def resumed(self) -> list[int]:
        """The steps after which attempts resumed."""
        return [int(step) for step in re.findall(r"^0: run: .*, resuming after step (\d+)", self.log, re.MULTILINE)]

    def wait_for_line(self, pattern: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.log, re.MULTILINE):
            assert time.monotonic() < deadline, self.log
            time.sleep(ASK_S)

    def wait_for_attempt(self, number: int) -> list[str]:
        """Wait until this attempt (counted from 1) or a later one has finished a step. Return its nodes."""
        deadline = time.monotonic() + RUN_S
        while len(self.attempts) < number or not self._latest_attempt_has_steps():
            assert time.monotonic() < deadline, (self.job, self.log)
            time.sleep(ASK_S)
        return self.attempts[-1].split()

    def _latest_attempt_has_steps(self) -> bool:
        return bool(re.search(r"^0: +\d+/\d+ ", self.log[self.log.rindex(ATTEMPT) :], re.MULTILINE))

    def check_nothing_is_left(self) -> None:
        """Wait until no machine has processes or files of the job. Some processes may exit after the job's end."""
        machines = [machine for machine in self.cluster.machines if machine.is_up]

        def left() -> list[str]:
            lines = [f"{machine.name}: {line}" for machine in machines for line in machine.processes()]
            running = [line for line in lines if not re.match(r"\w+: (slurmd -D|slurmstepd: )", line)]
            return [*running, *(f"{machine.name}: {file}" for machine in machines for file in machine.files())]

        wait_until(lambda: not left(), left)
