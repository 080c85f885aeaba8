"""Runs as jobs of a real Slurm: they get to their last step through all that clusters do to them, and learn what one
machine does that nobody interrupts."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm, slurm
from tests.cluster.test_nodes import COMMON, check_same, on_one_machine
from tests.e2e.run import write_recipe
from tests.paths import ROOT

STARTED_S, ENDED_S = 300, 240
SEED, STEPS_OF_SOAK = 20, 250
VICTIMS = (
    "ray::TrainerActor",
    "ray::EngineActor",
    "ray::RewardActor",
    "raylet/raylet",
    "gcs_server",
    "megarl.cli train",
)
"""What the command lines have of the processes that the soak kills."""
ATTEMPT = "job: attempt on "
REWARD = """
import time
from pathlib import Path


def digit_shares(prompts, responses, answers):
    if Path(__file__).with_name("slow").exists():
        time.sleep(0.5)
    return [sum(c.isdigit() for c in response) / max(1, len(response)) for response in responses]
"""
"""A reward by which a step takes half a second, while there is the file `slow`."""

ELSEWHERE = "/var/tmp"
"""A folder for temporary files: launch refuses runs in the one of a single machine, where the shared folder lies."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    write_recipe(folder)
    (folder / "rewards.py").write_text(REWARD)
    (folder / "slow").touch()
    return folder


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[Slurm]:
    with slurm(5, shared) as cluster:
        yield cluster


def launch(cluster: Slurm, shared: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    keys = [f"run.folder={shared}/runs", f"run.name={name}", *COMMON]
    command = [sys.executable, "-m", "megarl.cli", "launch", str(shared / "tiny.yaml"), *keys, *arguments]
    return cluster.run("env", f"TMPDIR={ELSEWHERE}", *command, "--gpus-per-node=0", "--grace=60", cwd=ROOT)


class Launched:
    """A run that was launched as a job."""

    def __init__(self, cluster: Slurm, shared: Path, name: str, *arguments: str):
        self.cluster, self.folder = cluster, shared / "runs" / name
        done = launch(cluster, shared, name, *arguments)
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
        """The nodes of each attempt of the job."""
        return [line.removeprefix(ATTEMPT) for line in self.log.splitlines() if line.startswith(ATTEMPT)]

    @property
    def steps(self) -> int:
        file = self.folder / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    @property
    def effective_shares(self) -> list[float]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["cluster/effective_share"] for line in lines]

    @property
    def resumed(self) -> list[int]:
        """The steps after which attempts have gone on."""
        return [int(step) for step in re.findall(r"^0: run: .*, goes on after step (\d+)", self.log, re.MULTILINE)]

    def wait_for_line(self, pattern: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.log, re.MULTILINE):
            assert time.monotonic() < deadline, self.log
            time.sleep(0.2)

    def wait_for_attempt(self, number: int) -> list[str]:
        """Waits until the first steps of this attempt are done, counted from 1, or of a later one. Returns its
        nodes."""
        deadline = time.monotonic() + STARTED_S
        while len(self.attempts) < number or not self._steps_of_newest_attempt():
            assert time.monotonic() < deadline, (self.job, self.log)
            time.sleep(0.2)
        return self.attempts[-1].split()

    def _steps_of_newest_attempt(self) -> bool:
        return bool(re.search(r"^0: +\d+/\d+ ", self.log[self.log.rindex(ATTEMPT) :], re.MULTILINE))

    def check_nothing_is_left(self) -> None:
        for machine in filter(lambda machine: machine.is_up, self.cluster.machines):
            left = [line for line in machine.processes() if not line.startswith(("slurmd -D", "slurmstepd: "))]
            assert not left and not machine.files()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--partition=gpu"], "--partition=gpu: Slurm has none of this name, but main, urgent"),
        (
            ["--partition=main", "--spares=4"],
            "--partition=main: it has 5 nodes, and --nodes=2 + --spares=4 are asked for",
        ),
        (["--option=--qos=high", "--option=--mem=999T"], "sbatch: "),
    ],
)
def test_what_slurm_does_not_have_is_said_before_a_job_is_queued(
    cluster: Slurm, shared: Path, options: list[str], message: str
) -> None:
    done = launch(cluster, shared, "refused", "--nodes=2", "--time=10", *options)
    assert done.returncode == 2
    assert done.stderr.startswith(f"megarl: error: {message}"), done.stderr
    assert not cluster.ask("squeue", "--noheader")


def test_an_error_of_the_user_is_the_last_line_and_is_not_tried_again(cluster: Slurm, shared: Path) -> None:
    """The second launch takes the name again: nothing of the run was done."""
    options = ["--nodes=2", "--time=10", "run.steps=2"]
    wrong = f"rewards.functions=[{{function: {shared}/rewards.py:nothing}}]"
    run = Launched(cluster, shared, "wrong", *options, wrong)
    again = launch(cluster, shared, "wrong", *options)
    assert again.returncode == 2 and f"job {run.number} is " in again.stderr
    job = cluster.wait_for_state(run.number, "FAILED", seconds=ENDED_S)
    assert (job["ExitCode"], job["Restarts"], run.attempts) == ("2:0", "0", ["n0 n1"])
    assert run.log.splitlines()[-1].startswith("job: megarl: error: rewards.functions")
    run.check_nothing_is_left()
    run = Launched(cluster, shared, "wrong", *options)
    cluster.wait_for_state(run.number, "COMPLETED", seconds=STARTED_S)
    run.check_nothing_is_left()


