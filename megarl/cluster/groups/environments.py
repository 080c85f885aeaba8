"""The processes that run rollouts in environments, one per engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from megarl.cluster.groups.engines import Answered, EngineGroup, Requests, Sampled
from megarl.cluster.groups.group import CALLS_AT_ONCE, AsyncProcessActor, WorkerGroup
from megarl.cluster.groups.remote import RemoteCall, remote
from megarl.cluster.pending import Answers, Pending
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import put_sample
from megarl.cluster.session import Session
from megarl.config.schema import Config
from megarl.core.types import Completion, Sample, SampleRef
from megarl.environments.hosts import HostPool, host_arguments
from megarl.environments.runner import RolloutRequest, RolloutRunner
from megarl.models.tokenizer import load_tokenizer
from megarl.rollout.engine import SamplingRequest, TurnRequest
from megarl.rollout.router import Aborted
from megarl.rollout.turns import TICK_S, RemoteTurns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")
A = TypeVar("A")

Complete = Callable[[TurnRequest], Awaitable[Completion]]
"""A function that samples the tokens of one turn on an engine."""


class EnvironmentWorker:
    """Runs many rollouts concurrently in one event loop, with the environments in separate processes. The processes for
    training last for the whole run. An evaluation set has its own processes for one evaluation, so every evaluation
    starts from the same state and does not affect the training environments."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, num_processes: int, address: str):
        """
        Args:
            num_processes: number of environment processes.
            address: this machine's address, at which agents reach the policy.
        """
        self._config, self._tokenizer = config, tokenizer
        self._num_processes, self._address = num_processes, address
        self._training: RolloutRunner | None = None

    async def start(self) -> None:
        """Start the training environments, if any."""
        if self._config.has_environment:
            self._training = await self._start_runner(self._config)

    async def close(self) -> None:
        """Stop the training environments. Without this call, they stop when this process ends."""
        if self._training is not None:
            await self._training.close()

    async def train(
        self, requests: Sequence[SamplingRequest], complete: Complete, on_finished: Callable[[list[Sample]], T]
    ) -> list[T]:
        """Run rollouts. Call `on_finished` with each rollout's samples as soon as the rollout finishes, and return the
        results of these calls."""
        assert self._training is not None, "the run has an environment"
        return await _run_all(self._training, requests, complete, on_finished, len(requests))

    async def evaluate(
        self,
        set_config: Config,
        requests: Sequence[SamplingRequest],
        complete: Complete,
        on_finished: Callable[[list[Sample]], T],
    ) -> list[T]:
        """Run the rollouts for an evaluation set with this config, like `train`. The number of concurrent rollouts is
        at most that of a training step, for which the machine has enough memory."""
        runner = await self._start_runner(set_config)
        try:
            return await _run_all(runner, requests, complete, on_finished, _rollouts_per_engine(self._config))
        finally:
            await runner.close()

    async def _start_runner(self, config: Config) -> RolloutRunner:
        pool = await HostPool.start(host_arguments(config), self._num_processes)
        runner = RolloutRunner(config, self._tokenizer, pool)
        await runner.start(self._address)
        return runner


