"""Aborted rollouts in environments: the engine stops their turns, and their environments close in real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from megarl.config.load import load
from megarl.core.completion import Completion, VersionRun
from megarl.core.sample import Sample
from megarl.rollout.engine import SamplingRequest, TurnRequest
from megarl.rollout.router import Aborted
from tests.children import Children, matching
from tests.paths import QUICKSTART
from tests.timing import LIMIT_S, POLL_S, WAIT_S
from tests.unit.cluster.groups.environment_actor import environment_actor, handle_of
from tests.unit.environments.test_runner import EOS_ID, TOKENIZER, prompt

AGENTS = Path(__file__).parents[2] / "environments" / "agents.py"
UNFINISHED = 2
"""Number of tokens that the engine has sampled in each turn that never finishes."""

WORLD = '''
import asyncio, pathlib, subprocess, time
from megarl.environments import Environment, Step

while pathlib.Path(__file__).with_name("hold the import").exists():
    time.sleep(0.01)

class World(Environment):
    """Has a child process. The first message of the task selects whether its step in the second turn is slow, so that
    it waits for the file "go on", or stuck."""

    def __init__(self, log):
        self._log = pathlib.Path(log)

    def _write(self, line):
        with self._log.open("a") as file:
            file.write(f"{self._mode} {line}\\n")

    async def reset(self, task):
        self._mode = task.messages[0]["content"]
        self._child = subprocess.Popen(["sleep", "600"])

    def step(self, turn):
        if turn.number == 1 and self._mode in ("slow", "stuck"):
            self._write("step begins")
            while self._mode == "stuck" or not self._log.with_name("go on").exists():
                time.sleep(0.01)
            self._write("step ends")
        return Step("go", 1.0, done=turn.number == 2)

    async def close(self):
        self._child.kill()
        self._child.wait()
        self._write("closed")
'''


class Engine:
    """An engine that finishes a turn at once, unless its context contains the marker of a rollout that it holds."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.is_lost = False
        self.pending: list[tuple[TurnRequest, asyncio.Future[Completion]]] = []
        self.handle = handle_of(self)

    def begin(self, request: TurnRequest) -> asyncio.Future[Completion]:
        completion = asyncio.get_running_loop().create_future()
        if request.sample_id in self.held:
            self.pending.append((request, completion))
        else:
            ids = [*TOKENIZER("1")["input_ids"], EOS_ID]
            completion.set_result(Completion(ids, [-1.0] * len(ids), (VersionRun(0, len(ids)),), "stop"))
        return completion

    def num_unfinished(self, sample_ids: Collection[str]) -> int:
        return sum(UNFINISHED for request, _ in self.pending if request.sample_id in sample_ids)


class Run:
    """An actor for one engine's rollouts."""

    def __init__(self, actor: Any, log: Path):
        self.actor, self.engine, self.log = actor, Engine(), log
        self.heard: list[str] = []
        begin = SimpleNamespace(remote=lambda samples, _: self.heard.extend(sample.id for sample in samples))
        self._listener = SimpleNamespace(begin=begin)

    def train(self, *modes: str, name: str = "1.0") -> asyncio.Task[list[list[Sample]] | Aborted | None]:
        requests = [SamplingRequest(f"{name}.{k}", prompt(mode), seed=k) for k, mode in enumerate(modes)]
        return asyncio.create_task(self.actor.train(requests, self.engine.handle, self._listener))

    @property
    def pool(self):
        return self.actor._training.pool

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(POLL_S)

    def end_slow_steps(self) -> None:
        self.log.with_name("go on").touch()


@pytest.fixture
def drive(tmp_path: Path):
    """`drive(test, settings, timeout_s)` runs an async test on a Run with these settings of the environment."""
    (tmp_path / "world.py").write_text(WORLD)
    log = tmp_path / "log"

    world = f"class: '{tmp_path / 'world.py'}:World', options: {{log: '{log}'}}"

    def run(test: Callable[[Run], Awaitable[None]], settings: str = world, timeout_s: float = WAIT_S) -> None:
        config = load(
            QUICKSTART,
            [
                f"environment={{{settings}, timeout_s: {timeout_s}}}",
                "rollout={max_new_tokens: 400, context_length: 500}",
                "rewards.functions=[]",
                "actor.tokens_per_microbatch=4096",
            ],
        )

        async def body() -> None:
            async with environment_actor(config) as actor:
                await test(Run(actor, log))

        asyncio.run(body())

    return run


@pytest.fixture
def grandchildren(children: Children) -> Callable[[], list[psutil.Process]]:
    """A function that returns the child processes of environments."""
    return lambda: matching(children(recursive=True), lambda process: process.name() == "sleep")


