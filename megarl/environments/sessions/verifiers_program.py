"""The program that runs verifiers environments for `VerifiersAgent`, with the session endpoint as their model.

It runs in verifiers' Python environment and does not import megarl. Its last command-line argument is the file
descriptor of its connection. From there it reads its arguments and then requests, one JSON line each. It sends the
number of tasks, and one JSON line per request. Once the connection closes, it stops all processes that it has started.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from io import BufferedRWPair
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]  # in its own environment

ROLLOUTS_PER_SERVING = 64
"""Number of rollouts after which an environment's servers are restarted, because they keep a client for each API
key."""

GRACE_S = 10.0
"""Seconds that rollouts have to stop their processes at shutdown."""


class Serving:
    """An environment and its servers."""

    def __init__(self, env: vf.Environment):
        self.env = env
        self.num_left, self.num_running = ROLLOUTS_PER_SERVING, 0
        self.is_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_over = asyncio.Event()
        self.task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            async with self.env.serving():
                self.is_up.set_result(None)
                await self._is_over.wait()
        except Exception as error:
            if self.is_up.done():
                raise
            self.is_up.set_exception(error)

    def end(self) -> None:
        self._is_over.set()


class Rollouts:
    """The running rollouts and the environment that they use."""

    def __init__(self, env: Mapping[str, Any], num_tasks: int | None):
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]  # in its own environment

        self._vf, self._config = vf, vf.resolve_env_config(dict(env))
        taskset = vf.load_environment(self._config).taskset
        if num_tasks is not None:
            taskset = taskset.take(num_tasks)
        if not taskset.bounded:
            raise ValueError("the taskset is infinite. Fix: set num_tasks in environment.options")
        self.tasks = list(taskset)
        self._serving: Serving | None = None
        self._pending: dict[int, asyncio.Task[None]] = {}

    def start(self, request: Mapping[str, Any], connection: BufferedRWPair) -> None:
        number = request["rollout"]
        if request["method"] == "cancel":
            if number in self._pending:
                self._pending[number].cancel()
            return

        async def respond() -> None:
            try:
                result = {"rewards": await self._run(request)}
            except Exception as error:
                result = {"failure": f"{type(error).__name__}: {error}"}
            send(connection, {"id": request["id"], **result})

        self._pending[number] = asyncio.create_task(respond())
        self._pending[number].add_done_callback(lambda _: self._pending.pop(number))

    async def _run(self, request: Mapping[str, Any]) -> dict[str, float]:
        """Run an episode and return its rewards, keyed by name and averaged over the trained agents."""
        vf, index = self._vf, request["index"]
        if index is None:
            index = random.Random(request["seed"]).randrange(len(self.tasks))
        key = f"MEGARL_SESSION_{request['rollout']}"  # verifiers reads API keys from environment variables
        os.environ[key] = request["api_key"]
        client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=key)
        serving = self._acquire_serving()
        try:
            await asyncio.shield(serving.is_up)
            episode = await serving.env.run_episode(
                self.tasks[index], vf.ModelContext(model=request["model"], client=client)
            )
        finally:
            del os.environ[key]
            self._release_serving(serving)
        return self._rewards(episode)

    def _rewards(self, episode: vf.Episode) -> dict[str, float]:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
            raise RuntimeError(f"the episode failed: {reasons or 'it has no reward'}")
        for trace in episode.traces:
            if not trace.agent.trainable and getattr(self._config, trace.agent.name).client is None:
                raise RuntimeError(
                    f"the agent {trace.agent.name} is not trainable, but samples from the policy. Fix: set another "
                    f"model for it with environment.options.env.{trace.agent.name}.client and .model"
                )
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        rewards: dict[str, list[float]] = {}
        for trace in trained:
            for name, reward in trace.rewards.items():
                if reward is not None:
                    rewards.setdefault(name, []).append(reward.value)
        return {name: sum(values) / len(trained) for name, values in rewards.items()}

    def _acquire_serving(self) -> Serving:
        if self._serving is None or self._serving.num_left == 0 or self._serving.task.done():
            self._serving = Serving(self._vf.load_environment(self._config))
        self._serving.num_left -= 1
        self._serving.num_running += 1
        return self._serving

    def _release_serving(self, serving: Serving) -> None:
        serving.num_running -= 1
        if serving.num_left == 0 and serving.num_running == 0:
            serving.end()

    async def close(self) -> None:
        pending = list(self._pending.values())
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if self._serving is not None:
            self._serving.end()
            await asyncio.gather(self._serving.task, return_exceptions=True)


def send(connection: BufferedRWPair, message: Mapping[str, Any]) -> None:
    connection.write(json.dumps(message).encode() + b"\n")
    connection.flush()


async def serve(rollouts: Rollouts, connection: BufferedRWPair) -> None:
    """Serve requests until the connection closes."""
    loop, is_closed = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        for line in connection:
            loop.call_soon_threadsafe(rollouts.start, json.loads(line), connection)
        loop.call_soon_threadsafe(is_closed.set)
        time.sleep(GRACE_S)
        for process in reversed(list(descendants(os.getpid()))):
            os.kill(process, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    await is_closed.wait()
    await rollouts.close()


def descendants(process: int) -> Iterator[int]:
    """Yield the ids of all descendants of a process."""
    try:
        threads = os.listdir(f"/proc/{process}/task")
    except FileNotFoundError:  # the process has exited
        return
    for thread in threads:
        with open(f"/proc/{process}/task/{thread}/children") as file:
            for child in map(int, file.read().split()):
                yield child
                yield from descendants(child)


def main(connection: BufferedRWPair, env: Mapping[str, Any], num_tasks: int | None) -> None:
    async def run() -> None:
        try:
            rollouts = Rollouts(env, num_tasks)
        except Exception as error:  # user code may raise anything, and verifiers may reject the config
            send(connection, {"refused": f"{type(error).__name__}: {error}"})
            return
        send(connection, {"num_tasks": len(rollouts.tasks)})
        await serve(rollouts, connection)

    asyncio.run(run())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[-1])) as end:
        os.set_inheritable(end.fileno(), False)
        connection = end.makefile("rwb")
    main(connection, **json.loads(connection.readline()))
