"""A run that ends for any reason names the cause within seconds and leaves nothing behind.

tests/unit/cluster distinguishes the causes with fakes: in the session, the supervisor, and the watchdog over Ray's
processes. Three runs here use Megatron and vLLM's engines to check their processes, sockets and shared memory. The
others use fakes of both.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.run import Run, listening_sockets, mapped_shared_memory, write_recipe
from tests.timing import LIMIT_S, START_S, WAIT_S, wait_until

pytestmark = pytest.mark.slow
INTERRUPTED = "interrupted; stopping the run"
ONE_RANK = "actor.layout.pp=1"
"""Key for tests that do not kill a trainer."""
RAYS_DEFAULTS = {6379, 8076, 8265, 10001}
"""Default ports of Ray's GCS, object manager, dashboard and Ray Client server."""

UNUSED = ("monitor.py", "log_monitor.py", "dashboard.py")
"""Programs of Ray's services that runs do not use."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture
def hold(recipe: Path):
    """The file that blocks the rewards, and with them the first step, until the test removes it."""
    file = recipe.with_name("hold")
    file.touch()
    yield file
    file.unlink(missing_ok=True)


def check_end(run: Run, fault: Callable[[], None], code: int, cause: str) -> None:
    """Check that the fault ends the run in time with this exit code, only this cause on stderr, and no leftovers."""
    scratch, sockets = run.scratch(), run.sockets()
    assert scratch.exists()
    assert sockets
    fault()
    assert run.end() == code
    assert re.fullmatch(f"megarl: error: {cause}", "\n".join(run.errors)), run.errors
    assert not scratch.exists()
    assert not run.left_shared_memory()
    assert not run.left_files()
    # A process whose main thread has exited counts as ended, but its other threads may still hold the sockets.
    wait_until(lambda: not sockets & listening_sockets())


def test_ctrl_c(recipe: Path, tmp_path: Path, hold: Path) -> None:
    hold.unlink()
    with Run(recipe, tmp_path, ONE_RANK, vllm=True) as run:
        run.wait_for_step(2)
        hold.touch()  # pause the run, which leaves the CPU to the checks
        check_ray_requires_token(run)
        check_listens_only_on_loopback(run)
        check_no_default_ports(run)
        # A terminal sends SIGINT to every process of the foreground group.
        check_end(run, lambda: os.killpg(run.pid, signal.SIGINT), 130, INTERRUPTED)


def check_listens_only_on_loopback(run: Run) -> None:
    """Check that no process of a run on a single node accepts connections from other machines."""
    connections = {process: process.net_connections("inet") for process in run.processes()}
    addresses = {
        (process.cmdline()[0], connection.laddr.ip)
        for process, opened in connections.items()
        for connection in opened
        if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
    }
    assert len(addresses) > 3
    assert {address.removeprefix("::ffff:") for _, address in addresses} == {"127.0.0.1"}, addresses


def check_no_default_ports(run: Run) -> None:
    """Check that no port is one of Ray's defaults, which would conflict between concurrent runs."""
    listening = [c for p in run.processes() for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    ports = {socket.laddr.port for socket in listening}
    assert ports and not ports & RAYS_DEFAULTS
    programs = {Path(word).name for process in run.processes() for word in process.cmdline()[:4]}
    assert "raylet" in programs and not programs.intersection(UNUSED)


def check_ray_requires_token(run: Run) -> None:
    """Check that Ray rejects clients that can reach its port but lack the run's token."""
    [address] = [word.partition("=")[2] for word in run.find("raylet").cmdline() if word.startswith("--gcs-address=")]
    code = f"import ray; ray.init({address!r}, log_to_driver=False); print(ray.get(ray.remote(lambda: 'ran').remote()))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # keeps the client from replacing the loopback address
    client = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=WAIT_S
    )
    assert client.returncode != 0 and "ran" not in client.stdout
    assert "auth" in client.stderr.lower() or "token" in client.stderr.lower()


