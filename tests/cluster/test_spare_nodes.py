"""A run that loses or gives up a node of trained models continues on a spare node, and ends equal to an uninterrupted
run."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from megarl.cluster.trace import read_spans
from megarl.run.audit.audit import audit
from tests.cluster.cluster_run import ClusterRun, cluster_run
from tests.cluster.jobs import Launched
from tests.cluster.machines import Machine, Machines
from tests.cluster.reference import COMMON, check_same, on_one_machine
from tests.cluster.slurm import Slurm
from tests.e2e.run import MEGARL
from tests.paths import ROOT
from tests.timing import RUN_S, WAIT_S, wait_until

STEPS = 150
PLACEMENT = ["cluster.placement=disaggregated", "cluster.roles={rollout: 0, actor: 1-2}"]
"""The driver and the engine are on the first node, and a rank is on each of the next two."""


@pytest.fixture(scope="module")
def keys(shared: Path) -> list[str]:
    rewards = f"rewards.functions=[{{function: {shared}/rewards.py:digit_shares}}]"
    return [*COMMON, *PLACEMENT, f"run.steps={STEPS}", rewards]


@pytest.fixture(scope="module")
def alone(shared: Path, keys: list[str]) -> Path:
    """The run on one machine."""
    (shared / "slow").unlink()
    return on_one_machine(shared, "spare-alone", *keys, megatron=True)


def updates(run: Path) -> Counter[str]:
    """Return the number of updates of each rank in a run's only attempt."""
    return Counter(span.process for span in read_spans(run / "logs/attempt_1") if span.task == "update")


def engines(machine: Machine) -> list[str]:
    """Return the pids of the engines' processes."""
    return machine.run("pgrep", "--full", "^ray::EngineActor").split()


def wait_for(run: ClusterRun, line: str) -> None:
    """Wait until the driver has printed a line that contains `line`."""

    def is_printed() -> bool:
        assert run.processes[0].poll() is None, run.output(0)
        return line in run.output(0)

    wait_until(is_printed, lambda: run.output(0), RUN_S)


@pytest.mark.timeout(900)
def test_spare_node_replaces_a_lost_node_of_ranks(shared: Path, keys: list[str], alone: Path) -> None:
    """The lost node has the rank that serves the rendezvous of all ranks. Its copy is on the other rank's node."""
    (shared / "slow").touch()
    output = shared / "spare.n3"
    with (
        Machines(4, shared) as machines,
        cluster_run(machines[:3], shared, "spare", *keys, megatron=True) as run,
        ExitStack() as mending,
    ):
        run.wait_for_step(1)
        before = engines(machines[0])
        spare = machines[3].start([*MEGARL, "join", str(run.folder), "--wait=300"], output, ROOT)
        wait_for(run, "node n3: joined from ")
        run.wait_for_step(len(run.metrics) + 2)
        machines[1].cut()
        mending.callback(machines[1].mend)
        wait_for(run, "recovery: replaced the ranks in ")
        assert engines(machines[0]) == before and len(before) == 1
        (shared / "slow").unlink()
        run.check_end(0, RUN_S, 0)
        run.check_end(1, WAIT_S, 1)
        run.check_end(2, WAIT_S, 0)
        assert spare.wait(WAIT_S) == 0, output.read_text()
        run.check_nothing_is_left()
        assert not machines[3].processes() and not machines[3].files()
    assert f"lost node n1. See {run.folder}" in run.output(0)
    assert f"recovery: node n3 ({machines[3].address}) replaces node n1\n" in run.output(0)
    assert sum(step.get("recovery/replacements", 0) for step in run.metrics) == 1
    check_same(run.folder, alone)
    is_proven, proof = audit(run.folder, reads_all=True)
    assert is_proven, proof


