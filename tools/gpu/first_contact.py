"""Measure the trainer on one GPU in a few minutes, without network, Ray or vLLM: see README.md in this folder.

python -m tools.gpu.first_contact --minutes 6 --out FOLDER

The steps run in order of importance, each in a new process with a time limit; after a failure the next step runs. Steps
that measure no times share the GPU. FOLDER/first_contact.json is rewritten after each step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = "first_contact.json"
LAST_LINES = 25
"""Number of lines from a failed step's output that the result keeps."""


@dataclass(frozen=True, slots=True)
class Step:
    """A function in steps.py, and its time limit in seconds, excluding its imports. Consecutive steps with the same
    nonempty `beside` run at the same time.
    """

    name: str
    seconds: float
    beside: str = ""


STEPS = (
    Step("machine", 90),
    Step("update_8b", 75),
    Step("update_1b5", 75),
    Step("update_1b5_16k", 75),
    Step("update_1b5_mixed", 60),
    Step("tests", 170, "untimed"),
    Step("learning", 170, "untimed"),
    Step("precision", 170, "untimed"),
    Step("fp8_blocks", 60, "untimed"),
    Step("saved", 120, "untimed"),
    Step("te_layers", 90, "untimed"),
    Step("head", 75),
    Step("attention", 75),
    Step("state", 60),
    Step("offload_test", 90),
    Step("update_1b5_long", 60),
    Step("update_8b_long", 60),
    Step("kernels", 60),
    Step("segments_of_fixed_size", 60),
)


def command_of(name: str, result: Path) -> list[str]:
    return [sys.executable, "-u", "-m", "tools.gpu.steps", name, str(result)]


class Process:
    """A step's process. It imports its modules immediately, and starts the step when `begin` is called."""

    def __init__(self, step: Step, folder: Path):
        self.step, self.result, self.log = step, folder / f"{step.name}.json", folder / f"{step.name}.log"
        self._output: IO[bytes] = self.log.open("wb")
        self._process = subprocess.Popen(
            command_of(step.name, self.result),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._begin = 0.0

    def begin(self) -> None:
        self._begin = time.monotonic()
        with suppress(BrokenPipeError):  # the process failed during its imports, which `wait` reports
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()

    def wait(self, deadline: float) -> dict[str, Any]:
        """Wait until the step ends, or until its time limit or the deadline. Kill all its processes and return its
        result.
        """
        limit = min(self._begin + self.step.seconds, deadline) - time.monotonic()
        try:
            status = self._process.wait(max(limit, 0.1))
        except subprocess.TimeoutExpired:
            status = None
        seconds = time.monotonic() - self._begin
        self.end()
        outcome = {0: "passed", None: "timed out"}.get(status, "failed")
        written = {"figures": json.loads(self.result.read_text())} if self.result.exists() else {}
        lines = self.log.read_text(errors="replace").splitlines()
        failure = {} if outcome == "passed" else {"status": status, "output": lines[-LAST_LINES:]}
        return {"outcome": outcome, "seconds": round(seconds, 1), **written, **failure}

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


def groups_of(steps: Sequence[Step]) -> list[list[Step]]:
    """Return the steps in order, in groups that run at the same time."""
    groups: list[list[Step]] = []
    for step in steps:
        if groups and step.beside and groups[-1][0].beside == step.beside:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def run(steps: Sequence[Step], folder: Path, minutes: float) -> dict[str, Any]:
    """Run the steps, and return the result, which is also written to the folder after each group of steps. The
    processes of the next group start early, so that their imports overlap with the current group."""
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    deadline = begin + 60 * minutes
    result: dict[str, Any] = {"minutes": minutes, "steps": {step.name: {"outcome": "not started"} for step in steps}}
    groups = groups_of(steps)
    next_group = [Process(step, folder) for step in groups[0]]
    for number, _ in enumerate(groups):
        current, next_group = next_group, []
        if time.monotonic() >= deadline:
            break
        for process in current:
            process.begin()
        if number + 1 < len(groups):
            next_group = [Process(step, folder) for step in groups[number + 1]]
        for process in current:
            result["steps"][process.step.name] = entry = process.wait(deadline)
            print(f"{process.step.name}: {entry['outcome']} after {entry['seconds']} s", flush=True)
        result["seconds"] = round(time.monotonic() - begin, 1)
        (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for process in [*current, *next_group]:
        process.end()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=9, help="time limit for all steps (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {RESULT} and the steps' logs")
    parser.add_argument("--only", help="names of steps, separated by commas")
    arguments = parser.parse_args()
    names = [step.name for step in STEPS] if arguments.only is None else arguments.only.split(",")
    if unknown := set(names).difference(step.name for step in STEPS):
        parser.error(f"--only={','.join(sorted(unknown))}: unknown. Fix: use {', '.join(step.name for step in STEPS)}")
    result = run([step for step in STEPS if step.name in names], arguments.out, arguments.minutes)
    outcomes = [step["outcome"] for step in result["steps"].values()]
    print(f"{outcomes.count('passed')} of {len(outcomes)} steps passed; result: {arguments.out / RESULT}")
    sys.exit(outcomes.count("passed") < len(outcomes))


if __name__ == "__main__":
    main()