@pytest.mark.exhaustive
def test_sigterm_while_starting(recipe: Path, tmp_path: Path) -> None:
    with Run(recipe, tmp_path, megatron=False) as run:
        run.find("ray::TrainerActor")
        # Slurm sends SIGTERM to every process of a job.
        check_end(run, lambda: os.killpg(run.pid, signal.SIGTERM), 130, INTERRUPTED)


@pytest.mark.exhaustive
def test_lost_trainer_is_named(recipe: Path, tmp_path: Path) -> None:
    with Run(recipe, tmp_path, "cluster.replace_ranks=false", megatron=False) as run:
        run.wait_for_step(2)
        check_end(
            run,
            run.find("ray::TrainerActor").kill,
            1,
            r"\S.*: trainer-[01] died\. See .*/logs/attempt_1/trainer-[01].log",
        )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("hold")
def test_lost_engine_is_named_while_waiting_for_rewards(recipe: Path, tmp_path: Path) -> None:
    # With two ranks, vLLM itself creates processes and shared memory.
    with Run(recipe, tmp_path, "rollout.tp=2", vllm=True) as run:
        run.wait_until_held(recipe.parent)
        engine = run.find("ray::EngineActor")
        assert mapped_shared_memory(engine)
        check_listens_only_on_loopback(run)
        check_end(run, engine.kill, 1, r"rewards: engine-0 died\. See .*/logs/attempt_1/engine-0.log")


def lines_of_loss(run: Run) -> list[str]:
    loss = " died and is being restarted. Continuing with 1 of 2 engines. See "
    return [line for line in run.output.splitlines() if loss in line]


def check_samples(run: Run, steps: int) -> None:
    """Check that each step has 4 samples of each of 4 prompts exactly once."""
    for step in range(1, steps + 1):
        rows = [
            json.loads(line) for line in run.folder.joinpath(f"rollouts/step_{step:06}.jsonl").read_text().splitlines()
        ]
        assert sorted(row["sample_id"] for row in rows) == [f"{step}.{i}.{k}" for i in range(4) for k in range(4)]
        assert {run["version"] for row in rows for run in row["version"]} == {step - 1}


@pytest.mark.exhaustive
def test_run_continues_after_losing_an_engine(recipe: Path, tmp_path: Path, hold: Path) -> None:
    """The engine dies after sampling, so its samples are complete. The next refit notices the loss."""
    with Run(recipe, tmp_path, "rollout.replicas=2", megatron=False) as run:
        run.wait_until_held(recipe.parent)
        lost, left = run.named("engine-0"), run.named("engine-1")
        lost.kill()
        hold.unlink()
        run.wait_for_step(3)
        [line] = lines_of_loss(run)
        assert line.startswith("refit: engine-0 died and is being restarted. ")
        check_samples(run, 3)
        assert [step["engines/alive"] for step in run.metrics[:3]] == [1, 1, 1]
        check_end(run, left.kill, 1, r"\S.*: engine-1 died\. See .*/logs/attempt_1/engine-1.log")


@pytest.mark.exhaustive
def test_engine_lost_during_refit_is_restarted(recipe: Path, tmp_path: Path, hold: Path) -> None:
    """The other engine receives all weights. The lost one restarts, receives all weights, and samples again."""
    overrides = ("cluster.placement=disaggregated", "model.dtype=bfloat16")
    with Run(recipe, tmp_path, "rollout.replicas=2", *overrides, "rollout.verify_refit=always", megatron=False) as run:
        run.wait_until_held(recipe.parent)
        stopped = run.named("engine-1")
        stopped.suspend()
        hold.unlink()
        run.find("ray::TrainerActor.send")
        stopped.kill()
        run.wait_for_step(3)
        [line] = lines_of_loss(run)
        assert line.startswith("refit: engine-1 died and is being restarted. ")
        check_samples(run, 3)
        run.wait_until(lambda: [step["engines/alive"] for step in run.metrics[-3:]] == [2, 2, 2])
        joined = [step["engines/alive"] for step in run.metrics].index(2)
        check_samples(run, joined + 3)
        assert run.output.count("refit: engine-1 rejoined. Continuing with 2 of 2 engines") == 1