def test_a_job_whose_attempts_save_nothing_gives_up_with_the_cause(cluster: Slurm, shared: Path) -> None:
    """Two attempts on one node fail at their first step, of which nobody has the time to sample; the third does not
    begin."""
    options = ["--nodes=1", "--time=10", "--stalled=2", "--restarts=5"]
    run = Launched(cluster, shared, "stalled", *options, "actor.layout.pp=1", "cluster.timeouts.rollout=0.01")
    job = cluster.wait_for_state(run.number, "FAILED", seconds=ENDED_S)
    assert (job["ExitCode"], job["Restarts"], len(run.attempts)) == ("3:0", "0", 3)
    last = run.log.splitlines()[-1]
    assert last.startswith("job: 2 attempts have saved nothing after step 0, the cause told last: megarl: error: ")
    assert "rollout: no answer from engine-0 in 0.01 s" in last
    run.check_nothing_is_left()


def test_a_sweep_is_an_array_whose_runs_go_back_into_the_queue_one_by_one(cluster: Slurm, shared: Path) -> None:
    keys = ("actor.layout.pp=1", "--sweep=run.seed=0,1", "--nodes=1", "--time=30", "run.steps=1000000")
    done = launch(cluster, shared, "sweep", *keys)
    assert done.returncode == 0, done.stderr
    base = (shared / "runs/sweep/launch/submitted").read_text().strip()
    metrics = [shared / f"runs/sweep-{point}/metrics.jsonl" for point in (0, 1)]
    deadline = time.monotonic() + STARTED_S
    while not all(file.exists() for file in metrics):
        assert time.monotonic() < deadline, cluster.ask("squeue")
        time.sleep(0.2)
    tasks = [f"{base}_{point}" for point in (0, 1)]
    cluster.ask("scancel", "--batch", "--signal=USR1", tasks[1])
    cluster.wait_for_state(tasks[1], "PENDING", seconds=ENDED_S)
    assert [cluster.job(task)["Restarts"] for task in tasks] == ["0", "1"]
    assert cluster.job(tasks[0])["JobState"] == "RUNNING"
    cluster.ask("scancel", base)
    for task in tasks:
        cluster.wait_for_state(task, "CANCELLED", seconds=ENDED_S)


def test_a_job_whose_first_node_loses_its_cable_goes_back_into_the_queue(cluster: Slurm, shared: Path) -> None:
    """Slurm itself would leave it its other nodes, for nothing, as the node with its script is gone."""
    run = Launched(cluster, shared, "cut", "--nodes=2", "--spares=1", "--time=30", "run.steps=1000000")
    first, _ = run.wait_for_attempt(1)
    [machine] = [machine for machine in cluster.machines if machine.name == first]
    machine.cut()
    deadline = time.monotonic() + ENDED_S
    while run.job["Restarts"] == "0":
        assert time.monotonic() < deadline, (run.job, run.log)
        time.sleep(0.2)
    machine.mend()
    assert len(run.wait_for_attempt(2)) == 2
    cluster.ask("scancel", run.number)
    cluster.wait_for_state(run.number, "CANCELLED", seconds=ENDED_S)