def test_abort_stops_turns_and_closes_environments(drive, grandchildren) -> None:
    """One rollout has finished, one is sampling its first turn, and one is in a step that cannot be interrupted."""

    async def test(run: Run) -> None:
        run.engine.held = {"1.0.1"}
        rollouts, other = run.train("fine", "held", "slow"), run.train("fine", name="2.0")
        await run.until(lambda: bool(run.engine.pending) and "slow step begins" in run.lines and "1.0.0" in run.heard)
        await run.actor.abort(["1.0.0", "unknown"])
        # Three turns of the first rollout and two of the last one have two tokens each.
        assert await rollouts == Aborted(5 * 2 + UNFINISHED)
        assert "slow step ends" not in run.lines, "the abort must not wait for the step"
        run.end_slow_steps()
        assert [completion.cancelled() for _, completion in run.engine.pending] == [True]
        await run.until(lambda: "slow closed" in run.lines and "held closed" in run.lines)
        lines = [line for line in run.lines if line.startswith("slow")]
        assert lines == ["slow step begins", "slow step ends", "slow closed"]
        assert [sample.id for [sample] in await other] == ["2.0.0"] and set(run.heard) == {"1.0.0", "2.0.0"}
        # Wait, because the environment logs "closed" before the actor is notified.
        await run.until(lambda: not run.actor._closing)
        assert not grandchildren() and [host.num_rollouts for host in run.pool._hosts] == [0]
        assert not run.actor._running

    drive(test)


def test_aborted_rollout_may_restart_while_it_closes(drive, grandchildren) -> None:
    async def test(run: Run) -> None:
        rollouts = run.train("slow")
        await run.until(lambda: "slow step begins" in run.lines)
        await run.actor.abort(["1.0.0"])
        assert isinstance(await rollouts, Aborted)
        [[sample]] = await run.train("fine")
        assert sample.episode.failure is None and sample.episode.info.num_turns == 3
        assert "slow closed" not in run.lines
        run.end_slow_steps()
        await run.until(lambda: "slow closed" in run.lines)
        assert run.lines.count("fine closed") == 1 and not grandchildren()

    drive(test)


def test_process_of_a_stuck_aborted_rollout_is_replaced(drive, grandchildren) -> None:
    async def test(run: Run) -> None:
        rollouts, [stuck] = run.train("stuck"), run.pool._hosts
        await run.until(lambda: "stuck step begins" in run.lines)
        await run.actor.abort(["1.0.0"])
        assert isinstance(await rollouts, Aborted)
        await run.until(lambda: not run.actor._closing)
        [[sample]] = await run.train("fine")
        assert sample.episode.failure is None and stuck.is_over and stuck not in run.pool._hosts
        assert not grandchildren()

    drive(test, timeout_s=LIMIT_S)


def test_abort_during_the_start_of_a_process_leaks_nothing(drive, children: Children) -> None:
    async def test(run: Run) -> None:
        [ended] = run.pool._hosts
        await ended.end()
        hold = run.log.with_name("hold the import")
        hold.touch()
        rollouts = run.train("fine")
        await run.until(lambda: bool(children()))
        await run.actor.abort(["1.0.0"])
        assert await rollouts == Aborted(0)
        hold.unlink()
        [[_]] = await run.train("fine")
        assert len(children()) == 1, "only the pool's process may be left"

    drive(test)


def test_abort_closes_the_sessions_of_agents(drive) -> None:
    async def test(run: Run) -> None:
        run.engine.held = {"1.0.0"}
        rollouts, server = run.train("fine", "hang"), run.actor._training._server
        await run.until(lambda: bool(run.engine.pending) and len(server._sessions) == 2)
        await run.actor.abort(["1.0.0"])
        aborted = await rollouts
        assert isinstance(aborted, Aborted) and aborted.num_tokens >= UNFINISHED
        assert [completion.cancelled() for _, completion in run.engine.pending] == [True]
        await run.until(lambda: not run.actor._closing)
        assert not server._sessions and [host.num_rollouts for host in run.pool._hosts] == [0]
        run.engine.held = set()
        [samples] = await run.train("fine")
        assert samples[-1].episode.failure is None

    drive(test, f"class: '{AGENTS}:Delegator'")


@pytest.mark.parametrize(
    ("is_aborted", "error"), [(False, RayActorError()), (True, RayActorError()), (False, OutOfMemoryError("killed"))]
)
def test_lost_engine_ends_the_wait_and_closes_environments(drive, grandchildren, is_aborted: bool, error) -> None:
    async def test(run: Run) -> None:
        run.engine.held = {"1.0.0"}
        rollouts = run.train("held", "slow")
        await run.until(lambda: bool(run.engine.pending) and "slow step begins" in run.lines)
        if is_aborted:
            await run.actor.abort(["1.0.0"])
        run.engine.is_lost = error
        result = await asyncio.wait_for(rollouts, WAIT_S)
        assert isinstance(result, Aborted) if is_aborted else result is None
        run.end_slow_steps()
        await run.until(lambda: not run.actor._closing)
        assert "slow closed" in run.lines and "held closed" in run.lines and not grandchildren()

    drive(test)
