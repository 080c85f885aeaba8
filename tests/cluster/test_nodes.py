"""Runs over several machines with separate networks.

They train the same weights as a single machine, send as many bytes as planned, and name lost or missing nodes. The
reference is the same recipe on this machine, where engines read the weights from shared memory.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from megarl.cluster.supervision.interrupts import REPEAT_S
from tests.cluster.machines import Machine, Machines
from tests.cluster.reference import COMMON, check_same, learned, on_one_machine, train_command
from tests.e2e.run import MEGARL
from tests.marks import exhaustive_but
from tests.paths import ROOT
from tests.timing import ASK_S, RUN_S, WAIT_S
from tests.tiny_model import write_tiny_llama

STEPS = 4
RECIPES = {
    # Each node has one actor stage and one engine rank, which needs both stages: one of them is sent. Each critic rank
    # holds the whole critic.
    "colocated PPO on 2": (
        2,
        [
            *("algorithm.advantage={estimator: gae, gae_lambda: 1.0}", "critic.layout.dp=2", "critic.threads=1"),
            "rollout.tp=2",
        ],
    ),
    # Actor and critic alternate on the first two nodes. The engine has the third.
    "disaggregated GAE on 3": (
        3,
        [
            *("algorithm.advantage={estimator: gae, gae_lambda: 1.0}", "critic.layout.dp=2", "critic.threads=1"),
            *("cluster.placement=disaggregated", "cluster.roles={actor: 0-1, critic: 0-1, rollout: 2}"),
            *("actor.offload=[gradients, optimizer]", "critic.offload=[parameters, optimizer]"),
        ],
    ),
}


TRANSPORTS = {
    "colocated PPO on 2": "shared_memory within nodes, p2p between nodes",
    "disaggregated GAE on 3": "p2p",
}


@pytest.fixture(scope="module")
def machines(shared: Path) -> Iterator[list[Machine]]:
    with Machines(3, shared) as all_machines:
        yield all_machines


class ClusterRun:
    """`megarl train` on the first of some machines, and `megarl join` on the others."""

    def __init__(self, machines: list[Machine], shared: Path, name: str, *overrides: str, vllm: bool):
        self.machines, self.folder = machines, shared / "runs" / name
        self._outputs = [shared / f"{name}.{machine.name}" for machine in machines]
        commands = [train_command(shared, name, f"cluster.nodes={len(machines)}", *overrides, vllm=vllm)]
        commands += [[*MEGARL, "join", str(self.folder), "--wait=300"]] * (len(machines) - 1)
        started = zip(machines, commands, self._outputs, strict=True)
        self.processes = [machine.start(command, out, ROOT) for machine, command, out in started]

    def output(self, number: int) -> str:
        return self._outputs[number].read_text()

    @property
    def metrics(self) -> list[dict]:
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

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
            with suppress(psutil.NoSuchProcess):  # it has exited
                for process in psutil.Process(nsenter.pid).children():  # nsenter does not forward signals
                    process.send_signal(number)

    def check_nothing_is_left(self) -> None:
        for machine in self.machines:
            assert not machine.processes() and not machine.files()


@contextmanager
def cluster_run(
    machines: list[Machine], shared: Path, name: str, *overrides: str, vllm: bool = False
) -> Iterator[ClusterRun]:
    run = ClusterRun(machines, shared, name, *overrides, vllm=vllm)
    try:
        yield run
    finally:
        if any(process.poll() is None for process in run.processes):
            run.signal_all(signal.SIGTERM)
            time.sleep(REPEAT_S + 0.5)
            run.signal_all(signal.SIGTERM)  # a run that saves on the first signal exits on the second
        for process in run.processes:
            process.wait(WAIT_S)


# test_refit_traffic_equals_the_plan also compares a disaggregated run on three nodes.
@pytest.mark.parametrize("name", exhaustive_but(RECIPES, "colocated PPO on 2"))
def test_multi_node_run_equals_single_machine(machines: list[Machine], shared: Path, name: str) -> None:
    count, overrides = RECIPES[name]
    short, overrides = name.split()[1], [*COMMON, *overrides, f"run.steps={STEPS}"]
    vllm = "rollout.tp=2" in overrides  # an engine over two nodes
    alone = on_one_machine(shared, f"{short}-alone", *overrides, vllm=vllm)
    with cluster_run(machines[:count], shared, f"{short}-nodes", *overrides, vllm=vllm) as run:
        for number in range(count):
            run.check_end(number, WAIT_S if number else RUN_S, 0)
        run.check_nothing_is_left()
    assert f"refit: first refit by {TRANSPORTS[name]}" in run.output(0)
    assert len(learned(run.folder)) == STEPS
    check_same(run.folder, alone)


def test_refit_traffic_equals_the_plan(machines: list[Machine], shared: Path) -> None:
    """The machine with the only engine receives the weights in each step; other traffic is small.

    The run must still equal the run of a single machine.
    """
    model = write_tiny_llama(shared / "larger", hidden_size=512, num_heads=8, num_layers=4, intermediate_size=2048)
    keys = [*COMMON, f"model.path={model}", "run.steps=12", "actor.optimizer.lr=1.0e-6"]
    alone = on_one_machine(shared, "cables-alone", *keys)
    with cluster_run(machines, shared, "cables", *keys, "cluster.placement=disaggregated") as run:
        run.wait_for_step(2)
        before, first = run.machines[2].received_bytes(), len(run.metrics)
        run.wait_for_step(first + 8)
        carried, steps = run.machines[2].received_bytes() - before, run.metrics
        for machine, process in zip(machines, ("TrainerActor", "TrainerActor", "EngineActor"), strict=True):
            assert any(f"ray::{process}" in line for line in machine.processes())
        run.check_end(0, RUN_S, 0)
    check_same(run.folder, alone)
    refits = len(steps) - first
    [planned] = {step["refit/sent_gb"] for step in steps}
    weights = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())
    assert planned == pytest.approx(weights / 1e9)
    # A refit may be in progress at either end of the measurement.
    assert (refits - 1) * weights <= carried <= (refits + 1) * weights * 1.05


def test_interrupted_run_saves_and_resumes_with_early_nodes(machines: list[Machine], shared: Path) -> None:
    """The signal reaches all nodes, as Slurm's does. A stale invitation from the previous attempt must not mislead a
    node.
    """
    keys = [*COMMON, "checkpoint.on_signal=true", "checkpoint.grace_s=60", "resume=auto"]
    invitation = shared / "runs/told/nodes/invitation.json"
    with cluster_run(machines[:2], shared, "told", *keys, "run.steps=1000000") as run:
        run.wait_for_step(2)
        left_behind = invitation.read_text()
        run.signal_all(signal.SIGTERM)
        for number in (0, 1):
            run.check_end(number, WAIT_S, 130)
        run.check_nothing_is_left()
    done = len(run.metrics)
    assert f"The run ended. Resume it from step_{done:06d} with: " in run.output(0)
    invitation.write_text(left_behind)
    joining = machines[1].start([*MEGARL, "join", str(run.folder)], shared / "early.n1", ROOT)
    with cluster_run(machines[:1], shared, "told", *keys, "cluster.nodes=2", f"run.steps={done + 1}") as run:
        run.check_end(0, RUN_S, 0)
        assert joining.wait(WAIT_S) == 0, (shared / "early.n1").read_text()
        run.check_nothing_is_left()
    assert [line["step"] for line in run.metrics] == list(range(1, done + 2))


def test_lost_node_is_named_and_other_nodes_end(machines: list[Machine], shared: Path) -> None:
    with ExitStack() as mending, cluster_run(machines[:2], shared, "lost", *COMMON, "run.steps=1000000") as run:
        run.wait_for_step(2)
        machines[1].cut()
        mending.callback(machines[1].mend)  # even if the test fails: other tests need the machine
        run.check_end(0, WAIT_S, 1)
        assert "lost node n1. See" in run.output(0).splitlines()[-1]
        # The node noticed the loss itself, or read in the shared files that the driver had ended the run.
        run.check_end(1, WAIT_S, 0, 1)
        run.check_nothing_is_left()


def test_losing_a_remote_rank_loses_its_engine(machines: list[Machine], shared: Path) -> None:
    keys = [*COMMON, "rollout.tp=2", "run.steps=1000000"]
    with cluster_run(machines[:2], shared, "part", *keys, vllm=True) as run:
        run.wait_for_step(2)
        machines[1].run("pkill", "--signal", "KILL", "--full", "VLLM::Worker")
        run.check_end(0, WAIT_S, 1)
        assert "engine-0 died" in run.output(0), run.output(0)
        assert "engine-0.1: a rank died" in (run.folder / "logs/attempt_1/engine-0.log").read_text()
        run.check_end(1, WAIT_S, 0, 1)
        run.check_nothing_is_left()


def ranks_on(machine: Machine) -> list[str]:
    """Return the pids of the engine ranks' processes, without zombies."""
    lines = [line.split(maxsplit=2) for line in machine.run("ps", "-eo", "pid=,stat=,comm=").splitlines()]
    return [pid for pid, state, name in lines if name.startswith("VLLM::Worker") and not state.startswith("Z")]


