"""The processes that run rollouts in environments, one per engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError

from megarl.cluster.groups.engines import Answered, EngineGroup, GroupRequests, Sampled
from megarl.cluster.groups.group import ASYNC_OPTIONS, AsyncProcessActor, WorkerGroup
from megarl.cluster.groups.remote import RemoteCall, remote
from megarl.cluster.image_files import RayImages
from megarl.cluster.pending import Answers, Pending
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import put_samples
from megarl.cluster.session import Session
from megarl.config.schema import Config
from megarl.core.completion import Completion
from megarl.core.prompt_images import PromptImage
from megarl.core.proxies import bypass_proxies
from megarl.core.sample import Sample, SampleRef
from megarl.environments.hosts import HostPool, host_arguments
from megarl.environments.images import ImageReader
from megarl.environments.runner import RolloutRequest, RolloutRunner
from megarl.models.tokenizer import load_tokenizer
from megarl.rollout.engine import SamplingRequest
from megarl.rollout.router import Aborted
from megarl.rollout.turns import TICK_S, RemoteTurns

A = TypeVar("A")


@ray.remote(**ASYNC_OPTIONS)
class EnvironmentActor(AsyncProcessActor):
    """A process that runs many rollouts concurrently in one event loop, with the environments in separate processes.
    The training environments' processes live for the whole run. Each evaluation starts new processes, so that it begins
    in the same state every time and does not affect the training environments."""

    def __init__(self, process: Process, logs: Path):
        super().__init__(process, logs)
        self._turns: dict[ActorHandle, RemoteTurns] = {}
        self._running: dict[str, asyncio.Future[list[list[SampleRef]]]] = {}
        """Running calls, by the name of the first rollout."""
        self._closing: set[asyncio.Task[list[SampleRef]]] = set()
        """Canceled rollouts whose environments are closing."""

    async def start(self, config: Config, model_folder: Path) -> None:
        """Start the training environments, if any."""
        self._config, self._tokenizer = config, load_tokenizer(model_folder, date=config.data.date)
        self._model_folder = model_folder
        self._address = ray.util.get_node_ip_address()
        bypass_proxies(self._address)
        if config.has_environment:
            self._training = await self._start_runner(config)

    async def train(
        self, requests: Sequence[SamplingRequest], engine: ActorHandle, listener: ActorHandle
    ) -> list[list[SampleRef]] | Aborted | None:
        """Run rollouts on this engine. Return the samples of each rollout, Aborted if the call was aborted, or None if
        the engine was lost. The listener receives each rollout's samples as soon as the rollout finishes."""

        def on_finished(samples: list[Sample]) -> list[SampleRef]:
            images = {sample.id: [image.file for image in sample.images] for sample in samples if sample.images}
            listener.begin.remote([sample.without_files for sample in samples], images)
            return put_samples(samples)

        return await self._run(self._training, requests, engine, on_finished, len(requests))

    async def evaluate(
        self, requests: Sequence[SamplingRequest], engine: ActorHandle, set_config: Config
    ) -> list[list[SampleRef]] | Aborted | None:
        """Run the rollouts for an evaluation set with this config. The return value is the same as for `train`. To fit
        in memory, it runs at most as many rollouts concurrently as a training step."""
        runner = await self._start_runner(set_config)
        try:
            batch = self._config.batch
            per_engine = -(-batch.prompts_per_step * batch.samples_per_prompt // self._config.rollout.replicas)
            return await self._run(runner, requests, engine, put_samples, per_engine)
        finally:
            await runner.close()

    async def abort(self, names: Collection[str]) -> None:
        """Abort the running calls whose first rollouts have these names."""
        for name in self._running.keys() & set(names):
            self._running[name].cancel()

    async def _start_runner(self, config: Config) -> RolloutRunner:
        pool = await HostPool.start(host_arguments(config), self._process.threads)
        images = ImageReader.of(config, self._model_folder, RayImages())
        runner = RolloutRunner(config, self._tokenizer, pool, images)
        await runner.start(self._address)
        return runner

    async def _run(
        self,
        runner: RolloutRunner,
        requests: Sequence[SamplingRequest],
        engine: ActorHandle,
        on_finished: Callable[[list[Sample]], list[SampleRef]],
        max_concurrent: int,
    ) -> list[list[SampleRef]] | Aborted | None:
        # Reuse RemoteTurns across calls: an agent that has exited may have left unfinished turns in them.
        turns = self._turns.setdefault(engine, RemoteTurns(partial(engine.exchange.remote, self._process.name)))
        slots, names = asyncio.Semaphore(max(1, max_concurrent)), [request.sample_id for request in requests]

        async def run(request: SamplingRequest) -> list[SampleRef]:
            async def sample(
                token_ids: Sequence[int],
                max_new_tokens: int,
                seed: int,
                stop: Sequence[str] = (),
                images: Sequence[PromptImage] = (),
            ) -> Completion:
                return await turns.sample(request.turn(token_ids, max_new_tokens, seed, stop, images))

            rollout = RolloutRequest(request.sample_id, request.prompt, request.seed, request.group_seed)
            async with slots:
                return on_finished(await runner.run(rollout, sample))

        tasks = [asyncio.create_task(run(request)) for request in requests]
        running = self._running[names[0]] = asyncio.shield(asyncio.gather(*tasks))
        try:
            samples = await running
            await turns.finish(names)
            return samples
        except asyncio.CancelledError:
            self._cancel(tasks)
            await asyncio.sleep(TICK_S)  # agents may still send requests until their sessions close
            return Aborted(await turns.finish(names))
        except (RayActorError, OutOfMemoryError):  # as in failure.is_loss
            return None
        finally:
            del self._running[names[0]]
            self._cancel(tasks)

    def _cancel(self, rollouts: Sequence[asyncio.Task[list[SampleRef]]]) -> None:
        """Cancel unfinished rollouts, each only once: a second cancellation would interrupt the closing of its
        environment."""
        for task in rollouts:
            if not task.done() and task not in self._closing:
                task.cancel()
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)


