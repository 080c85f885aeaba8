"""The ranks that train a model."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray

from megarl.cluster.departures import DeviceState
from megarl.cluster.groups.copies import CopyingGroup, CopyingRank
from megarl.cluster.groups.remote import remote, share
from megarl.cluster.pending import Pending, join
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import RankBatch, Scores, Updates, join_by_sample, join_named_scores, put_scores
from megarl.cluster.session import Session
from megarl.cluster.supervision import segments
from megarl.cluster.supervision.scratch import own_scratch
from megarl.config.model_schema import Lora, Role
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.checkpoint import Checkpoint, FileRecord, noted_files
from megarl.core.latents import VelocityInput
from megarl.core.metrics import Metric, merge, merge_updates
from megarl.core.score import TokenTotals
from megarl.core.token_batch import Scoring
from megarl.models.folder import read_config
from megarl.resharding.families.adapters import adapter_holder, peft_holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.rank_files import RankFiles
from megarl.resharding.transports.shared_memory import SharedMemory

if TYPE_CHECKING:
    from megarl.data.local_batch import LocalBatch
    from megarl.megatron.offload import Part
    from megarl.megatron.workers.actor import Policy
    from megarl.resharding.planning.plan import Plan
    from megarl.resharding.transports.p2p import Rendezvous
    from megarl.resharding.transports.published import Published
    from megarl.resharding.transports.transport import Transport
    from megarl.resharding.verification import Checksum, Region

T = TypeVar("T")

PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer")
"""The parts of a model's state that an `offload` key may list."""


class TrainerRank(CopyingRank):
    """One rank that trains a model. Its worker is a TrainerWorker."""

    def examine_device(self) -> DeviceState:
        return DeviceState(device.error_counts(), device.probe_seconds())

    def old_log_probs(self, batch: LocalBatch) -> dict[str, Scores]:
        return self._keep_log_probs("old", batch)

    def reference_log_probs(self, batch: LocalBatch) -> dict[str, Scores]:
        return self._keep_log_probs("reference", batch)

    def score_as_teacher(self, teacher: str, batch: LocalBatch) -> Scores:
        return put_scores(self._worker.score_as_teacher(teacher, batch))

    def _keep_log_probs(self, policy: Policy, batch: LocalBatch) -> dict[str, Scores]:
        return {name: put_scores(scores) for name, scores in self._worker.keep_log_probs(policy, batch).items()}

    def score_tokens(self, batch: LocalBatch) -> tuple[Scores, dict[str, TokenTotals]]:
        scores = self._worker.score_tokens(batch)
        masks = {item.sample.id: item.sample.response_mask for item in batch.samples}
        totals = {
            name: TokenTotals.of(list(compress(sample_scores.tolist(), masks[name])))
            for name, sample_scores in scores.items()
        }
        return put_scores(scores), totals

    def end_epoch(self) -> None:
        """Drop this epoch's batches, because the next epoch may pack its samples differently."""
        self._batches.clear()
        self._worker.end_epoch()

    def end_step(self) -> None:
        """End the step in the worker. Drop the step's batches first, to let the worker free their device memory."""
        self._batches.clear()
        self._worker.end_step()

    def publish_on_gpu(self, readers: Mapping[str, Collection[str]]) -> dict[str, Published]:
        published = self._worker.publish_on_gpu(readers)
        segments.note(own_scratch())  # torch keeps reference counts in shared memory
        return published

    def connect(self, plan: CompactPlan, rendezvous: Rendezvous) -> None:
        self._worker.connect(self._part(plan), rendezvous)

    def checksums(self, wanted: Sequence[Region], plan: CompactPlan) -> dict[Region, Checksum]:
        return self._worker.checksums(wanted, self._part(plan))

    def write_part(self, plan: CompactPlan, folder: Path) -> None:
        self._worker.write_part(self._part(plan), folder)

    def _part(self, plan: CompactPlan) -> Plan:
        """Return the part of the plan that concerns this rank."""
        return plan.part([self._worker.holder.name])


@ray.remote(num_cpus=0, max_restarts=0)
class TrainerActor(TrainerRank):
    """A TrainerRank as a Ray actor."""


def _join_scores(parts: Sequence[tuple[Scores, dict[str, TokenTotals]]]) -> tuple[Scores, dict[str, TokenTotals]]:
    return join_by_sample([scores for scores, _ in parts]), join_by_sample([totals for _, totals in parts])


