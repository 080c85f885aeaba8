"""A program that runs environments of the verifiers library, for a `VerifiersAgent`, whose endpoint is their policy.

It is run by the Python that verifiers is installed for, and imports nothing of megarl. It first says in a line of JSON
how many tasks there are, then reads requests from stdin, a line of JSON each, and answers each with such a line. When
stdin ends, it ends all that it has started.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import verifiers.v1 as vf

ROLLOUTS_EACH = 64
"""The rollouts after which an environment's servers are replaced: they keep a client for every key that they saw."""

GRACE_S = 10.0
"""The time that rollouts have to end what they have started, when this program is to end."""


class Serving:
    """An environment with its servers."""

    def __init__(self, config: vf.EnvConfig):
        import verifiers.v1 as vf

        self.env = vf.load_environment(config)
        self.num_left, self.num_running = ROLLOUTS_EACH, 0
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
    """The rollouts under way."""

    def __init__(self, env: Mapping[str, Any], num_tasks: int | None):
        import verifiers.v1 as vf

        self._config = vf.resolve_env_config(dict(env))
        taskset = vf.load_environment(self._config).taskset
        if num_tasks is not None:
            taskset = taskset.take(num_tasks)
        if not taskset.bounded:
            raise ValueError(
                "the taskset has no end; say how many of its tasks are used: environment.options.num_tasks"
            )
        self.tasks = list(taskset)
        self._serving: Serving | None = None
        self._under_way: dict[int, asyncio.Task[None]] = {}

    def start(self, request: Mapping[str, Any], answers: TextIO) -> None:
        number = request["id"]
        if request["do"] == "cancel":
            if number in self._under_way:
                self._under_way[number].cancel()
            return

        async def answer() -> None:
            try:
                said = {"rewards": await self._play(request)}
            except Exception as error:
                said = {"failure": f"{type(error).__name__}: {error}"}
            write(answers, {"id": number, **said})

        self._under_way[number] = asyncio.create_task(answer())
        self._under_way[number].add_done_callback(lambda _: self._under_way.pop(number))

    async def _play(self, request: Mapping[str, Any]) -> dict[str, float]:
        """Return the rewards of an episode, by name: where several agents are trained, their means."""
        import verifiers.v1 as vf

        index = request["index"]
        if index is None:
            index = random.Random(request["seed"]).randrange(len(self.tasks))
        key = f"MEGARL_SESSION_{request['id']}"  # verifiers reads keys from the environment
        os.environ[key] = request["api_key"]
        client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=key)
        serving = self._take_serving()
        try:
            await asyncio.shield(serving.is_up)
            episode = await serving.env.run_episode(
                self.tasks[index], vf.ModelContext(model=request["model"], client=client)
            )
        finally:
            del os.environ[key]
            self._give_back(serving)
        return self._rewards(episode)

    def _rewards(self, episode: vf.Episode) -> dict[str, float]:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            shown = "; ".join(f"{error.type}: {error.message}" for error in errors)
            raise RuntimeError(f"the episode failed: {shown or 'it has no reward'}")
        for trace in episode.traces:
            if not trace.agent.trainable and getattr(self._config, trace.agent.name).client is None:
                raise RuntimeError(
                    f"the agent {trace.agent.name} is not to be trained, but samples from the policy; give it a model "
                    f"of its own: environment.options.env.{trace.agent.name}.client and .model"
                )
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        found: dict[str, list[float]] = {}
        for trace in trained:
            for name, reward in trace.rewards.items():
                if reward is not None:
                    found.setdefault(name, []).append(reward.value)
        return {name: sum(values) / len(trained) for name, values in found.items()}

    def _take_serving(self) -> Serving:
        if self._serving is None or self._serving.num_left == 0 or self._serving.task.done():
            self._serving = Serving(self._config)
        self._serving.num_left -= 1
        self._serving.num_running += 1
        return self._serving

    def _give_back(self, serving: Serving) -> None:
        serving.num_running -= 1
        if serving.num_left == 0 and serving.num_running == 0:
            serving.end()

    async def close(self) -> None:
        under_way = list(self._under_way.values())
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        if self._serving is not None:
            self._serving.end()
            await asyncio.gather(self._serving.task, return_exceptions=True)


def write(answers: TextIO, line: Mapping[str, Any]) -> None:
    answers.write(json.dumps(line) + "\n")
    answers.flush()


async def serve(rollouts: Rollouts, answers: TextIO) -> None:
    """Answer requests until stdin ends."""
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(rollouts.start, json.loads(line), answers)
        loop.call_soon_threadsafe(is_over.set)
        time.sleep(GRACE_S)
        for process in reversed(list(descendants(os.getpid()))):
            os.kill(process, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    await is_over.wait()
    await rollouts.close()


def descendants(process: int) -> Iterator[int]:
    """Return the processes that a process and its threads have started, and that these have started."""
    try:
        threads = os.listdir(f"/proc/{process}/task")
    except FileNotFoundError:  # it has ended meanwhile
        return
    for thread in threads:
        with open(f"/proc/{process}/task/{thread}/children") as file:
            for child in map(int, file.read().split()):
                yield child
                yield from descendants(child)


def main(env: Mapping[str, Any], num_tasks: int | None) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what environments print is no answer

    async def run() -> None:
        try:
            rollouts = Rollouts(env, num_tasks)
        except Exception as error:  # the user's code, and a config that verifiers refuses
            write(answers, {"refused": f"{type(error).__name__}: {error}"})
            return
        write(answers, {"num_tasks": len(rollouts.tasks)})
        await serve(rollouts, answers)

    asyncio.run(run())


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