@pytest.mark.exhaustive
def test_lost_multi_node_engine_restarts_on_both_nodes(shared: Path) -> None:
    """After its actor on one node is killed, the ranks on the other node exit too, and the engine restarts on both
    nodes.
    """
    keys = [
        "actor.layout={pp: 1, dp: 4}",
        "rollout={tp: 2, replicas: 2}",
        "run.steps=1000000",
        "cluster.timeouts.start=240",
    ]
    with Machines(4, shared) as machines, cluster_run(machines, shared, "again", *COMMON, *keys, vllm=True) as run:
        run.wait_for_step(2)
        ranks = ranks_on(machines[3])
        machines[2].run("pkill", "--signal", "KILL", "--full", "ray::EngineActor")
        deadline = time.monotonic() + RUN_S
        while "refit: engine-1 rejoined. Continuing with 2 of 2 engines" not in run.output(0):
            assert run.processes[0].poll() is None and time.monotonic() < deadline, run.output(0)
            time.sleep(ASK_S)
        assert "engine-1 died and is being restarted. Continuing with 1 of 2 engines" in run.output(0)
        again = ranks_on(machines[3])
        assert len(ranks) == len(again) == 1 and ranks != again
        run.wait_for_step(len(run.metrics) + 2)
        assert run.metrics[-1]["engines/alive"] == 2


