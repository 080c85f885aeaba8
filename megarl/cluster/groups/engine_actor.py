"""One rollout engine in its own process."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle

from megarl.cluster.groups.group import ASYNC_OPTIONS, TimedResult
from megarl.cluster.groups.replicas import ReplicaActor
from megarl.cluster.groups.vllm import VllmActor
from megarl.cluster.image_files import get_images, get_images_of_turns
from megarl.cluster.supervision import segments
from megarl.cluster.supervision.scratch import own_scratch
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.collector import imports
from megarl.core.latents import AnySample, LatentSample, VelocityInput
from megarl.core.sample import SampleRef
from megarl.rollout.diffusers.request import ImageRequest
from megarl.rollout.engine import Engine, SamplingRequest
from megarl.rollout.router import Aborted
from megarl.rollout.turns import EngineTurns, Exchanged, Turns

if TYPE_CHECKING:
    from megarl.resharding.piece import Holder
    from megarl.resharding.planning.compact import CompactPlan
    from megarl.resharding.transports.transport import Channel

Requests = Sequence[SamplingRequest] | Sequence[ImageRequest]

Parameters = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each parameter in a worker, by parameter name."""


@dataclass(slots=True)
class _Generating:
    """A running call to `generate`. num_tokens: number of tokens or denoising steps in its finished samples and, once
    it is aborted, in its unfinished ones."""

    requests: Requests
    samples: asyncio.Future[list[AnySample]]
    num_tokens: int = 0


class EngineProcess(ReplicaActor):
    """One engine. Ray runs all calls in one event loop, so that other calls can run while `generate` waits for
    samples."""

    num_parts: ClassVar[int] = 1
    """Number of Ray objects that store one sample."""

    @staticmethod
    def parts(sample: Any) -> Sequence[Any]:
        """Split a sample into parts, each stored as a Ray object. The last part is the input to rewards."""
        return (sample,)

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._turns = defaultdict(lambda: EngineTurns(self._worker))
        self._generating: dict[str, _Generating] = {}
        """Running calls to `generate`, by the name of the first request."""

    def describe_parameters(self) -> tuple[list[Parameters], list[str]]:
        """Return the parameters in each worker, and the names of kernels that repack parameters."""
        return self._worker.parameters(), self._worker.repacking()

    def connect(
        self, plan: CompactPlan, channel: Channel, holders: Mapping[str, Sequence[Holder]], by_loader: bool
    ) -> None:
        """Connect the engine for subsequent refits. holders: the workers' holders, by engine name."""
        self._worker.connect(plan, channel, holders[self._process.name], by_loader)

    async def generate(self, requests: Requests, listener: ActorHandle | None) -> list[TimedResult | AnySample | None]:
        """Return the samples' metadata, then each sample's parts as separate return values: return values outlive the
        process, unlike objects that it puts into the object store. As samples finish, the listener receives their
        reward parts and references to their prompts' images. An aborted call returns Aborted in place of the
        metadata."""
        begin = time.time()
        images = {request.sample_id: request.prompt.files for request in requests if request.prompt.images}

        def report(samples: list[AnySample]) -> None:
            call.num_tokens += sum(sample.num_sampled for sample in samples)
            if listener is not None:
                refs = {sample.id: images[sample.id] for sample in samples if sample.id in images}
                listener.begin.remote([self.parts(sample)[-1] for sample in samples], refs)

        async def generated() -> list[AnySample]:
            return await self._worker.generate(await get_images(requests), report)

        call = _Generating(requests, asyncio.ensure_future(generated()))
        self._generating[requests[0].sample_id] = call
        try:
            with self._end_if_rank_died():
                samples = await call.samples
        except asyncio.CancelledError:
            nothing = [None] * (len(requests) * self.num_parts)
            return [TimedResult(Aborted(call.num_tokens), begin, time.time()), *nothing]
        finally:
            del self._generating[requests[0].sample_id]
        segments.note(own_scratch())  # vLLM creates some segments only when it generates
        parts = [part for sample in samples for part in self.parts(sample)]
        return [TimedResult([SampleRef.of(sample) for sample in samples], begin, time.time()), *parts]

    async def abort(self, names: Collection[str]) -> None:
        """Abort the running calls to `generate` whose first requests have these names."""
        for name in self._generating.keys() & set(names):
            call = self._generating[name]
            call.num_tokens += self._worker.num_unfinished({request.sample_id for request in call.requests})
            call.samples.cancel()

    async def exchange(self, process: str, turns: Turns, abandoned: Collection[int]) -> Exchanged:
        """Start turns for an environment process, given by name, and return the finished turns. See EngineTurns."""
        with self._end_if_rank_died():
            return await self._turns[process].exchange(await get_images_of_turns(turns), abandoned)


@ray.remote(**ASYNC_OPTIONS)
class EngineActor(EngineProcess, VllmActor):
    """One rollout engine on vLLM."""

    section = "rollout"

    def _arguments(self) -> dict[str, Any]:
        from megarl.rollout.vllm.engine_arguments import rollout_arguments

        config, model, routes = self._config, self._config.model, self._config.actor.experts.replay_routes
        pixels = (config.data.min_pixels, config.data.max_pixels) if model.vision else None
        settings = model.dtype, config.run.seed, routes, model.head_dtype, pixels
        return rollout_arguments(config.rollout, self._model_folder, *settings)

    @staticmethod
    def is_batch_invariant(config: Config) -> bool:
        return config.rollout.batch_invariant

    def _load(self, arguments: Mapping[str, Any]) -> Engine:
        from megarl.rollout.vllm.engine import VllmEngine

        return VllmEngine(self._config.rollout, arguments, self._config.actor.experts.replay_routes)


@ray.remote(**ASYNC_OPTIONS)
class ImageEngineActor(EngineProcess):
    """One rollout engine for an image model."""

    num_parts = 2

    @staticmethod
    def parts(sample: LatentSample) -> Sequence[LatentSample]:
        return sample.for_training, sample.for_rewards

    def start(self) -> None:
        """Start the engine. Raise UserError if the model's folder cannot be loaded."""
        with imports():
            from megarl.rollout.diffusers.engine import DiffusersEngine
        device.claim(self._process.threads)
        denoising, pipeline = self._config.rollout.denoising, self._model_folder.parent
        # `megarl evaluate` sets this vLLM argument for all engines, so that they load the weights from the folder.
        loads_weights = self._config.rollout.vllm_overrides.get("load_format") == "auto"
        dtype = self._config.model.dtype
        self._worker = DiffusersEngine(pipeline, dtype, denoising.max_batch, denoising.offload, loads_weights)

    def velocities(self, inputs: Sequence[VelocityInput]) -> list[NDArray[np.float32]]:
        return self._worker.velocities(inputs)
