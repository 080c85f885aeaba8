"""The driver's handle to the rollout engines: replicas, prompt assignment, and recovery from lost engines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import ray
from ray.actor import ActorHandle

from megarl.cluster.failure import RunFailure, cause, write_stacks
from megarl.cluster.groups.engine_actor import Aborted, EngineActor, Parameters
from megarl.cluster.groups.remote import RemoteCall, RemoteMethod, remote, share
from megarl.cluster.groups.vllm import VllmGroup
from megarl.cluster.pending import Answers, Pending, outcome
from megarl.cluster.placement import Process
from megarl.cluster.session import Session
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.types import Sample, SampleInfo
from megarl.models.folder import read_config
from megarl.resharding.families import huggingface_holder, quantized_destinations, quantized_sources, vllm_holders
from megarl.resharding.families.vllm import padded_experts
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.rollout.engine import EngineInfo, SamplingRequest

if TYPE_CHECKING:
    from megarl.resharding.transports.transport import Channel
    from megarl.resharding.verification import Checksum, Region
    from megarl.rollout.engine import SyncStats

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_NAMED = 3
"""Maximum number of parameters or kernels named in the message about weights that cannot be written in place."""

SLOW = 1.5
"""Slowdown relative to the fastest engine above which an engine receives fewer requests. Smaller values are noise."""

MUCH_SLOWER = 2.0
"""Slowdown relative to the fastest engine above which idle engines restart a slow engine's prompts. At twice the time
per token, an idle engine finishes the same work from scratch before the slow engine does."""

RESTARTS = 3
"""Maximum number of restarts per engine. If an engine fails more often, the cause is probably permanent."""

GENERATE = RemoteMethod("generate", timeout="rollout", phase="rollout")
"""Remote method for EngineActor.generate. It is declared here because `generate` returns several Ray objects."""

Generation = tuple[str, int]
"""An engine's process name, and the number of lost processes that had this name before."""


@dataclass(frozen=True, slots=True)
class RemoteSample:
    """The driver's handle to a sample: its metadata, and a reference to its tokens."""

    info: SampleInfo
    ref: ray.ObjectRef

    @classmethod
    def put(cls, sample: Sample) -> RemoteSample:
        """Put the sample into Ray's object store, which keeps it while a reference to it exists."""
        return cls(SampleInfo.of(sample), ray.put(sample))


Sampled = list[RemoteSample] | Aborted
"""The result of a group: its samples, or Aborted."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests assigned to engines.

    Attributes:
        requests: number of requests per engine.
        losses: number of processes that each engine had lost before the assignment.
    """

    requests: Mapping[str, int]
    losses: Mapping[str, int]
    group: EngineGroup

    def end(self) -> None:
        """Subtract the requests from the engines' load."""
        self.group.load.subtract(self.requests)

    def newly_lost(self, lost: Collection[str]) -> list[str]:
        """Return the lost engines that no earlier call has reported."""
        return [name for name in lost if self.group.losses[name] == self.losses[name]]