class EnvironmentGroup(WorkerGroup):
    """The processes that run rollouts in environments, one per engine. The engines' router places the rollouts."""

    title = "EnvironmentActor"

    def __init__(
        self, session: Session, config: Config, model_folder: Path, processes: Sequence[Process], engines: EngineGroup
    ):
        actors = {p.name: session.on_node(EnvironmentActor, p).remote(p, session.logs) for p in processes}
        super().__init__(session, "environments", actors)
        session.watch(self._actors)
        self._config, self._model_folder, self._engines = config, model_folder, engines
        self._process_of = dict(zip(engines.router.engines, actors, strict=True))
        """Engine name -> name of its environment process."""

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

    def generate(self, groups: GroupRequests, listener: ActorHandle) -> Pending[list[Sampled]]:
        """Run the rollouts for each prompt. The result contains each prompt's samples, or Aborted, in order. If an
        engine is lost in the meantime, its rollouts restart on the remaining engines. The method `begin` of the actor
        `listener` receives each rollout's samples as soon as the rollout finishes."""
        return self._generate(groups, self._train, listener)

    def evaluate(self, groups: GroupRequests, set_config: Config) -> Pending[list[Sampled]]:
        """Run the rollouts for an evaluation set with this config, like `generate`."""
        return self._generate(groups, self._evaluate, set_config)

    def _generate(
        self,
        groups: GroupRequests,
        call: RemoteCall[list[list[SampleRef]] | Aborted | None, Any, Sequence[SamplingRequest], ActorHandle, A],
        argument: A,
    ) -> Pending[list[Sampled]]:
        """Run rollouts with the remote call `call`. argument: its last argument."""

        def run(requests: Mapping[str, Sequence[SamplingRequest]]) -> Pending[Answered]:
            calls = {}
            for engine, part in requests.items():
                process = self._process_of[engine]
                calls[process] = call.on(self._actors[process], part, self._engines.actors[engine], argument)

            def by_engine(answers: Answers) -> Answered:
                values = self._session.trace.add("generate", answers)
                results = {engine: values[self._process_of[engine]] for engine in requests}
                return {engine: value for engine, value in results.items() if value is not None}

            return self._session.submit(calls, self.phase(call.method), call.method.timeout).then(by_engine)

        return self._engines.route(groups, run, self._abort)

    def _abort(self, engine: str, groups: Collection[str]) -> None:
        self._actors[self._process_of[engine]].abort.remote(groups)
