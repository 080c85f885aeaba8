"""One rollout engine in its own process."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle

from megarl.cluster.groups.group import ASYNC_OPTIONS, TimedResult
from megarl.cluster.groups.vllm import VllmActor
from megarl.cluster.supervision import segments
from megarl.cluster.supervision.scratch import own_scratch
from megarl.config.schema import Config
from megarl.core.types import Sample, SampleRef
from megarl.rollout.engine import Engine, SamplingRequest
from megarl.rollout.router import Aborted
from megarl.rollout.turns import EngineTurns, Exchanged, Turns

if TYPE_CHECKING:
    from megarl.resharding.piece import Holder
    from megarl.resharding.planning.compact import CompactPlan
    from megarl.resharding.transports.transport import Channel

Parameters = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each parameter in a worker, by parameter name."""


@dataclass(slots=True)
class _Generating:
    """A running call to `generate`. num_tokens: number of tokens in its finished samples and, once it is aborted, in
    its unfinished ones."""

    requests: Sequence[SamplingRequest]
    samples: asyncio.Future[list[Sample]]
    num_tokens: int = 0


class EngineProcess(VllmActor):
    """One engine. Ray runs all calls in one event loop, so other calls can run while `generate` waits for its
    samples."""

    section = "rollout"

    @abstractmethod
    def _make_engine(self, arguments: Mapping[str, Any]) -> Engine:
        """Build the engine without loading weights."""

    def _load(self, arguments: Mapping[str, Any]) -> Engine:
        engine = self._make_engine(arguments)
        self._turns = defaultdict(lambda: EngineTurns(engine))
        self._generating: dict[str, _Generating] = {}
        """Running calls to `generate`, by the name of the first request."""
        return engine

    def describe_parameters(self) -> tuple[list[Parameters], list[str]]:
        """Return the parameters in each worker, and the names of kernels that repack parameters."""
        return self._worker.parameters(), self._worker.repacking()

    def connect(
        self, plan: CompactPlan, channel: Channel, holders: Mapping[str, Sequence[Holder]], by_loader: bool
    ) -> None:
        """Connect the engine for subsequent refits. holders: the workers' holders, by engine name."""
        self._worker.connect(plan, channel, holders[self._process.name], by_loader)

    async def generate(
        self, requests: Sequence[SamplingRequest], listener: ActorHandle | None
    ) -> list[TimedResult | Sample | None]:
        """Return the samples' metadata, then the samples, each as a separate return value: return values outlive the
        process, unlike objects that the process puts into the object store. The listener receives samples as they
        finish. An aborted call returns Aborted in place of the metadata."""
        begin = time.time()

        def report(samples: list[Sample]) -> None:
            call.num_tokens += sum(len(sample.response_ids) for sample in samples)
            if listener is not None:
                listener.begin.remote(samples)

        call = _Generating(requests, asyncio.ensure_future(self._worker.generate(requests, report)))
        self._generating[requests[0].sample_id] = call
        try:
            with self._end_if_rank_died():
                samples = await call.samples
        except asyncio.CancelledError:
            return [TimedResult(Aborted(call.num_tokens), begin, time.time()), *(None for _ in requests)]
        finally:
            del self._generating[requests[0].sample_id]
        segments.note(own_scratch())  # vLLM creates some segments only when it generates
        return [TimedResult([SampleRef.of(sample) for sample in samples], begin, time.time()), *samples]

    async def abort(self, names: Collection[str]) -> None:
        """Abort the running calls to `generate` whose first requests have these names."""
        for name in self._generating.keys() & set(names):
            call = self._generating[name]
            call.num_tokens += self._worker.num_unfinished_tokens({request.sample_id for request in call.requests})
            call.samples.cancel()

    async def exchange(self, process: str, turns: Turns, abandoned: Collection[int]) -> Exchanged:
        """Start turns for an environment process, given by name, and return the finished turns. See EngineTurns."""
        with self._end_if_rank_died():
            return await self._turns[process].exchange(turns, abandoned)


@ray.remote(**ASYNC_OPTIONS)
class EngineActor(EngineProcess):
    """One rollout engine on vLLM."""

    def _arguments(self) -> dict[str, Any]:
        from megarl.rollout.vllm.engine_arguments import rollout_arguments

        config, model, routes = self._config, self._config.model, self._config.actor.experts.replay_routes
        settings = model.dtype, config.run.seed, routes, model.head_dtype
        return rollout_arguments(config.rollout, self._model_folder, *settings)

    @staticmethod
    def is_batch_invariant(config: Config) -> bool:
        return config.rollout.batch_invariant

    def _make_engine(self, arguments: Mapping[str, Any]) -> Engine:
        from megarl.rollout.vllm.engine import VllmEngine

        return VllmEngine(self._config.rollout, arguments, self._config.actor.experts.replay_routes)
