"""Jobs on a real Slurm cluster that lose a node without having a spare, or lose the node with the batch script.

tests/cluster/test_faults.py, which is not exhaustive, covers a lost node that a spare replaces, and a requeued job.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.cluster.jobs import ATTEMPT, Launched
from tests.cluster.slurm import Slurm
from tests.timing import ASK_S, WAIT_S

pytestmark = pytest.mark.exhaustive


def test_job_is_requeued_when_its_first_node_disconnects(cluster: Slurm, shared: Path) -> None:
    """Slurm itself would keep the job on its other nodes, although the node with the batch script is gone."""
    run = Launched(cluster, shared, "cut", "--nodes=2", "--spares=1", "--time=30", "run.steps=1000000")
    first, _ = run.wait_for_attempt(1)
    [machine] = [machine for machine in cluster.machines if machine.name == first]
    machine.cut()
    deadline = time.monotonic() + WAIT_S
    while run.job["Restarts"] == "0":
        assert time.monotonic() < deadline, (run.job, run.log)
        time.sleep(ASK_S)
    machine.mend()
    assert len(run.wait_for_attempt(2)) == 2
    cluster.ask("scancel", run.number)
    cluster.wait_for_state(run.number, "CANCELLED", seconds=WAIT_S)


def test_job_without_spare_continues_with_fewer_replicas(cluster: Slurm, shared: Path) -> None:
    replicas = ("actor.layout={pp: 1, dp: 2}", "rollout.replicas=2", "checkpoint.every_steps=1", "run.steps=1000000")
    run = Launched(cluster, shared, "fewer", "--nodes=2", "--fewest-nodes=1", "--time=30", *replicas)
    first, second = run.wait_for_attempt(1)
    deadline = time.monotonic() + WAIT_S
    while not (run.folder / "checkpoints/latest").exists():
        assert time.monotonic() < deadline, run.log
        time.sleep(ASK_S)
    {machine.name: machine for machine in cluster.machines}[second].crash()
    assert run.wait_for_attempt(2) == [first]
    assert run.job["Restarts"] == "0"
    attempt = run.log[run.log.rindex(ATTEMPT) :]
    assert re.search(r"^0: run: .*, resuming after step \d+", attempt, re.MULTILINE), attempt
    ranks, before = ({log.name for log in run.folder.glob(f"logs/attempt_{i}/trainer-*.log")} for i in (2, 1))
    assert (len(before), len(ranks)) == (2, 1)
    cluster.ask("scancel", run.number)
    cluster.wait_for_state(run.number, "CANCELLED", seconds=WAIT_S)