@pytest.mark.exhaustive
def test_run_continues_after_losing_a_sampling_engine(recipe: Path, tmp_path: Path, hold: Path) -> None:
    with Run(recipe, tmp_path, "rollout.replicas=2", megatron=False) as run:
        run.wait_until_held(recipe.parent)
        hold.unlink()
        run.wait_for_step(1)
        stopped = run.suspend("ray::EngineActor.generate")
        waiting = len(run.metrics)
        stopped.kill()
        run.wait_for_step(waiting + 2)
        assert len(lines_of_loss(run)) == 1
        check_samples(run, waiting + 2)


@pytest.mark.exhaustive
def test_losing_a_rank_loses_its_engine(recipe: Path, tmp_path: Path, hold: Path) -> None:
    """The engine's other rank and its actor exit when one rank is killed."""
    with Run(recipe, tmp_path, "rollout.replicas=2", "rollout.tp=2", vllm=True) as run:
        run.wait_until_held(recipe.parent)
        engine = run.named("engine-1")
        first, second = run.workers("engine-1", 2)
        second.kill()
        hold.unlink()
        run.wait_for_step(3)
        assert len(lines_of_loss(run)) == 1
        check_samples(run, 3)
        run.wait_until(lambda: not {engine, first}.intersection(run.processes()))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("hold")
def test_timeout_shows_stacks_of_the_awaited_process(recipe: Path, tmp_path: Path) -> None:
    with Run(recipe, tmp_path, ONE_RANK, f"cluster.timeouts.rewards={LIMIT_S}", megatron=False) as run:
        assert run.end(seconds=START_S + WAIT_S) == 1
    log = run.folder / "logs/attempt_1/rewards-0.log"
    [line] = run.errors
    cause = f"rewards: no response from rewards-0 within {LIMIT_S} s. Their stacks are at the end of {log}"
    cause += ". Fix: if they only need more time, raise cluster.timeouts.rewards"
    assert line == f"megarl: error: {cause}"
    assert "in digit_share" in log.read_text()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("hold")
def test_hanging_reward_is_named(recipe: Path, tmp_path: Path) -> None:
    with Run(recipe, tmp_path, ONE_RANK, f"rewards.timeout_s={LIMIT_S}", megatron=False) as run:
        assert run.end(seconds=START_S + WAIT_S) == 2
    [line] = run.errors
    cause = rf"rewards.functions: \w+ did not return within rewards.timeout_s={LIMIT_S} on sample 1\.\S+"
    cause += r" \(\d+ of \d+"
    assert re.match(f"megarl: error: {cause} samples failed, but rewards.failure_limit=0 allows only 0", line)
    assert "in digit_share" in (run.folder / "logs/attempt_1/rewards-0.log").read_text()


@pytest.mark.exhaustive
def test_lost_raylet_is_named(recipe: Path, tmp_path: Path) -> None:
    with Run(recipe, tmp_path, ONE_RANK, megatron=False) as run:
        run.find("ray::TrainerActor")
        check_end(run, run.find("raylet").kill, 1, r"\S.*: Ray's raylet died; stopping the run")


@pytest.mark.exhaustive
def test_lost_driver_is_named(recipe: Path, tmp_path: Path) -> None:
    with Run(recipe, tmp_path, ONE_RANK, megatron=False) as run:
        run.find("ray::TrainerActor")
        check_end(run, run.driver.kill, 1, r"the driver process \d+ was killed by SIGKILL; stopping the run")


@pytest.mark.exhaustive
def test_run_ends_with_its_parent(recipe: Path, tmp_path: Path) -> None:
    with Run(recipe, tmp_path, ONE_RANK, megatron=False) as run:
        run.wait_for_step(2)
        check_end(run, lambda: os.kill(run.pid, signal.SIGKILL), -signal.SIGKILL, INTERRUPTED)
