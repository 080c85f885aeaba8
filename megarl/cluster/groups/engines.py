"""The driver's handle to the rollout engines: replicas, prompt assignment, and recovery from lost engines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, TypeVarTuple

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle

from megarl.cluster.groups.engine_actor import EngineActor, ImageEngineActor, Parameters
from megarl.cluster.groups.remote import RemoteCall, RemoteMethod, remote, share
from megarl.cluster.groups.replicas import ReplicaGroup
from megarl.cluster.pending import Answers, Pending
from megarl.cluster.placement import Process
from megarl.cluster.session import Session
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.errors import UserError
from megarl.core.latents import VelocityInput
from megarl.core.sample import SampleRef
from megarl.models.folder import read_config
from megarl.models.trained_model import policy_hf_config
from megarl.models.weight_files import stacks
from megarl.resharding.families import (
    diffusers_holders,
    huggingface_holder,
    quantized_destinations,
    quantized_sources,
    vllm_holders,
)
from megarl.resharding.families.vllm import padded_experts
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.rollout.diffusers.request import ImageRequest
from megarl.rollout.engine import EngineInfo, SamplingRequest
from megarl.rollout.router import Abort, Aborted, completed

if TYPE_CHECKING:
    from megarl.resharding.transports.transport import Channel
    from megarl.resharding.verification import Checksum, Region
    from megarl.rollout.engine import SyncStats

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_NAMED = 3
"""Maximum number of parameters or kernels named in the message about weights that cannot be written in place."""

GENERATE = RemoteMethod("generate", timeout="rollout", phase="rollout")
"""Remote method for EngineActor.generate. It is declared here because `generate` returns several Ray objects."""

Generation = tuple[str, int]
"""An engine's process name, and the number of lost processes that had this name before."""


Group = list[SampleRef]
"""The samples for one prompt."""

Sampled = Group | Aborted
"""The result of a group: its samples, or Aborted."""

Request = SamplingRequest | ImageRequest

GroupRequests = Sequence[Sequence[Request]]
"""The requests of each group."""

Answered = dict[str, list[Group] | Aborted]
"""The samples of each rollout, or Aborted, by engine name."""

Run = Callable[[Mapping[str, Sequence[Any]]], Pending[Answered]]