async def _run_all(
    runner: RolloutRunner,
    requests: Sequence[SamplingRequest],
    complete: Complete,
    on_finished: Callable[[list[Sample]], T],
    max_concurrent: int,
) -> list[T]:
    slots = asyncio.Semaphore(max(1, max_concurrent))

    async def run(request: SamplingRequest) -> T:
        async def sample(
            token_ids: Sequence[int], max_new_tokens: int, seed: int, stop: Sequence[str] = ()
        ) -> Completion:
            return await complete(request.turn(token_ids, max_new_tokens, seed, stop))

        rollout = RolloutRequest(request.sample_id, request.prompt, request.seed, request.group_seed)
        async with slots:
            return on_finished(await runner.run(rollout, sample))

    tasks = [asyncio.create_task(run(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    except asyncio.CancelledError:  # aborted, as are the tasks, which must not be cancelled again while they close
        await asyncio.wait(tasks)
        raise
    finally:
        for task in tasks:  # no effect unless a task has raised
            task.cancel()


def _rollouts_per_engine(config: Config) -> int:
    """Return the number of rollouts per engine in a training step."""
    return -(-config.batch.prompts_per_step * config.batch.samples_per_prompt // config.rollout.replicas)


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=CALLS_AT_ONCE)
class EnvironmentActor(AsyncProcessActor):
    """A process that runs rollouts with an EnvironmentWorker."""

    def __init__(self, process: Process, logs: Path):
        super().__init__(process, logs)
        self._turns: dict[ActorHandle, RemoteTurns] = {}
        self._waiting: dict[str, asyncio.Future[list[list[SampleRef]]]] = {}
        """Running calls, by the name of the first rollout."""
        self._closing: set[asyncio.Task[list[list[SampleRef]]]] = set()
        """Aborted calls whose environments are closing."""

    async def start(self, config: Config, model_folder: Path) -> None:
        address = "127.0.0.1" if config.cluster.nodes == 1 else ray.util.get_node_ip_address()
        self._worker = EnvironmentWorker(config, load_tokenizer(model_folder), self._process.threads, address)
        await self._worker.start()

    async def train(
        self, requests: Sequence[SamplingRequest], engine: ActorHandle, listener: ActorHandle
    ) -> list[list[SampleRef]] | Aborted | None:
        """Run rollouts on this engine. Return the samples for each rollout, Aborted, or None if the engine was lost.
        The listener receives each rollout's samples as soon as the rollout finishes."""

        def on_finished(samples: list[Sample]) -> list[SampleRef]:
            listener.begin.remote(samples)
            return _put(samples)

        turns = self._turns_in(engine)
        return await self._run(requests, self._worker.train(requests, turns.sample, on_finished), turns)

    async def evaluate(
        self, requests: Sequence[SamplingRequest], engine: ActorHandle, set_config: Config
    ) -> list[list[SampleRef]] | Aborted | None:
        """Run the rollouts for an evaluation set with this config. The return value is the same as for `train`."""
        turns = self._turns_in(engine)
        return await self._run(requests, self._worker.evaluate(set_config, requests, turns.sample, _put), turns)

    async def abort(self, names: Collection[str]) -> None:
        """Abort the running calls of `train` whose first rollouts have these names."""
        for name in self._waiting.keys() & set(names):
            self._waiting[name].cancel()

    async def _run(
        self,
        requests: Sequence[SamplingRequest],
        rollouts: Coroutine[Any, Any, list[list[SampleRef]]],
        turns: RemoteTurns,
    ) -> list[list[SampleRef]] | Aborted | None:
        names = [request.sample_id for request in requests]
        task = asyncio.create_task(rollouts)
        waiting = self._waiting[names[0]] = asyncio.shield(task)
        try:
            samples = await waiting
            await turns.finish(names)
            return samples
        except asyncio.CancelledError:
            task.cancel()
            # The environments close in the background. The prompt need not wait for them before it restarts.
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            await asyncio.sleep(TICK_S)  # agents may still send requests until their sessions close
            return Aborted(await turns.finish(names))
        except RayActorError:
            return None
        finally:
            del self._waiting[names[0]]

    def _turns_in(self, engine: ActorHandle) -> RemoteTurns:
        """Return the RemoteTurns for this engine. It is reused across calls, because an agent that exits may leave
        turns unfinished."""
        if engine not in self._turns:
            self._turns[engine] = RemoteTurns(partial(engine.exchange.remote, self._process.name))
        return self._turns[engine]


def _put(samples: Sequence[Sample]) -> list[SampleRef]:
    return list(map(put_sample, samples))


class EnvironmentGroup(WorkerGroup):
    """The processes that run rollouts in environments, one beside each engine. The engines' router places the
    rollouts."""

    title = "EnvironmentActor"

    def __init__(
        self,
        session: Session,
        config: Config,
        model_folder: Path,
        processes: Sequence[Process],
        engines: EngineGroup,
    ):
        actors = {p.name: session.on_node(EnvironmentActor, p).remote(p, session.logs) for p in processes}
        super().__init__(session, "environments", actors)
        session.watch(self._actors)
        self._config, self._model_folder, self._engines = config, model_folder, engines
        self._process_of = dict(zip(engines.router.engines, actors, strict=True))
        """Name of the process beside each engine."""

    @remote(timeout="start")
    def _start(self, config: Config, model_folder: Path) -> None: ...

    @remote(timeout="rollout", phase="rollout")
    def _train(
        self, requests: Sequence[SamplingRequest], engine: ActorHandle, listener: ActorHandle
    ) -> list[list[SampleRef]] | Aborted | None: ...

    @remote(timeout="rollout", phase="rollout")
    def _evaluate(
        self, requests: Sequence[SamplingRequest], engine: ActorHandle, set_config: Config
    ) -> list[list[SampleRef]] | Aborted | None: ...

    def start(self) -> Pending[list[None]]:
        return self._start(self._config, self._model_folder)

    def generate(self, groups: Requests, listener: ActorHandle) -> Pending[list[Sampled]]:
        """Run the rollouts for each prompt. The result has their samples by prompt. If an engine is lost in the
        meantime, its rollouts restart on the remaining engines.

        Args:
            listener: an actor whose method `begin` receives each rollout's samples as soon as the rollout finishes.
        """
        return self._generate(groups, self._train, listener)

    def evaluate(self, groups: Requests, set_config: Config) -> Pending[list[Sampled]]:
        """Run the rollouts for an evaluation set with this config, like `generate`."""
        return self._generate(groups, self._evaluate, set_config)

    def _generate(
        self,
        groups: Requests,
        call: RemoteCall[list[list[SampleRef]] | Aborted | None, Any, Sequence[SamplingRequest], ActorHandle, A],
        argument: A,
    ) -> Pending[list[Sampled]]:
        """Run rollouts. argument: the last argument of the remote call."""

        def run(requests: Mapping[str, Sequence[SamplingRequest]]) -> Pending[Answered]:
            calls = {}
            for engine, part in requests.items():
                process = self._process_of[engine]
                calls[process] = call.on(self._actors[process], part, self._engines.actors[engine], argument)

            def by_engine(answers: Answers) -> Answered:
                values = self._session.trace.add("generate", answers)
                found = {engine: values[self._process_of[engine]] for engine in requests}
                return {engine: value for engine, value in found.items() if value is not None}

            return self._session.submit(calls, self.phase(call.method), call.method.timeout).then(by_engine)

        return self._engines.route(groups, run, self._abort)

    def _abort(self, engine: str, groups: Collection[str]) -> None:
        self._actors[self._process_of[engine]].abort.remote(groups)
