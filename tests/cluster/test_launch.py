"""Jobs of a real Slurm cluster: rejected options, failures, and sweeps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.jobs import Launched, launch
from tests.cluster.slurm import Slurm
from tests.timing import ASK_S, RUN_S, WAIT_S


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--partition=gpu"], "--partition=gpu: unknown partition. Fix: use one of main, urgent"),
        (
            ["--partition=main", "--spares=4"],
            (
                "--partition=main: the partition has 5 nodes, but the job needs --nodes=2 + --spares=4. Fix: lower "
                "--nodes or --spares"
            ),
        ),
        (["--option=--qos=high", "--option=--mem=999T"], "sbatch: "),
    ],
)
def test_unavailable_resources_are_rejected_before_queueing(
    cluster: Slurm, shared: Path, options: list[str], message: str
) -> None:
    done = launch(cluster, shared, "refused", "--nodes=2", "--time=10", *options)
    assert done.returncode == 2
    assert done.stderr.startswith(f"megarl: error: {message}"), done.stderr
    assert not cluster.ask("squeue", "--noheader")


def test_user_error_is_the_last_line_and_not_retried(cluster: Slurm, shared: Path) -> None:
    """A later launch may reuse the name, because the failed run completed no step."""
    options = ["--nodes=2", "--time=10", "run.steps=2"]
    wrong = f"rewards.functions=[{{function: {shared}/rewards.py:nothing}}]"
    run = Launched(cluster, shared, "wrong", *options, wrong)
    again = launch(cluster, shared, "wrong", *options)
    assert again.returncode == 2 and f"job {run.number} of this run is " in again.stderr
    job = cluster.wait_for_state(run.number, "FAILED", seconds=RUN_S)
    assert (job["ExitCode"], job["Restarts"], run.attempts) == ("2:0", "0", ["n0 n1"])
    assert run.log.splitlines()[-1].startswith("job: megarl: error: rewards.functions")
    run.check_nothing_is_left()
    run = Launched(cluster, shared, "wrong", *options)
    cluster.wait_for_state(run.number, "COMPLETED", seconds=RUN_S)
    run.check_nothing_is_left()


def test_job_without_progress_fails_with_the_cause(cluster: Slurm, shared: Path) -> None:
    """Two attempts on one node fail at their first step because of the rollout timeout. The third does not start."""
    options = ["--nodes=1", "--time=10", "--stalled=2", "--restarts=5"]
    run = Launched(cluster, shared, "stalled", *options, "actor.layout.pp=1", "cluster.timeouts.rollout=0.01")
    job = cluster.wait_for_state(run.number, "FAILED", seconds=RUN_S)
    assert (job["ExitCode"], job["Restarts"], len(run.attempts)) == ("3:0", "0", 3)
    last = run.log.splitlines()[-1]
    assert last.startswith("job: 2 attempts saved no checkpoint after step 0. Last cause: megarl: error: ")
    assert "rollout: no response from engine-0 within 0.01 s" in last
    run.check_nothing_is_left()


@pytest.mark.exhaustive
def test_unavailable_judge_is_an_infrastructure_failure(cluster: Slurm, shared: Path) -> None:
    """Two attempts fail at their first step; the second starts a minute after the first. A third would not make
    progress either."""
    judge = "{function: generative_judge, options: {base_url: http://127.0.0.1:9/v1, model: m, retries: 0}}"
    keys = ["actor.layout.pp=1", f"rewards.functions=[{judge}]", "rewards.outage_s=1"]
    run = Launched(cluster, shared, "away", "--nodes=1", "--time=10", "--stalled=2", "--restarts=5", *keys)
    job = cluster.wait_for_state(run.number, "FAILED", seconds=RUN_S)
    assert (job["ExitCode"], job["Restarts"], len(run.attempts)) == ("3:0", "0", 3)
    last = run.log.splitlines()[-1]
    assert last.startswith("job: 2 attempts saved no checkpoint after step 0. Last cause: megarl: error: ")
    assert "127.0.0.1:9/v1/chat/completions could not be reached" in last and "rewards.outage_s=1" in last
    run.check_nothing_is_left()


def test_runs_of_a_sweep_are_requeued_individually(cluster: Slurm, shared: Path) -> None:
    keys = ("actor.layout.pp=1", "--sweep=run.seed=0,1", "--nodes=1", "--time=30", "run.steps=1000000")
    done = launch(cluster, shared, "sweep", *keys)
    assert done.returncode == 0, done.stderr
    base = (shared / "runs/sweep/launch/submitted").read_text().strip()
    metrics = [shared / f"runs/sweep-{point}/metrics.jsonl" for point in (0, 1)]
    deadline = time.monotonic() + RUN_S
    while not all(file.exists() for file in metrics):
        assert time.monotonic() < deadline, cluster.ask("squeue")
        time.sleep(ASK_S)
    tasks = [f"{base}_{point}" for point in (0, 1)]
    cluster.ask("scancel", "--batch", "--signal=USR1", tasks[1])
    cluster.wait_for_state(tasks[1], "PENDING", seconds=WAIT_S)
    assert [cluster.job(task)["Restarts"] for task in tasks] == ["0", "1"]
    assert cluster.job(tasks[0])["JobState"] == "RUNNING"
    cluster.ask("scancel", base)
    for task in tasks:
        cluster.wait_for_state(task, "CANCELLED", seconds=WAIT_S)