def test_timeout_shows_stacks_of_another_node(machines: list[Machine], shared: Path) -> None:
    keys = ["cluster.placement=disaggregated", "actor.layout.pp=1", "rollout.max_new_tokens=40"]
    with cluster_run(machines[:2], shared, "late", *keys, "cluster.timeouts.rollout=0.05") as run:
        run.check_end(0, RUN_S, 1)
        log = run.folder / "logs/attempt_1/engine-0.log"
        assert f"rollout: no response from engine-0 within 0.05 s. Their stacks are at the end of {log}" in run.output(
            0
        )
        assert "(most recent call first)" in log.read_text()
        run.check_end(1, WAIT_S, 0)
        run.check_nothing_is_left()


def test_missing_and_differing_nodes_are_named(machines: list[Machine], shared: Path) -> None:
    with cluster_run(machines[:1], shared, "missing", "cluster.nodes=2", "cluster.timeouts.start=15") as run:
        run.check_end(0, RUN_S, 1)
        assert "cluster.timeouts.start=15: only 0 of 1 other nodes joined in time" in run.output(0)
    package = shared / "other" / "transformers-0.0.1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 0.0.1\n")
    with cluster_run(machines[:1], shared, "differing", "cluster.nodes=2", "actor.layout.pp=2") as run:
        command, path = [*MEGARL, "join", str(run.folder)], str(package.parent)
        joining = machines[1].start(command, shared / "differing.n1", ROOT, PYTHONPATH=path)
        assert joining.wait(RUN_S) == 2
        run.check_end(0, WAIT_S, 2)
        for output in (run.output(0), (shared / "differing.n1").read_text()):
            assert "node n1: packages differ from the first node's: transformers 0.0.1 instead of " in output


def test_nodes_end_when_the_first_one_crashes(machines: list[Machine], shared: Path) -> None:
    """This test must run last, because the machine is not booted again."""
    with cluster_run(machines[:2], shared, "first", *COMMON, "run.steps=1000000") as run:
        run.wait_for_step(2)
        machines[0].crash()
        run.check_end(1, WAIT_S, 1)
        assert f"lost the connection to the first node, {machines[0].address}" in run.output(1)
        assert not machines[1].processes() and not machines[1].files()