def _first_result(parts: Sequence[list[T]]) -> list[T]:
    """Return the first nonempty result. One rank per replica returns a result, and all of these are equal."""
    return next(part for part in parts if part)


def _join_files(parts: Sequence[Sequence[FileRecord]]) -> list[FileRecord]:
    return [record for part in parts for record in part]


def _add_checksums(parts: Sequence[Mapping[Region, Checksum]]) -> dict[Region, Checksum]:
    whole: dict[Region, Checksum] = {}
    for part in parts:
        for region, checksum in part.items():
            whole[region] = whole[region] + checksum if region in whole else checksum
    return whole


class TrainerGroup(CopyingGroup):
    """All ranks that train one model. Arguments named `updates` hold each update's batches, one per data-parallel
    rank."""

    actor_class, title = TrainerActor, "TrainerActor"

    def __init__(self, session: Session, config: Config, role: Role, model_folder: Path, processes: Sequence[Process]):
        super().__init__(session, config, role, model_folder, processes)
        self.offloads = frozenset(config.placed(role).offload)
        self._model_folder, lora = model_folder, config.placed(role).adapters
        self._exports_adapters = lora if lora is not None and lora.export == "adapters" else None
        self._notes_advantages = role == "actor" and config.algorithm.whitens_step

    @remote(timeout="passes", phase="old log-probs", join=join_named_scores)
    def _old_log_probs(self, batch: RankBatch) -> dict[str, Scores]: ...

    @remote(timeout="passes", phase="reference log-probs", join=join_named_scores)
    def _reference_log_probs(self, batch: RankBatch) -> dict[str, Scores]: ...

    @remote(timeout="passes", phase="self-teacher's pass", join=join_by_sample)
    def _score_as_teacher(self, teacher: str, batch: RankBatch) -> Scores: ...

    @remote(timeout="update")
    def set_distillation_coefficient(self, coefficient: float) -> None:
        """Set the coefficient of the divergence from the teachers for this and later steps."""

    @remote(timeout="passes", phase="log-probs of canary prompts", join=join_by_sample)
    def _differences(self, batch: RankBatch, scoring: Scoring) -> dict[str, list[float]]: ...

    @remote(timeout="passes", join=_join_scores)
    def _score_tokens(self, batch: RankBatch) -> tuple[Scores, dict[str, TokenTotals]]: ...

    @remote(timeout="update")
    def _note_advantages(self, batch: RankBatch) -> None: ...

    @remote(timeout="update", join=merge)
    def _update(self, batch: RankBatch) -> dict[str, Metric]: ...

    @remote(timeout="update")
    def _end_epoch(self) -> None: ...

    @remote(timeout="update")
    def end_step(self) -> None:
        """Discard the scores that forward passes have kept for the step's samples."""

    @remote(timeout="update", join=join_by_sample)
    def take_advantages(self) -> dict[str, float]:
        """Collect the mean advantage over the trained tokens of each trained sample from the ranks, by sample id."""
        ...

    @remote(timeout="update", join=join_by_sample)
    def take_token_details(self) -> dict[str, dict[str, list[float]]]:
        """Collect the per-token details of a few samples from the ranks, by sample id and name."""
        ...

    @remote(timeout="update")
    def adapt_kl(self, divergence: float, num_samples: int) -> None:
        """Adapt the actor's KL coefficient to the step's mean divergence from the reference."""

    @remote(timeout="update")
    def adapt_penalty(self, divergence: float) -> None:
        """Adapt the objective's penalty to the step's mean divergence from the old policy."""

    @remote(timeout="update")
    def renew_reference(self) -> None:
        """Move the actor's reference model towards the policy."""

    @remote(timeout="update")
    def start_profile(self, ranks: Sequence[int]) -> None:
        """Start torch's profiler on these ranks."""

    @remote(timeout="update")
    def stop_profile(self, ranks: Sequence[int], folder: Path) -> None:
        """Stop the profiler on these ranks. Write each rank's profile to a file in the folder."""

    @remote(timeout="refit", join=merge)
    def offload(self, parts: Collection[Part]) -> dict[str, Metric]:
        """Move these parts to host memory until `onload`, skipping parts that the config key `offload` does not list.
        The result is the size of the offloaded parts on all ranks in GB, as metrics."""
        ...

    @remote(timeout="refit")
    def onload(self, parts: Collection[Part]) -> None:
        """Move these parts back to the devices if they are offloaded."""

    @remote(timeout="refit")
    def prepare_refit(self) -> None:
        """Prepare weights for the refit: merge adapters, quantize."""

    @remote(timeout="refit")
    def _publish(self, for_refit: bool) -> Published: ...

    @remote(timeout="refit")
    def _publish_on_gpu(self, readers: Mapping[str, Collection[str]]) -> dict[str, Published]: ...

    @remote(timeout="refit")
    def _connect(self, plan: CompactPlan, rendezvous: Rendezvous) -> None: ...

    @remote(timeout="refit")
    def send(self) -> int:
        """Send each rank's part of the weights in a refit. The result is the number of bytes sent by each rank."""
        ...

    @remote(timeout="refit", join=_add_checksums)
    def _checksums(self, wanted: Sequence[Region], plan: CompactPlan) -> dict[Region, Checksum]: ...

    @remote(timeout="update")
    def examine_device(self) -> DeviceState:
        """Return the state of each rank's device."""
        ...

    @remote(timeout="checkpoint")
    def _check_checkpoint(self, checkpoint: Checkpoint) -> None: ...

    @remote(timeout="checkpoint")
    def _load_checkpoint(self, checkpoint: Checkpoint) -> None: ...

    @remote(timeout="checkpoint")
    def _save_checkpoint(self, checkpoint: Path) -> None: ...

    @remote(timeout="checkpoint", join=all)
    def checkpoint_written(self) -> bool:
        """Return whether each rank has either finished writing its files or failed."""
        ...

    @remote(timeout="checkpoint", join=_join_files)
    def finish_checkpoint(self, checkpoint: Path) -> list[FileRecord]:
        """Wait until the files from all ranks are on disk, and return their records."""
        ...

    @remote(timeout="checkpoint")
    def _export(self, plan: Plan, transport: Transport, out: Path) -> None: ...

    @remote(timeout="checkpoint")
    def _write_part(self, plan: CompactPlan, folder: Path) -> None: ...

    def load_checkpoint(self, checkpoint: Checkpoint) -> Pending[list[None]]:
        """Verify the checkpoint's files, then load it on all ranks. Raise UserError if a file is corrupt."""
        return self._check_checkpoint(checkpoint).then(lambda _: self._load_checkpoint(checkpoint))

    def publish(self, for_refit: bool) -> Pending[dict[str, Published]]:
        """Publish the weights (or their merged or quantized copy for a refit). The result maps each holder's name to
        the shared-memory addresses of its live parameters."""
        return self._publish(for_refit).then(self._by_holder)

    def publish_on_gpu(self, plan: Plan) -> Pending[dict[str, dict[str, Published]]]:
        """Publish the weights on the devices. Return holder name -> reader's holder name -> addresses of the parameters
        that the plan copies from the holder to the reader."""
        readers = readers_of(plan)
        return self._publish_on_gpu.on_each((readers[holder.name],) for holder in self.holders).then(self._by_holder)

    def _by_holder(self, parts: Sequence[T]) -> dict[str, T]:
        return {holder.name: part for holder, part in zip(self.holders, parts, strict=True)}

    def connect(self, plan: CompactPlan, rendezvous: Rendezvous) -> Pending[list[None]]:
        """Set the plan whose parts the ranks send in `send`."""
        return self._connect(share(plan), rendezvous)

    def checksums(self, wanted: Sequence[Region], plan: CompactPlan) -> Pending[dict[Region, Checksum]]:
        """Compute the checksums that these regions should have in every holder. plan: an export plan."""
        return self._checksums(share(wanted), share(plan))

    def keep_log_probs(self, policy: Policy, updates: Updates) -> Pending[dict[str, Scores]]:
        """Submit a forward-only pass whose log-probs stay on the ranks for updates on the same samples. If a later
        epoch may place the samples on different ranks, the result refers to the log-probs by name in TokenBatch."""
        log_probs = self._old_log_probs if policy == "old" else self._reference_log_probs
        passes = [log_probs.on_each(self._by_rank(batches)) for batches in updates]
        return join(passes).then(join_named_scores)

    def score_as_teacher(self, teacher: str, batches: Sequence[RankBatch]) -> Pending[Scores]:
        """Submit the pass of a teacher without a path. See ActorWorker.score_as_teacher."""
        return self._score_as_teacher.on_each((teacher, batch) for (batch,) in self._by_rank(batches))

    def differences(self, batches: Sequence[RankBatch], scoring: Scoring) -> Pending[dict[str, list[float]]]:
        """Compute each response token's log-prob in the trainer minus its log-prob in the engine, by sample id."""
        arguments = [(batch, scoring) for (batch,) in self._by_rank(batches)]
        return self._differences.on_each(arguments)

    def score_tokens(self, updates: Updates) -> Pending[tuple[Scores, dict[str, TokenTotals]]]:
        """Score the samples' tokens. The result contains the scores and, by sample id, totals over the trained
        tokens."""
        scored = [self._score_tokens.on_each(self._by_rank(batches)) for batches in updates]
        return join(scored).then(_join_scores)

    def train(self, epochs: Sequence[Updates], begins_step: bool = True) -> Pending[dict[str, Metric]]:
        """Submit one optimizer step for each update in these epochs. The result contains metrics aggregated over all
        ranks and updates. `begins_step`: whether these are the first epochs in the step, which lasts until
        `end_step`."""
        noted: list[Pending] = []
        if begins_step and self._notes_advantages:  # whitening needs the moments of the advantages of all updates
            noted = [self._note_advantages.on_each(self._by_rank(batches)) for batches in epochs[0]]
        trained: list[Pending[dict[str, Metric]]] = []
        ended: list[Pending] = []
        for updates in epochs:
            for batches in updates:
                trained.append(self._update.on_each(self._by_rank(batches)))
            ended.append(self._end_epoch())
        done = join([*noted, *trained]).then(lambda parts: parts[len(noted) :])
        return done.then(merge_updates).then(lambda metrics: join(ended).then(lambda _: metrics))

    def export(self, plan: Plan, out: Path) -> None:
        """Write the whole model as a Hugging Face folder or, if the config requires it, only its adapters.
        The first rank writes a few tensors at a time. It reads the other ranks' parameters from shared memory or, if
        some ranks are on other nodes, from files that those ranks write next to `out`."""
        if self._exports_adapters is not None:
            plan = self._plan_of_adapters(self._exports_adapters)
        transport: Transport
        parts = out.with_name(f".{out.name}-parts")
        for path in (out, parts):  # an earlier call that failed may have left them
            shutil.rmtree(path, ignore_errors=True)
        if len({process.node.number for process in self._processes}) == 1:
            transport = SharedMemory(self.publish(for_refit=False).result())
        else:
            parts.mkdir()
            folders = [parts / process.name for process in self._processes]
            whole = share(CompactPlan.of(plan))
            self._write_part.on_each((whole, folder) for folder in folders).result()
            transport = RankFiles({h.name: folder for h, folder in zip(self.holders, folders, strict=True)})
        self._export.on_first(plan, transport, out).result()

    def _plan_of_adapters(self, lora: Lora) -> Plan:
        assert lora.rank is not None, "actor.lora.rank is not set"
        holders = [adapter_holder(holder, lora.rank, lora.share_experts) for holder in self.holders]
        return make_plan(holders, [peft_holder(read_config(self._model_folder), lora.rank, lora.share_experts)])

    def save_checkpoint(self, checkpoint: Path) -> Pending[list[None]]:
        """Start writing the model's state to a checkpoint. The Pending is ready when all ranks have copied their
        state."""
        (checkpoint / self._worker_role).mkdir()
        return self._save_checkpoint(checkpoint)

    def written_files(self, checkpoint: Path) -> list[FileRecord] | None:
        """Return the records of all ranks' files, or None while some are still being written. This reads the folder,
        because a rank may take minutes to finish its current call before it answers."""
        return noted_files(checkpoint, self._worker_role, len(self._processes))


class ImageTrainerGroup(TrainerGroup):
    """All ranks that train an image model."""

    @remote(timeout="passes", phase="velocities of canaries", join=_first_result)
    def velocities(self, inputs: Sequence[VelocityInput]) -> list[NDArray[np.float32]]:
        """Compute the velocity at each input, float32 [channels, height, width]."""
        ...


def readers_of(plan: Plan) -> dict[str, dict[str, set[str]]]:
    """Return a mapping: source holder -> destination holder -> names of the source's parameters that it reads."""
    readers: dict[str, dict[str, set[str]]] = {source: {} for source in plan.sources}
    for destination in plan.destinations:
        for copy in plan.into(destination).copies:
            readers[copy.source].setdefault(destination, set()).add(copy.move.source.parameter)
    return readers