@pytest.mark.timeout(900)
def test_spare_node_replaces_a_drained_node(shared: Path, keys: list[str], alone: Path) -> None:
    """The node leaves when a spare node has joined, and no rank trains on a step twice. The spare process of its rank
    must not become the new rank."""
    (shared / "slow").touch()
    output, keys = shared / "drained.n3", [*keys, "cluster.spare_processes=true"]
    with Machines(4, shared) as machines, cluster_run(machines[:3], shared, "drained", *keys, megatron=True) as run:
        run.wait_for_step(1)
        before = engines(machines[0])
        (run.folder / "nodes" / "leave-n1").write_text("maintenance at noon\n")
        wait_for(run, "recovery: node n1 should leave the run: maintenance at noon. The run continues, because it has ")
        spare = machines[3].start([*MEGARL, "join", str(run.folder), "--wait=300"], output, ROOT)
        run.check_end(1, RUN_S, 0)
        assert not machines[1].processes() and not machines[1].files()
        machines[1].cut()
        run.wait_for_step(len(run.metrics) + 2)
        assert engines(machines[0]) == before and len(before) == 1
        (shared / "slow").unlink()
        run.check_end(0, RUN_S, 0)
        run.check_end(2, WAIT_S, 0)
        assert spare.wait(WAIT_S) == 0, output.read_text()
        run.check_nothing_is_left()
        assert not machines[3].processes() and not machines[3].files()
    assert run.output(0).count("should leave the run") == 1
    assert "Cause: node n1 leaves the run: maintenance at noon\n" in run.output(0)
    assert f"recovery: node n3 ({machines[3].address}) replaces node n1\n" in run.output(0)
    assert sum(step.get("recovery/replacements", 0) for step in run.metrics) == 1
    assert all(step["cluster/slowest_node"] >= 1 for step in run.metrics)
    assert updates(run.folder) == updates(alone) and "goodput/repeated" not in run.metrics[-1]
    check_same(run.folder, alone)
    is_proven, proof = audit(run.folder, reads_all=True)
    assert is_proven, proof


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_job_replaces_a_drained_node_in_the_same_attempt(cluster: Slurm, shared: Path) -> None:
    run = launch_with_spare(cluster, shared, "drain")
    nodes = run.wait_for_attempt(1)
    run.wait_for_line(r"^0: node n\d: joined from .* as a spare node$", seconds=RUN_S)
    cluster.ask("scontrol", "update", f"nodename={nodes[1]}", "state=drain", "reason=maintenance at noon")
    cause = rf"node {nodes[1]} leaves the run: Slurm drains it \(maintenance at noon\)"
    run.wait_for_line(rf"^0: recovery: replacing all ranks of the trained models. Cause: {cause}$", seconds=RUN_S)
    run.wait_for_line(r"^1: this node leaves the run$", seconds=RUN_S)
    before = run.steps
    wait_until(lambda: run.steps >= before + 20, lambda: run.log, RUN_S)
    assert len(run.attempts) == 1 and run.job["JobState"] == "RUNNING"
    cluster.ask("scancel", run.number)
    cluster.wait_for_state(run.number, "CANCELLED", seconds=WAIT_S)
    run.check_nothing_is_left()
    cluster.ask("scontrol", "update", f"nodename={nodes[1]}", "state=resume")


def launch_with_spare(cluster: Slurm, shared: Path, name: str) -> Launched:
    """Launch an endless run on three nodes, with a spare node."""
    (shared / "slow").touch()
    keys = [*PLACEMENT, f"rewards.functions=[{{function: {shared}/rewards.py:digit_shares}}]", "run.steps=1000000"]
    return Launched(cluster, shared, name, "--nodes=3", "--spares=1", "--time=30", *keys)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_job_replaces_a_crashed_node_in_the_same_attempt(cluster: Slurm, shared: Path) -> None:
    """Slurm notices the crash after the run has recovered, and must not end the job step."""
    run = launch_with_spare(cluster, shared, "in-place")
    nodes = run.wait_for_attempt(1)
    run.wait_for_line(r"^0: node n\d: joined from .* as a spare node$", seconds=RUN_S)
    before = run.steps
    wait_until(lambda: run.steps >= before + 2, lambda: run.log, RUN_S)
    {machine.name: machine for machine in cluster.machines}[nodes[1]].crash()
    run.wait_for_line(rf"^0: recovery: node n\d \(.*\) replaces node {nodes[1]}$", seconds=RUN_S)
    run.wait_for_line(r"^0: recovery: replaced the ranks in ", seconds=RUN_S)
    wait_until(lambda: "DOWN" in cluster.ask("scontrol", "show", "node", nodes[1]), seconds=RUN_S)
    before = run.steps
    wait_until(lambda: run.steps >= before + 20, lambda: run.log, RUN_S)
    assert len(run.attempts) == 1 and run.job["JobState"] == "RUNNING"
    cluster.ask("scancel", run.number)
    cluster.wait_for_state(run.number, "CANCELLED", seconds=WAIT_S)
    run.check_nothing_is_left()