class EngineGroup(VllmGroup):
    """All engine replicas. The samples for one prompt all go to the least-loaded engine, where they share a prefix
    cache. With rollout.max_staleness, slower engines receive fewer prompts.

    When one of several engines is lost, the remaining engines take over its work while it restarts. It rejoins at the
    next refit. An engine that shares GPUs with trainers does not restart, because training leaves no memory for it.
    """

    actor_class, title, role = EngineActor, "EngineActor", "engine"

    @remote(timeout="start")
    def _hold(self, version: int) -> None: ...

    @remote(timeout="start")
    def _describe_parameters(self) -> tuple[list[Parameters], list[str]]: ...

    @remote(timeout="refit")
    def _pause(self) -> None: ...

    @remote(timeout="refit")
    def _resume(self) -> None: ...

    @remote(timeout="refit")
    def _sleep(self, keeps_weights: bool) -> None: ...

    @remote(timeout="refit")
    def _facts(self, texts: Sequence[str]) -> EngineInfo: ...

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
        super().__init__(session, config, model_folder, processes)
        self._sleeps = config.rollout.sleep
        self._pauses = config.pauses_rollouts
        self._quantizes, self._hf_config = config.rollout.quantization is not None, read_config(model_folder)
        self._restarts = not (config.is_colocated and device.on_cuda())
        self.losses: Counter[str] = Counter()
        self.load: Counter[str] = Counter()
        """Number of pending requests of each engine."""
        self._weighs_speed = config.rollout.max_staleness > 0
        """Whether slower engines receive fewer requests. False if a step waits for all of its rollouts: otherwise the
        assignment, and so the run, would not be reproducible."""
        self._latencies: dict[str, float] = {}
        """Seconds per token for each engine, averaged over the last steps."""
        self._places: dict[str, str] = {}
        """Engine for each individually submitted group, by the name of the group's first request."""
        self._moving: set[str] = set()
        """Names of the first requests in groups that move to a different engine, until their calls return."""
        self._aborted: set[str] = set()
        """Names of the first requests in aborted groups, until their calls return."""
        self._starting: dict[str, tuple[ActorHandle, list[ray.ObjectRef]]] = {}
        """Restarting engines, each with the calls that it must complete to be ready."""

        def hold(padded_experts: int | None) -> dict[str, list[Holder]]:
            holders = vllm_holders(
                self._hf_config,
                tp,
                len(processes),
                config.model.dtype,
                expert_parallel=config.rollout.has_whole_experts,
                padded_experts=padded_experts,
            )
            return {p.name: p.hold(self._destinations(holders[p.index * tp : (p.index + 1) * tp])) for p in processes}

        self._make_holders, self._holders = hold, hold(None)
        [self.whole_model] = self._destinations([huggingface_holder(self._hf_config, config.model.dtype)])
        """Holder of the whole model in the format that the engines receive."""
        self.by_loader = False
        """Whether the engines load weights through vLLM's loader, which may transform them."""

    def start(self) -> Pending[None]:
        """Start the engines, check whether a plan can write their parameters in place, and put them to sleep."""
        described = self._start().then(lambda _: self._describe_parameters.on_first())
        return described.then(self._check_parameters).then(lambda _: self.sleep(keeps_weights=False))

    def start_loaded(self, version: int) -> Pending[None]:
        """Start engines that load weights from the model folder (load_format=auto) as this version, without a refit."""
        return self._start().then(lambda _: self._hold(version)).then(lambda _: None)

    def _check_parameters(self, described: tuple[Sequence[Parameters], Sequence[str]]) -> None:
        """Switch to sending whole tensors if kernels have repacked parameters, or if the parameters differ from those
        of the model family in more than padded experts.

        Args:
            described: the parameters in each worker of the first engine, and the names of kernels that repack
                parameters.
        """
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
        """Free device memory until the next refit if rollout.sleep is set. See Engine.sleep. Weights can be discarded
        if the refit replaces all of them, but not with vLLM's own loader, which may skip some."""
        return self._switch(self._sleep, self._sleeps, keeps_weights or self.by_loader)

    def _switch(self, call: RemoteCall[None, Any, *Ts], applies: bool, *arguments: *Ts) -> Pending[None]:
        """Run a method that makes the engines release or reclaim their devices, if `applies` is true."""
        done = self._submit(call.method, call.start(*arguments) if applies else {})
        return done.then(lambda answers: self.drop(answers.lost, "rollout"))

    def _submit(self, method: RemoteMethod, calls: Mapping[str, ray.ObjectRef]) -> Pending[Answers]:
        """Submit calls to engines. The loss of an engine in `may_fail` is not an error."""
        pending = self._session.submit(calls, self.phase(method), method.timeout, may_fail=self.may_fail)
        return pending.then(lambda answers: replace(answers, values=self._session.trace.add(method.name, answers)))

    def _switch_to_loader(self, reason: str, names: Sequence[str]) -> None:
        """Make every worker receive the whole model as checkpoint tensors. names: the parameters or kernels that make
        this necessary."""
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
    def names(self) -> list[str]:
        """Names of the live processes."""
        return list(self._actors)

    @property
    def generations(self) -> list[Generation]:
        """The generation of each live process. A restarted process has a different generation from its predecessor."""
        return [(name, self.losses[name]) for name in self._actors]

    @property
    def holders(self) -> list[Holder]:
        """Weight holders for all workers in the live processes."""
        return [holder for name in self._actors for holder in self._holders[name]]

    def sources(self, holders: list[Holder]) -> list[Holder]:
        """Return a trainer's holders with the weights in the format that these engines receive."""
        return quantized_sources(self._hf_config, holders) if self._quantizes else holders

    def _destinations(self, holders: list[Holder]) -> list[Holder]:
        return quantized_destinations(self._hf_config, holders) if self._quantizes else holders

    def assign(self, sizes: Mapping[int, int], excluded: Collection[str] = ()) -> dict[str, list[int]]:
        """Assign each group to the engine that is expected to finish it first. Return group numbers by engine name.

        Args:
            sizes: number of requests in each group, by group number.
            excluded: engines that receive groups only if no other engine is left.
        """
        load, slowness = Counter(self.load), self._slowness()
        assigned = {name: [] for name in [name for name in self._actors if name not in excluded] or self._actors}
        for number, size in sizes.items():
            name = min(assigned, key=lambda name: (load[name] + size) * slowness[name])
            load[name] += size
            assigned[name].append(number)
        return {name: numbers for name, numbers in assigned.items() if numbers}

    def _slowness(self) -> dict[str, float]:
        """Return each engine's slowdown relative to the fastest one. A slowdown of at most SLOW is returned as 1."""
        if not self._weighs_speed:
            return dict.fromkeys(self._actors, 1.0)
        fastest = min((self._latencies[name] for name in self._actors if name in self._latencies), default=1.0)
        times = {name: self._latencies.get(name, fastest) / fastest for name in self._actors}
        return {name: factor if factor > SLOW else 1.0 for name, factor in times.items()}

    def add_load(self, requests: Mapping[str, int]) -> Load:
        """Add the number of new requests for each engine to the engines' load."""
        self.load.update(requests)
        return Load(requests, {name: self.losses[name] for name in requests}, self)

    @property
    def may_fail(self) -> list[str]:
        """Processes whose loss does not end the run."""
        return self.names if len(self._actors) > 1 else []

    def generate(
        self, groups: Sequence[Sequence[SamplingRequest]], listener: ActorHandle | None = None
    ) -> Pending[list[Sampled]]:
        """Sample responses for the requests of each prompt. The result has their samples in the same shape and order.
        If an engine is lost in the meantime, its requests go to the remaining engines.

        Args:
            listener: an actor whose method `begin` receives each sample as soon as it is complete.
        """
        return self._generate(groups, listener, {})

    def abort(self, groups: Collection[Sequence[str]]) -> None:
        """Abort individually submitted groups, given by the names of their requests. Their calls return soon: with
        Aborted, or with samples if the group had already finished."""
        names = {group[0] for group in groups}
        self._aborted |= names
        for actor in self._actors.values():
            actor.abort.remote(names)

    def reassign_stragglers(self, groups: Collection[Sequence[str]]) -> None:
        """Restart groups from much slower engines on idle engines. groups: individually submitted groups that a step
        waits for, given by the names of their requests."""
        slowness = self._slowness()
        if not any(self.load[name] == 0 and slowness[name] < MUCH_SLOWER for name in self._actors):
            return
        moving: dict[str, set[str]] = defaultdict(set)
        for first in [group[0] for group in groups if group[0] not in self._moving]:
            name = self._places.get(first)
            if name in self._actors and slowness[name] >= MUCH_SLOWER:
                moving[name].add(first)
        for name, firsts in moving.items():
            print(
                f"rollout: {name} needs {slowness[name]:.1f} times as long per token as the fastest engine, so idle "
                f"engines restart {len(firsts)} of its prompts",
                flush=True,
            )
            self._moving |= firsts
            self._actors[name].abort.remote(firsts)

    def _generate(
        self,
        groups: Sequence[Sequence[SamplingRequest]],
        listener: ActorHandle | None,
        done: Mapping[int, Sampled],
        excluded: Collection[str] = (),
    ) -> Pending[list[Sampled]]:
        """Sample the groups that have no result yet.

        Args:
            done: results of finished groups, by their index in `groups`.
            excluded: slow engines whose groups move to faster ones.
        """
        remaining = [i for i in range(len(groups)) if i not in done]
        assigned = self.assign({i: len(groups[i]) for i in remaining}, excluded)
        sampling = {name: self._sample(name, [groups[i] for i in part], listener) for name, part in assigned.items()}
        calls = {name: refs[0] for name, refs in sampling.items()}
        load = self.add_load({name: sum(len(groups[i]) for i in part) for name, part in assigned.items()})
        firsts = [group[0].sample_id for group in groups]
        if len(groups) == 1:
            self._places |= dict.fromkeys(firsts, *assigned)

        def collect(answers: Answers) -> list[Sampled] | Pending[list[Sampled]]:
            load.end()
            samples, slow = dict(done), set[str]()
            for name, infos in answers.values.items():
                if isinstance(infos, Aborted):
                    moving = {i for i in assigned[name] if firsts[i] in self._moving - self._aborted}
                    samples |= {i: infos for i in assigned[name] if i not in moving}
                    slow |= {name} if moving else set()
                    continue
                remote_samples = map(RemoteSample, infos, sampling[name][1:])
                samples |= {i: [next(remote_samples) for _ in groups[i]] for i in assigned[name]}
            self.drop(load.newly_lost(answers.lost), "rollout")
            aborted = {i for i, first in enumerate(firsts) if first in self._aborted}
            samples |= {i: Aborted(0) for i in aborted if i not in samples}  # their engine was lost
            self._aborted.difference_update(firsts)
            self._moving.difference_update(firsts)
            for first in firsts:
                self._places.pop(first, None)
            if len(samples) < len(groups):
                return self._generate(groups, listener, samples, slow)
            return [samples[i] for i in range(len(groups))]

        return self._submit(GENERATE, calls).then(collect)

    def _sample(
        self, name: str, groups: Sequence[Sequence[SamplingRequest]], listener: ActorHandle | None
    ) -> list[ray.ObjectRef]:
        """Start EngineActor.generate on this engine. Return Ray references to its return values."""
        requests = [request for group in groups for request in group]
        return self._actors[name].generate.options(num_returns=1 + len(requests)).remote(requests, listener)

    def generate_on_each(
        self, requests_of: Callable[[str], Sequence[SamplingRequest]]
    ) -> Pending[dict[str, list[RemoteSample]]]:
        """Sample requests on every engine. The result has the samples by engine name, without lost engines.

        Args:
            requests_of: function that maps an engine's name to its requests.
        """
        sampling = {name: self._sample(name, [requests_of(name)], None) for name in self.names}
        calls = {name: refs[0] for name, refs in sampling.items()}

        def collect(answers: Answers) -> dict[str, list[RemoteSample]]:
            self.drop(answers.lost, "rollout")
            return {name: list(map(RemoteSample, infos, sampling[name][1:])) for name, infos in answers.values.items()}

        return self._submit(GENERATE, calls).then(collect)

    def facts(self, texts: Sequence[str]) -> Pending[dict[str, EngineInfo]]:
        """Return the EngineInfo for every engine, by engine name. See Engine.facts."""
        return self._run_on_each(self._facts, texts)

    def differing(self, expected: Mapping[Region, Checksum]) -> Pending[dict[str, list[str] | None]]:
        """Compare the weights in every engine with checksums. The result has the differing regions, by engine name. See
        Engine.differing."""
        return self._run_on_each(self._differing, share(expected))

    def _run_on_each(self, call: RemoteCall[T, Any, *Ts], *arguments: *Ts) -> Pending[dict[str, T]]:
        """Run a method on every engine. The result has the return values by engine name, without lost engines."""

        def drop_lost(answers: Answers) -> dict[str, T]:
            self.drop(answers.lost, "refit")
            return dict(answers.values)

        return self._submit(call.method, call.start(*arguments)).then(drop_lost)

    def take_idle_share(self) -> Pending[float]:
        call = self._take_work
        calls = call.start()

        def take(answers: Answers) -> float:
            for name, (seconds, num_steps) in answers.values.items():
                if num_steps:
                    latency = seconds / num_steps
                    self._latencies[name] = fmean((latency, self._latencies.get(name, latency)))
            return self._idle_share([answers.values.get(name, (0.0, 0))[0] for name in calls])

        return self._submit(call.method, calls).then(take)

    def connect(self, plan: CompactPlan, channel: Channel) -> Pending[bool]:
        """Set the plan for subsequent refits. The result is True if no engine was lost."""
        names = self.names
        connected = self._run_on_each(self._connect, share(plan), share(channel), share(self._holders), self.by_loader)
        return connected.then(lambda values: len(values) == len(names))

    def start_refit(self, version: int, expected: Mapping[Region, Checksum] | None) -> dict[str, ray.ObjectRef]:
        """Start the refit in every engine. Return the calls by engine name. See Engine.refit."""
        return self._refit.start(version, share(expected))

    def drop(self, lost: Collection[str], phase: str) -> None:
        """Remove the lost engines and restart them. Raise RunFailure if no live engine is left."""
        # A refit during a rollout may have noticed the loss first.
        lost = [name for name in lost if name in self._actors]
        for name in lost:
            del self._actors[name]
            self._latencies.pop(name, None)
            self.losses[name] += 1
            restarts = self._restarts and self.losses[name] <= RESTARTS
            print(
                f"{phase}: {name} died{' and is being restarted' if restarts else ''}. {self._describe_remaining()}. "
                f"See {self._session.logs / name}.log",
                flush=True,
            )
            if restarts:
                self._restart(name)
        if not self._actors:
            raise RunFailure(f"{phase}: no engine is left. See {self._session.logs}")
        if lost:
            self._watch()

    def _restart(self, name: str) -> None:
        actor = self._launch(self._processes[name])
        calls = [self._start.on(actor)]
        if self._sleeps:
            calls.append(self._sleep.on(actor, self.by_loader))
        self._starting[name] = actor, calls

    def rejoin_restarted(self) -> None:
        """Add restarted engines to the live ones. Call this before a refit, because they have no weights yet."""
        for name, (actor, calls) in list(self._starting.items()):
            finished, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
            if len(finished) < len(calls):
                continue
            del self._starting[name]
            errors = [error for call in calls if (error := outcome(call)[1]) is not None]
            if errors:
                first, logs = {name: errors[0]}, self._session.logs
                write_stacks(first, logs)
                print(f"{cause(first, 'restart of a lost engine', logs)}. {self._describe_remaining()}", flush=True)
                continue
            actors = self._actors | {name: actor}
            self._actors = {process: actors[process] for process in self._processes if process in actors}
            print(f"refit: {name} rejoined. {self._describe_remaining()}", flush=True)
            self._watch()

    def _describe_remaining(self) -> str:
        return f"Continuing with {len(self._actors)} of {len(self._processes)} engines"

    def _watch(self) -> None:
        """If only one engine is left, watch it so that its loss ends every wait. With several engines, a loss is
        noticed at the next call."""
        self._session.unwatch(self._processes)
        if len(self._actors) == 1:
            self._session.watch(self._actors)