class EngineGroup(ReplicaGroup):
    """All engine replicas. With rollout.max_staleness, slower engines receive fewer prompts. A restarted engine rejoins
    at the next refit, because it has no weights yet. An engine that shares GPUs with trainers does not restart, because
    training leaves no memory for it."""

    actor_class, title, role = EngineActor, "EngineActor", "engine"
    awaits_restarts = False
    sample_fields: ClassVar[tuple[str, ...]] = ("sample",)
    """SampleRef fields that refer to a sample's parts; see EngineProcess.parts."""

    @remote(timeout="start")
    def _hold(self, version: int) -> None: ...

    @remote(timeout="start")
    def _describe_parameters(self) -> tuple[list[Parameters], list[str]]: ...

    @remote(timeout="refit")
    def _pause(self) -> None: ...

    @remote(timeout="refit")
    def _resume(self) -> None: ...

    @remote(timeout="refit")
    def _disconnect(self) -> None: ...

    @remote(timeout="refit")
    def _sleep(self, keeps_weights: bool) -> None: ...

    @remote(timeout="refit")
    def _info(self, texts: Sequence[str]) -> EngineInfo: ...

    @remote(timeout="refit")
    def _differing(self, expected: Mapping[Region, Checksum]) -> list[str] | None: ...

    @remote(timeout="refit")
    def _connect(
        self, plan: CompactPlan, channel: Channel, holders: Mapping[str, Sequence[Holder]], by_loader: bool
    ) -> None: ...

    @remote(timeout="refit")
    def _refit(self, version: int, expected: Mapping[Region, Checksum] | None) -> list[SyncStats]: ...

    @remote(timeout="rollout")
    def _take_work(self) -> tuple[float, int]: ...

    def __init__(self, session: Session, config: Config, model_folder: Path, processes: Sequence[Process]):
        tp = config.rollout.tp
        restarts = not (config.is_colocated and device.on_cuda())
        super().__init__(session, config, model_folder, processes, restarts, config.rollout.max_staleness > 0)
        self._sleeps = config.rollout.sleep
        self._pauses = config.pauses_rollouts
        self._quantizes = config.rollout.quantization is not None
        self._hf_config = policy_hf_config(config, read_config(model_folder))

        def hold(padded_experts: int | None) -> dict[str, list[Holder]]:
            holders = self._engine_holders(config, len(processes), padded_experts)
            return {p.name: p.hold(self._destinations(holders[p.index * tp : (p.index + 1) * tp])) for p in processes}

        self._make_holders, self._holders = hold, hold(None)
        [self.whole_model] = self._destinations([huggingface_holder(self._hf_config, config.model.dtype)])
        """Holder of the whole model in the format that the engines receive."""
        self.by_loader = False
        """Whether the engines load weights through vLLM's loader. The loader may transform the weights."""

    def _engine_holders(self, config: Config, count: int, padded_experts: int | None) -> list[Holder]:
        """Return the holders of `count` engines, in order, without quantization."""
        return vllm_holders(
            self._hf_config,
            config.rollout.tp,
            count,
            config.model.dtype,
            expert_parallel=config.rollout.has_whole_experts,
            padded_experts=padded_experts,
            drafts=config.rollout.drafts_with_mtp,
        )

    def start(self) -> Pending[None]:
        """Start the engines, check whether a plan can write their parameters in place, and put the engines to sleep."""
        described = self._start().then(lambda _: self._describe_parameters.on_first())
        return described.then(self._check_parameters).then(lambda _: self.sleep(keeps_weights=False))

    def start_loaded(self, version: int) -> Pending[None]:
        """Start engines that load their weights from the model folder (load_format=auto) instead of receiving them
        in a refit, and label these weights `version`."""
        return self._start().then(lambda _: self._hold(version)).then(lambda _: None)

    def _check_parameters(self, described: tuple[Sequence[Parameters], Sequence[str]]) -> None:
        """Switch to sending whole tensors if kernels repack parameters, or if the parameters differ from those of the
        model family by more than the padding of experts. `described` contains the parameters of each worker in the
        first engine, and the names of kernels that repack parameters."""
        workers, repacking = described
        self._holders = self._make_holders(padded_experts(workers[0]))
        mismatched = [
            f"{holder.name}: {line}"
            for holder, parameters in zip(self._holders[self.names[0]], workers, strict=True)
            for line in holder.shard.mismatched_params(parameters)
        ]
        if mismatched:
            self._switch_to_loader(f"{len(mismatched)} of vLLM's parameters differ from the expected ones", mismatched)
        elif repacking:
            self._switch_to_loader("these kernels repack weights", repacking)

    def pause(self) -> Pending[None]:
        """Pause the engines if other processes need their devices while requests are in flight. See Engine.pause."""
        return self._switch(self._pause, self._pauses)

    def resume(self) -> Pending[None]:
        """Resume sampling after a pause."""
        return self._switch(self._resume, self._pauses)

    def sleep(self, keeps_weights: bool) -> Pending[None]:
        """Free device memory until the next refit if rollout.sleep is set. See Engine.sleep. The weights are kept if
        `keeps_weights` is true, and always with vLLM's own loader, because its refits may not replace all of them."""
        return self._switch(self._sleep, self._sleeps, keeps_weights or self.by_loader)

    def _switch(self, call: RemoteCall[None, Any, *Ts], applies: bool, *arguments: *Ts) -> Pending[None]:
        """If `applies` is true, run a method that makes the engines release or reclaim their devices."""
        done = self._submit(call.method, call.start(*arguments) if applies else {})
        return done.then(lambda answers: self.drop(answers.lost, "rollout"))

    def _switch_to_loader(self, reason: str, names: Sequence[str]) -> None:
        """Make every worker receive whole checkpoint tensors, because of the named parameters or kernels. Raise a
        UserError if the checkpoint stacks experts, because refits send experts separately."""
        if stacks(self.whole_model.shapes):
            raise UserError(
                f"rollout.vllm_overrides: {reason} ({names[0]}), so the engines must load whole tensors, but megarl "
                "sends this model's stacked experts separately. Fix: remove overrides that change the layout of the "
                "engines' weights"
            )
        print(
            "refit: loading whole tensors through vLLM's own loader, which is slower than writing in place, because "
            f"{reason}: {'; '.join(names[:MAX_NAMED])}{'; …' if len(names) > MAX_NAMED else ''}",
            flush=True,
        )
        self.by_loader = True
        self._holders = {
            name: [replace(holder, shard=self.whole_model.shard) for holder in holders]
            for name, holders in self._holders.items()
        }

    @property
    def generations(self) -> list[Generation]:
        """The generations of the live processes. A restarted process has a different generation from its
        predecessor."""
        return [(name, self.router.losses[name]) for name in self._actors]

    @property
    def holders(self) -> list[Holder]:
        """Weight holders for all workers in the live processes."""
        return [holder for name in self._actors for holder in self._holders[name]]

    def sources(self, holders: list[Holder]) -> list[Holder]:
        """Return a trainer's holders with the weights in the format that these engines receive."""
        return quantized_sources(self._hf_config, holders) if self._quantizes else holders

    def _destinations(self, holders: list[Holder]) -> list[Holder]:
        return quantized_destinations(self._hf_config, holders) if self._quantizes else holders

    def generate(self, groups: GroupRequests, listener: ActorHandle | None = None) -> Pending[list[Sampled]]:
        """Sample responses for the requests of each prompt. The result contains each prompt's samples, or Aborted, in
        order. If an engine is lost in the meantime, its requests go to the remaining engines. The method `begin`
        of the actor `listener` receives each sample as soon as it is complete."""
        return self.route(groups, partial(self._sample, listener), self._abort)

    def route(self, groups: GroupRequests, run: Run, abort: Abort) -> Pending[list[Sampled]]:
        """Run the rollouts of each group on one of the engines. The result contains each group's samples, or Aborted,
        in order. The groups of a lost engine run on the remaining engines.

        Args:
            run: function that takes each engine's requests, by engine name, and starts the rollouts. Its result omits
                lost engines and maps each other engine to the samples of each rollout, or to Aborted.
            abort: function that aborts groups on an engine.
        """
        names = [[request.sample_id for request in group] for group in groups]
        return self._route("rollout", groups, names, run, abort)

    def _abort(self, name: str, groups: Collection[str]) -> None:
        self._actors[name].abort.remote(groups)

    def _sample(self, listener: ActorHandle | None, requests: Mapping[str, Sequence[Request]]) -> Pending[Answered]:
        """Sample each engine's requests. The result contains one rollout with one sample per request."""
        count = len(self.sample_fields)
        refs = {
            name: self._actors[name].generate.options(num_returns=1 + count * len(part)).remote(part, listener)
            for name, part in requests.items()
        }

        def attach(name: str, samples: Sequence[SampleRef]) -> list[Group]:
            parts = [refs[name][i : i + count] for i in range(1, len(refs[name]), count)]
            pairs = zip(samples, parts, strict=True)
            return [[replace(ref, **dict(zip(self.sample_fields, objects, strict=True)))] for ref, objects in pairs]

        def by_engine(answers: Answers) -> Answered:
            values = answers.values.items()
            return {name: value if isinstance(value, Aborted) else attach(name, value) for name, value in values}

        return self._submit(GENERATE, {name: outputs[0] for name, outputs in refs.items()}).then(by_engine)

    def generate_on_each(self, requests_of: Callable[[str], Sequence[Request]]) -> Pending[dict[str, Group]]:
        """Sample the requests that `requests_of` returns for each live engine. Return the samples by engine name."""
        requests = {name: requests_of(name) for name in self.names}

        def collect(answers: Answered) -> dict[str, Group]:
            self.drop(requests.keys() - answers.keys(), "rollout")
            return {name: [sample for [sample] in completed(answers[name])] for name in answers}

        return self._sample(None, requests).then(collect)

    def info(self, texts: Sequence[str]) -> Pending[dict[str, EngineInfo]]:
        """Return the EngineInfo for every engine, by engine name. See Engine.info."""
        return self._run_on_each(self._info, texts)

    def differing(self, expected: Mapping[Region, Checksum]) -> Pending[dict[str, list[str] | None]]:
        """Compare every engine's weights with checksums. The result maps each engine's name to the return value of
        Engine.differing."""
        return self._run_on_each(self._differing, share(expected))

    def _run_on_each(self, call: RemoteCall[T, Any, *Ts], *arguments: *Ts) -> Pending[dict[str, T]]:
        """Run a method on every engine. The result maps the name of each live engine to its return value."""

        def drop_lost(answers: Answers) -> dict[str, T]:
            self.drop(answers.lost, "refit")
            return dict(answers.values)

        return self._submit(call.method, call.start(*arguments)).then(drop_lost)

    def take_idle_share(self) -> Pending[float]:
        call = self._take_work
        calls = call.start()

        def take(answers: Answers) -> float:
            for name, (seconds, num_steps) in answers.values.items():
                self.router.measure(name, seconds, num_steps)
            return self._idle_share([answers.values.get(name, (0.0, 0))[0] for name in calls])

        return self._submit(call.method, calls).then(take)

    def connect(self, plan: CompactPlan, channel: Channel) -> Pending[bool]:
        """Set the plan for subsequent refits. The result is True if no engine was lost."""
        names = self.names
        connected = self._run_on_each(self._connect, share(plan), share(channel), share(self._holders), self.by_loader)
        return connected.then(lambda values: len(values) == len(names))

    def disconnect(self) -> Pending[Any]:
        """Release the plan and all memory of trainers that have died."""
        return self._run_on_each(self._disconnect)

    def start_refit(self, version: int, expected: Mapping[Region, Checksum] | None) -> dict[str, ray.ObjectRef]:
        """Start the refit in every engine. Return the calls by engine name. See Engine.refit."""
        return self._refit.start(version, share(expected))

    def _start_calls(self, actor: ActorHandle) -> list[ray.ObjectRef]:
        sleep = [self._sleep.on(actor, self.by_loader)] if self._sleeps else []
        return [*super()._start_calls(actor), *sleep]


class ImageEngineGroup(EngineGroup):
    """All engines of an image model. Each holds the complete model."""

    actor_class = ImageEngineActor
    sample_fields = ("sample", "pictured")

    @remote(timeout="refit")
    def _velocities(self, inputs: Sequence[VelocityInput]) -> list[NDArray[np.float32]]: ...

    def _engine_holders(self, config: Config, count: int, padded_experts: int | None) -> list[Holder]:
        return diffusers_holders(self._hf_config, count, config.model.dtype)

    def velocities(self, inputs: Sequence[VelocityInput]) -> Pending[dict[str, list[NDArray[np.float32]]]]:
        """Compute the velocities at these inputs on every engine. The result maps each engine's name to its
        velocities."""
        return self._run_on_each(self._velocities, share(inputs))


def engine_group(config: Config) -> type[EngineGroup]:
    """Return the group class for the run's engines."""
    return ImageEngineGroup if config.samples_images else EngineGroup
