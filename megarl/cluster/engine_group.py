"""The rollout engines: one Ray actor per replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from megarl.batch import SampleInfo
from megarl.cluster import segments
from megarl.cluster.placement import Process
from megarl.cluster.session import Session
from megarl.cluster.vllm_group import VllmActor, VllmGroup
from megarl.config.schema import Config
from megarl.rollout.engine import SamplingRequest

if TYPE_CHECKING:
    from megarl.resharding.plan import Plan
    from megarl.resharding.transports.shared_memory import SharedMemory
    from megarl.rollout.vllm_engine import VllmEngine


@dataclass(frozen=True, slots=True)
class RemoteSample:
    """A sample as the driver knows it: its numbers, and a reference to where its tokens are."""

    info: SampleInfo
    ref: ray.ObjectRef


@ray.remote(num_cpus=0, max_restarts=0)
class EngineActor(VllmActor):
    def _load(self) -> VllmEngine:
        from megarl.rollout.vllm_engine import VllmEngine

        return VllmEngine(
            self._config.rollout,
            self._model_folder,
            self._config.model.dtype,
            self._process.index,
            self._config.run.seed,
        )

    def generate(self, requests: Sequence[SamplingRequest]) -> list[RemoteSample]:
        samples = self._engine.generate(requests)
        segments.note(self._scratch)  # vLLM makes some only when it generates
        return [RemoteSample(SampleInfo.of(sample), ray.put(sample)) for sample in samples]

    def refit(self, plan: Plan, transport: SharedMemory, version: int) -> int:
        return self._engine.refit(plan, transport, version)


class EngineGroup(VllmGroup):
    """All replicas. Requests are dealt out by group, so that the samples of one prompt share a prefix cache."""

    actor_class = EngineActor

    def __init__(self, session: Session, config: Config, model_folder: Path, processes: Sequence[Process]):
        super().__init__(session, config, model_folder, processes, config.rollout.tp)

    def generate(
        self, groups: Sequence[Sequence[SamplingRequest]], meanwhile: Callable[[], object] | None = None
    ) -> list[list[RemoteSample]]:
        """groups: the requests of each prompt. Returns their samples in the same shape and order. meanwhile: called now
        and then until they are there."""
        replicas = len(self._actors)
        answers = self._session.wait(
            {
                name: actor.generate.remote([request for group in groups[i::replicas] for request in group])
                for i, (name, actor) in enumerate(self._actors.items())
            },
            "rollout",
            meanwhile=meanwhile,
        )
        streams = [iter(samples) for samples in answers]
        return [[next(streams[i % replicas]) for _ in group] for i, group in enumerate(groups)]

    def refit(self, plan: Plan, transport: SharedMemory, version: int) -> int:
        """Every engine takes the weights in place. Returns the bytes written over all engines."""
        calls = {name: actor.refit.remote(plan, transport, version) for name, actor in self._actors.items()}
        return sum(self._session.wait(calls, "refit"))