@pytest.mark.timeout(1500)
def test_a_job_gets_to_its_last_step_through_faults(cluster: Slurm, shared: Path) -> None:
    """A node without shared memory, the time limit, a node that crashes, a job that goes before. It is cancelled then,
    and launched again for its last steps, and ends bit for bit as a run that nobody interrupts."""
    cluster.wait_for_nodes(ENDED_S)  # of the jobs before
    machines = {machine.name: machine for machine in cluster.machines}
    machines["n1"].run("mount", "-o", "remount,size=64m", "/dev/shm")
    options = ["--nodes=2", "--spares=1", "--time=30"]
    rewards = f"rewards.functions=[{{function: {shared}/rewards.py:digit_shares}}]"
    run = Launched(cluster, shared, "soak", *options, rewards, "run.steps=1000000")
    assert run.wait_for_attempt(2) == ["n0", "n2"]  # the preflight has looked at n1
    assert "job: node n1: shared memory: 0.06 GiB free; enlarge it" in run.log

    hours, minutes, seconds = map(int, run.job["RunTime"].split(":"))
    limit = (3600 * hours + 60 * minutes + seconds + 45) // 60 + 1
    cluster.ask("scontrol", "update", f"JobId={run.number}", f"TimeLimit={limit}")  # the signal is due within a minute
    cluster.wait_for_state(run.number, "PENDING", seconds=ENDED_S)
    cluster.ask("scontrol", "update", f"JobId={run.number}", "TimeLimit=30")
    assert "job: goes back into the queue, without n1: told to end" in run.log
    saved = run.steps
    first, second = run.wait_for_attempt(3)
    assert (run.resumed, run.job["ExcNodeList"]) == ([saved], "n1")
    assert run.effective_shares and all(0 < share < 1 for share in run.effective_shares)

    machines[second].crash()
    run.wait_for_line(rf"^job: megarl: error: .*: node {second} is lost", seconds=60)
    again = run.wait_for_attempt(4)
    assert (run.job["Restarts"], again[0]) == ("1", first)  # in the same allocation
    assert second not in again
    assert run.resumed == [saved, saved]

    urgent = cluster.ask(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--output=/dev/null", "--wrap=sleep 1"
    ).strip()
    run.wait_for_attempt(5)
    assert (cluster.job(urgent)["JobState"], run.job["Restarts"]) == ("COMPLETED", "2")
    assert len(run.resumed) == 3 and run.resumed[2] > saved
    assert "% of" in run.log and "of allocation went into steps that lasted" in run.log

    machines["n1"].run("mount", "-o", "remount,size=4g", "/dev/shm")
    cluster.ask("scancel", run.number)
    cluster.wait_for_state(run.number, "CANCELLED", seconds=ENDED_S)
    saved = int((run.folder / "checkpoints/latest").read_text().strip().removeprefix("step_"))
    (shared / "slow").unlink()
    last = f"run.steps={saved + 3}"
    alone = on_one_machine(shared, "alone", *COMMON, rewards, last)
    run = Launched(cluster, shared, "soak", *options, rewards, last)
    cluster.wait_for_state(run.number, "COMPLETED", seconds=STARTED_S)
    assert run.log.splitlines()[-1] == "job: done"
    check_same(run.folder, alone)
    run.check_nothing_is_left()


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_job_gets_to_its_last_step_through_twenty_seeded_faults(cluster: Slurm, shared: Path) -> None:
    """A process of the run is killed on one of its nodes, at any time of a step, again and again: each time another
    attempt of the job goes on after the last checkpoint, two of them after the queue. It ends as a run that nobody
    interrupts."""
    cluster.wait_for_nodes(ENDED_S)  # of the jobs before
    (shared / "slow").touch()
    chance = random.Random(SEED)
    rewards = f"rewards.functions=[{{function: {shared}/rewards.py:digit_shares}}]"
    keys = [rewards, "checkpoint.every_steps=1", f"run.steps={STEPS_OF_SOAK}"]
    run = Launched(
        cluster, shared, "twenty", "--nodes=2", "--spares=1", "--time=60", "--restarts=9", "--stalled=5", *keys
    )
    machines = {machine.name: machine for machine in cluster.machines}
    faults = [chance.choice(VICTIMS) for _ in range(20)]
    for number, victim in enumerate(faults, 1):
        nodes = run.wait_for_attempt(number)
        time.sleep(chance.uniform(0, 2))
        there = [machines[n] for n in nodes if any(victim in line for line in machines[n].processes())]
        chance.choice(there).run("pkill", "--signal", "KILL", "--full", victim)
        print(f"fault {number}: {victim} on {nodes}, after {run.steps} steps", flush=True)
    (shared / "slow").unlink()
    cluster.wait_for_state(run.number, "COMPLETED", seconds=STARTED_S)
    assert run.log.splitlines()[-1] == "job: done"
    assert len(run.attempts) == 1 + len(faults) and set(VICTIMS) == set(faults)
    alone = on_one_machine(shared, "alone-twenty", *COMMON, *keys)
    check_same(run.folder, alone)
    run.check_nothing_is_left()


def test_a_job_without_a_spare_goes_on_with_fewer_replicas(cluster: Slurm, shared: Path) -> None:
    replicas = ("actor.layout={pp: 1, dp: 2}", "rollout.replicas=2", "checkpoint.every_steps=1", "run.steps=1000000")
    run = Launched(cluster, shared, "fewer", "--nodes=2", "--fewest-nodes=1", "--time=30", *replicas)
    first, second = run.wait_for_attempt(1)
    deadline = time.monotonic() + ENDED_S
    while not (run.folder / "checkpoints/latest").exists():
        assert time.monotonic() < deadline, run.log
        time.sleep(0.2)
    {machine.name: machine for machine in cluster.machines}[second].crash()
    assert run.wait_for_attempt(2) == [first]
    assert run.job["Restarts"] == "0"
    again = run.log[run.log.rindex(ATTEMPT) :]
    assert re.search(r"^0: run: .*, goes on after step \d+", again, re.MULTILINE), again
    ranks, before = ({log.name for log in run.folder.glob(f"logs/attempt_{i}/trainer-*.log")} for i in (2, 1))
    assert (len(before), len(ranks)) == (2, 1)
    cluster.ask("scancel", run.number)
    cluster.wait_for_state(run.number, "CANCELLED", seconds=ENDED_S)
