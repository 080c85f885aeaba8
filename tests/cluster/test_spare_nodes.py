"""A run that loses a node of trained models continues on a spare node, and ends equal to an uninterrupted run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

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
KEYS = ["cluster.placement=disaggregated", "cluster.roles={rollout: 0, actor: 1-2}", f"run.steps={STEPS}"]
"""The driver and the engine are on the first node, and a rank is on each of the next two."""


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
def test_spare_node_replaces_a_lost_node_of_ranks(shared: Path) -> None:
    """The lost node has the rank that serves the rendezvous of all ranks. Its copy is on the other rank's node."""
    keys = [*COMMON, *KEYS, f"rewards.functions=[{{function: {shared}/rewards.py:digit_shares}}]"]
    (shared / "slow").unlink()
    alone = on_one_machine(shared, "spare-alone", *keys, megatron=True)
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


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_job_replaces_a_crashed_node_in_the_same_attempt(cluster: Slurm, shared: Path) -> None:
    """Slurm notices the crash after the run has recovered, and must not end the job step."""
    (shared / "slow").touch()
    keys = [*KEYS[:2], f"rewards.functions=[{{function: {shared}/rewards.py:digit_shares}}]", "run.steps=1000000"]
    run = Launched(cluster, shared, "in-place", "--nodes=3", "--spares=1", "--time=30", *keys)
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
