"""Runs over several machines name lost, missing and differing nodes, and end on the others."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.cluster_run import cluster_run
from tests.cluster.machines import Machine, Machines
from tests.cluster.reference import COMMON
from tests.e2e.run import MEGARL
from tests.paths import ROOT
from tests.timing import ASK_S, RUN_S, WAIT_S


def test_lost_node_is_named_and_other_nodes_end(machines: list[Machine], shared: Path) -> None:
    with ExitStack() as mending, cluster_run(machines[:2], shared, "lost", *COMMON, "run.steps=1000000") as run:
        run.wait_for_step(2)
        machines[1].cut()
        mending.callback(machines[1].mend)  # even if this test fails, because other tests need the machine
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
