"""Jobs of a real Slurm cluster finish despite faults, and train the same weights as an uninterrupted run on one
machine.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.cluster.jobs import Launched
from tests.cluster.reference import COMMON, check_same, on_one_machine
from tests.cluster.slurm import Slurm
from tests.timing import RUN_S, WAIT_S

SEED, SOAK_STEPS = 20, 250
VICTIMS = (
    "ray::TrainerActor",
    "ray::EngineActor",
    "ray::RewardActor",
    "raylet/raylet",
    "gcs_server",
    "megarl.cli train",
)
"""Command-line patterns of the processes that the soak test kills."""


@pytest.mark.timeout(1500)
def test_job_finishes_despite_faults(cluster: Slurm, shared: Path) -> None:
    """The faults are a node without shared memory, the time limit, a preempting job, and a crashed node.

    The job is then cancelled and launched again for its last steps. It ends bitwise equal to an uninterrupted run.
    """
    machines = {machine.name: machine for machine in cluster.machines}
    machines["n1"].run("mount", "-o", "remount,size=64m", "/dev/shm")
    options = ["--nodes=2", "--spares=1", "--time=30"]
    rewards = f"rewards.functions=[{{function: {shared}/rewards.py:digit_shares}}]"
    ends = "cluster.replace_ranks=false"  # otherwise the spare node would replace the crashed one in the same attempt
    run = Launched(cluster, shared, "soak", *options, rewards, ends, "run.steps=1000000")
    assert run.wait_for_attempt(2) == ["n0", "n2"]  # the preflight check excluded n1
    assert "job: node n1: shared memory: 0.06 GiB free; mount -o remount,size=50% " in run.log

    number = len(run.attempts)
    hours, minutes, seconds = map(int, run.job["RunTime"].split(":"))
    limit = (3600 * hours + 60 * minutes + seconds + 45) // 60 + 1
    cluster.ask("scontrol", "update", f"JobId={run.number}", f"TimeLimit={limit}")  # the signal is due within a minute
    cluster.wait_for_state(run.number, "PENDING", seconds=WAIT_S)
    cluster.ask("scontrol", "update", f"JobId={run.number}", "TimeLimit=30")
    assert "job: requeueing without n1: received the end signal" in run.log
    saved = run.steps
    run.wait_for_attempt(number + 1)
    assert ({*run.resumed}, run.job["ExcNodeList"]) == ({saved}, "n1")
    assert run.goodputs and all(0 < share < 1 for share in run.goodputs)

    number = len(run.attempts)
    urgent = cluster.ask(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--output=/dev/null", "--wrap=sleep 1"
    ).strip()
    first, second = run.wait_for_attempt(number + 1)
    assert (cluster.job(urgent)["JobState"], run.job["Restarts"]) == ("COMPLETED", "2")
    assert run.resumed[-1] > saved
    assert "% of" in run.log and "steps whose results were kept took" in run.log

    # This must be the last fault: without a database, Slurm then does not update the job until its script is killed.
    number, saved = len(run.attempts), run.resumed[-1]
    machines[second].crash()
    run.wait_for_line(rf"^job: megarl: error: .*: lost node {second}\.", seconds=WAIT_S)
    nodes = run.wait_for_attempt(number + 1)
    assert (run.job["Restarts"], nodes[0]) == ("2", first)  # still the same allocation
    assert second not in nodes
    assert run.resumed[-1] >= saved

    machines["n1"].run("mount", "-o", "remount,size=4g", "/dev/shm")
    cluster.ask("scancel", run.number)
    cluster.wait_for_state(run.number, "CANCELLED", seconds=WAIT_S)
    saved = int((run.folder / "checkpoints/latest").read_text().strip().removeprefix("step_"))
    (shared / "slow").unlink()
    last = f"run.steps={saved + 3}"
    alone = on_one_machine(shared, "alone", *COMMON, rewards, last)
    run = Launched(cluster, shared, "soak", *options, rewards, ends, last)
    cluster.wait_for_state(run.number, "COMPLETED", seconds=RUN_S)
    assert run.log.splitlines()[-1] == "job: done"
    check_same(run.folder, alone)
    run.check_nothing_is_left()


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_job_finishes_despite_twenty_seeded_faults(cluster: Slurm, shared: Path) -> None:
    """Kill random processes of the run at random times. Each time another attempt resumes from the last checkpoint.

    Two of the attempts start after the job was requeued. The job ends bitwise equal to an uninterrupted run.
    """
    cluster.wait_for_nodes(WAIT_S)  # earlier jobs may still be completing
    (shared / "slow").touch()
    chance = random.Random(SEED)
    rewards = f"rewards.functions=[{{function: {shared}/rewards.py:digit_shares}}]"
    ends = "cluster.replace_ranks=false"  # otherwise the loss of a rank would not end an attempt
    keys = [rewards, "checkpoint.every_steps=1", f"run.steps={SOAK_STEPS}", ends]
    options = ["--nodes=2", "--spares=1", "--time=60", "--restarts=9", "--stalled=5"]
    run = Launched(cluster, shared, "twenty", *options, *keys, vllm=True)
    machines = {machine.name: machine for machine in cluster.machines}
    faults = [chance.choice(VICTIMS) for _ in range(20)]
    for number, victim in enumerate(faults, 1):
        nodes = run.wait_for_attempt(number)
        time.sleep(chance.uniform(0, 2))
        hosts = [machines[n] for n in nodes if any(victim in line for line in machines[n].processes())]
        chance.choice(hosts).run("pkill", "--signal", "KILL", "--full", victim)
        print(f"fault {number}: {victim} on {nodes}, after {run.steps} steps", flush=True)
    (shared / "slow").unlink()
    cluster.wait_for_state(run.number, "COMPLETED", seconds=RUN_S)
    assert run.log.splitlines()[-1] == "job: done"
    assert len(run.attempts) == 1 + len(faults) and set(VICTIMS) == set(faults)
    alone = on_one_machine(shared, "alone-twenty", *COMMON, *keys, vllm=True)
    check_same(run.folder, alone)
    run.check_nothing_is_left()
