"""A run over several machines, with `megarl train` on the first and `megarl join` on the others."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from megarl.cluster.supervision.interrupts import REPEAT_S
from tests.cluster.machines import Machine
from tests.cluster.reference import train_command
from tests.e2e.run import MEGARL
from tests.metrics import complete_rows
from tests.paths import ROOT
from tests.timing import ASK_S, RUN_S, WAIT_S


class ClusterRun:
    """`megarl train` on the first of some machines, and `megarl join` on the others."""

    def __init__(self, machines: list[Machine], shared: Path, name: str, *overrides: str, vllm: bool, megatron: bool):
        self.machines, self.folder = machines, shared / "runs" / name
        self._outputs = [shared / f"{name}.{machine.name}" for machine in machines]
        nodes = f"cluster.nodes={len(machines)}"
        commands = [train_command(shared, name, nodes, *overrides, vllm=vllm, megatron=megatron)]
        commands += [[*MEGARL, "join", str(self.folder), "--wait=300"]] * (len(machines) - 1)
        started = zip(machines, commands, self._outputs, strict=True)
        self.processes = [machine.start(command, out, ROOT) for machine, command, out in started]

    def output(self, number: int) -> str:
        return self._outputs[number].read_text()

    @property
    def metrics(self) -> list[dict]:
        return complete_rows(self.folder / "metrics.jsonl")

    def wait_for_step(self, number: int) -> None:
        deadline = time.monotonic() + RUN_S
        while len(self.metrics) < number:
            assert self.processes[0].poll() is None and time.monotonic() < deadline, self.output(0)
            time.sleep(ASK_S)

    def check_end(self, number: int, seconds: float, *codes: int) -> None:
        """Wait until megarl exits on a machine with one of the codes. Errors show its output and the driver's."""
        with suppress(subprocess.TimeoutExpired):
            self.processes[number].wait(seconds)
        ended = self.processes[number].returncode
        if ended not in codes:
            printed = "\n".join(self.output(i) for i in {number: 1, 0: 1})
            name = self.machines[number].name
            raise AssertionError(f"{name} exited with {ended} instead of {codes} within {seconds} s:\n{printed}")

    def signal_all(self, number: int) -> None:
        """Signal megarl on all machines."""
        for nsenter in self.processes:
            with suppress(psutil.NoSuchProcess):  # nsenter has exited
                for process in psutil.Process(nsenter.pid).children():  # nsenter does not forward signals
                    process.send_signal(number)

    def check_nothing_is_left(self) -> None:
        for machine in self.machines:
            assert not machine.processes() and not machine.files()


@contextmanager
def cluster_run(
    machines: list[Machine], shared: Path, name: str, *overrides: str, vllm: bool = False, megatron: bool = False
) -> Iterator[ClusterRun]:
    run = ClusterRun(machines, shared, name, *overrides, vllm=vllm, megatron=megatron)
    try:
        yield run
    finally:
        if any(process.poll() is None for process in run.processes):
            run.signal_all(signal.SIGTERM)
            time.sleep(REPEAT_S + 0.5)
            run.signal_all(signal.SIGTERM)  # a run that saves on the first signal exits on the second
        for process in run.processes:
            process.wait(WAIT_S)
