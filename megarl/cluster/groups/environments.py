"""The processes that make rollouts in environments: one beside each engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from megarl.cluster.groups.engines import EngineGroup, RemoteSample
from megarl.cluster.groups.group import Answer, Group, ProcessActor
from megarl.cluster.pending import Answers, Pending
from megarl.cluster.placement import Process
from megarl.cluster.session import Session
from megarl.config.schema import Config
from megarl.core.types import Completion
from megarl.data.tokenizer import load_tokenizer
from megarl.environments.hosts import HostPool, host_arguments
from megarl.environments.runner import RolloutRequest, RolloutRunner
from megarl.rollout.engine import SamplingRequest, TurnRequest
from megarl.rollout.turns import RemoteTurns


@ray.remote(num_cpus=0, max_restarts=0)
class EnvironmentActor(ProcessActor):
    """A process that makes rollouts, many at once in one event loop. Its environments are in processes of its own."""

    def __init__(self, process: Process, logs: Path):
        super().__init__(process, logs)
        self._turns: dict[ActorHandle, RemoteTurns] = {}

    async def start(self, config: Config, model_folder: Path) -> Answer:
        begin = time.time()
        pool = await HostPool.start(host_arguments(config), self._process.threads)
        self._worker = RolloutRunner(config, load_tokenizer(model_folder), pool)
        await self._worker.start("127.0.0.1" if config.cluster.nodes == 1 else ray.util.get_node_ip_address())
        return Answer(None, begin, time.time())

    async def generate(self, requests: Sequence[RolloutRequest], engine: ActorHandle, listener: ActorHandle) -> Answer:
        """Makes rollouts with this engine. Returns the samples of each, or None if the engine was lost. The listener
        gets them as they come."""
        begin = time.time()
        turns = self._turns_in(engine)

        async def sample(
            token_ids: Sequence[int], max_new_tokens: int, seed: int, greedy: bool, stop: Sequence[str] = ()
        ) -> Completion:
            request = TurnRequest(np.asarray(token_ids, np.int32), max_new_tokens, seed, greedy, tuple(stop))
            return await turns.sample(request)

        async def rollout(request: RolloutRequest) -> list[RemoteSample]:
            samples = await self._worker.run(request, sample)
            listener.begin.remote(samples)
            return [RemoteSample.put(item) for item in samples]

        tasks = [asyncio.create_task(rollout(request)) for request in requests]
        try:
            return Answer(await asyncio.gather(*tasks), begin, time.time())
        except RayActorError:
            return Answer(None, begin, time.time())
        finally:
            for task in tasks:  # those that go on without one that has raised
                task.cancel()

    def _turns_in(self, engine: ActorHandle) -> RemoteTurns:
        """Returns this process's turns in an engine, which outlive a call: an agent that has ended may leave some."""
        if engine not in self._turns:
            self._turns[engine] = RemoteTurns(partial(engine.exchange.remote, self._process.name))
        return self._turns[engine]


class EnvironmentGroup(Group[RolloutRunner]):
    """The processes that make rollouts, each with the engine of its number. Groups of rollouts are dealt out as those
    of single responses are, so that they share a prefix cache."""

    def __init__(
        self,
        session: Session,
        config: Config,
        model_folder: Path,
        processes: Sequence[Process],
        engines: EngineGroup,
    ):
        super().__init__(
            session,
            "EnvironmentActor",
            {p.name: session.on_node(EnvironmentActor, p).remote(p, session.logs) for p in processes},
        )
        session.watch(self._actors)
        self._config, self._model_folder, self._engines = config, model_folder, engines

    def start(self) -> Pending[list[None]]:
        calls = {name: actor.start.remote(self._config, self._model_folder) for name, actor in self._actors.items()}
        return self._read("environments: start", "start", "start", calls)

    def generate(
        self, groups: Sequence[Sequence[SamplingRequest]], listener: ActorHandle
    ) -> Pending[list[list[RemoteSample]]]:
        """Makes the rollouts of each prompt. The result has their samples by prompt, those of a rollout together.
        Rollouts of an engine that is lost meanwhile are made anew by the others. listener: an actor whose method
        `begin` gets the samples of each rollout as soon as it is over."""
        return self._generate(groups, listener, {})

    def _generate(
        self,
        groups: Sequence[Sequence[SamplingRequest]],
        listener: ActorHandle,
        done: dict[int, list[RemoteSample]],
    ) -> Pending[list[list[RemoteSample]]]:
        left = [i for i in range(len(groups)) if i not in done]
        pairs = list(zip(self._engines.actors.items(), self._actors.items(), strict=False))
        dealt = {name: part for k, (_, (name, _)) in enumerate(pairs) if (part := left[k :: len(pairs)])}
        calls = {}
        for (_, engine), (name, actor) in pairs:
            if name in dealt:
                requests = [_rollout_request(request) for i in dealt[name] for request in groups[i]]
                calls[name] = actor.generate.options(name=f"{self._title}.generate").remote(requests, engine, listener)
        engine_of = {name: engine for (engine, _), (name, _) in pairs}

        def collect(answers: Answers) -> list[list[RemoteSample]] | Pending[list[list[RemoteSample]]]:
            values = self._session.trace.add("generate", answers)
            for name, rollouts in values.items():
                if rollouts is None:
                    continue
                made = iter(rollouts)
                for i in dealt[name]:
                    done[i] = [sample for _ in groups[i] for sample in next(made)]
            lost = [engine_of[name] for name, rollouts in values.items() if rollouts is None]
            if not lost:
                return [done[i] for i in range(len(groups))]
            self._engines.drop(lost, "rollout")
            return self._generate(groups, listener, done)

        return self._session.submit(calls, "rollout", "rollout").then(collect)


def _rollout_request(request: SamplingRequest) -> RolloutRequest:
    return RolloutRequest(request.sample_id, request.prompt, request.seed, request.group_seed, request.greedy)
