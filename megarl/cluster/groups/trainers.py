"""The ranks of a model that the run trains."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from megarl.cluster.groups.group import TimedResult
from megarl.cluster.groups.ranks import RankActor, RankGroup
from megarl.cluster.pending import Pending, join
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import RankBatch, Scores, Updates, join_named_scores, put_scores
from megarl.cluster.session import Session
from megarl.cluster.supervision import segments
from megarl.cluster.supervision.scratch import own_scratch
from megarl.config.model_schema import Lora, Role
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint, FileRecord, noted_files
from megarl.core.metrics import Metric, merge, merge_updates
from megarl.core.types import Scoring, TokenTotals
from megarl.models.folder import read_config
from megarl.resharding.families.adapters import adapter_holder, peft_holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.rank_files import RankFiles
from megarl.resharding.transports.shared_memory import SharedMemory

if TYPE_CHECKING:
    from megarl.data.local_batch import LocalBatch
    from megarl.megatron.workers.actor import ActorWorker, Policy
    from megarl.megatron.workers.trainer import TrainerWorker
    from megarl.resharding.planning.plan import Plan
    from megarl.resharding.transports.p2p import Rendezvous
    from megarl.resharding.transports.published import Published
    from megarl.resharding.transports.transport import Transport
    from megarl.resharding.verification import Checksum, Region


@ray.remote(num_cpus=0, max_restarts=0)
class TrainerActor(RankActor):
    """One rank of a model that the run trains. Its worker is a TrainerWorker."""

    def end_epoch(self) -> TimedResult:
        """Lets go of the epoch's batches, as another one has its samples in other batches."""
        self._batches.clear()
        return self.call(lambda worker: worker.end_epoch())

    def end_step(self) -> TimedResult:
        """Lets go of the step's batches, whose samples do not come back, then ends the worker's step, which gives back
        the batches' memory on the device."""
        self._batches.clear()
        return self.call(lambda worker: worker.end_step())


class TrainerGroup(RankGroup["TrainerWorker"]):
    """All ranks of a model that the run trains. The argument `updates` of its methods has the batches of each update,
    by data-parallel rank."""

    actor_class, title = TrainerActor, "TrainerActor"

    def __init__(self, session: Session, config: Config, role: Role, model_folder: Path, processes: Sequence[Process]):
        super().__init__(session, config, role, model_folder, processes)
        self.offloads = frozenset(config.placed(role).offload)
        self._model_folder, lora = model_folder, config.placed(role).adapters
        self._exports_adapters = lora if lora is not None and lora.export == "adapters" else None
        self._notes_advantages = role == "actor" and config.algorithm.whitens_step

    def load_checkpoint(self, checkpoint: Checkpoint) -> Pending[list[None]]:
        """Loads the checkpoint on all ranks. Raises UserError that names a damaged file, before any rank reads more
        than the files' checksums."""
        role = self._role
        checked = self._submit(
            f"{role}: checksums of the checkpoint",
            "checkpoint",
            "check_checkpoint",
            lambda worker: worker.check_checkpoint(checkpoint, role),
        )
        return checked.then(
            lambda _: self._submit(
                f"{role}: loading the checkpoint",
                "checkpoint",
                "load_checkpoint",
                lambda worker: worker.load_checkpoint(checkpoint, role),
            )
        )

    def prepare_refit(self) -> Pending[list[None]]:
        """Makes of the weights as they are what engines take in their place."""
        return self._submit("preparing weights", "refit", "prepare_refit", lambda worker: worker.prepare_refit())

    def publish(self, for_refit: bool) -> Pending[dict[str, Published]]:
        """Publishes the weights, or what a refit sends in their place. The result has the place of each live parameter
        in shared memory, by holder name."""
        published = self._submit(
            "publishing weights", "refit", "publish", lambda worker, for_refit: worker.publish(for_refit), for_refit
        )
        return published.then(self._by_holder)

    def publish_on_gpu(self, plan: Plan) -> Pending[dict[str, dict[str, Published]]]:
        """Publishes the weights on the devices. The result has, by holder name and name of the reading holder, the
        places of the parameters that the plan copies to it."""
        readers = readers_of(plan)

        def publish(worker: TrainerWorker, names: Mapping[str, set[str]]) -> dict[str, Published]:
            published = worker.publish_on_gpu(names)
            segments.note(own_scratch())  # torch counts them in shared memory
            return published

        arguments = [(readers[holder.name],) for holder in self.holders]
        return self._submit_each("publishing weights", "refit", "publish_on_gpu", publish, arguments).then(
            self._by_holder
        )

    def _by_holder(self, parts: Sequence[dict]) -> dict[str, dict]:
        return {holder.name: part for holder, part in zip(self.holders, parts, strict=True)}

    def connect(self, plan: CompactPlan, rendezvous: Rendezvous) -> Pending[list[None]]:
        """Makes this plan the one of which `start_sending` sends each rank's part."""
        return self._submit(
            "connecting for the refit",
            "refit",
            "connect",
            lambda worker, whole, rendezvous: worker.connect(whole.part([worker.holder.name]), rendezvous),
            ray.put(plan),
            rendezvous,
        )

    def start_sending(self) -> dict[str, ray.ObjectRef]:
        """Starts each rank's part of a refit. Returns the calls, to be waited for with those that receive."""
        return self._calls("send", lambda worker: worker.send())

    def checksums(self, wanted: Sequence[Region], plan: CompactPlan) -> Pending[dict[Region, Checksum]]:
        """Computes the checksums that holders of these regions should have. plan: the plan of an export."""
        parts = self._submit(
            "checksums of the weights",
            "refit",
            "checksums",
            lambda worker, wanted, whole: worker.checksums(wanted, whole.part([worker.holder.name])),
            ray.put(wanted),
            ray.put(plan),
        )
        return parts.then(_add_checksums)

    def keep_log_probs(self, policy: Policy, updates: Updates) -> Pending[dict[str, Scores]]:
        """Submits a forward-only pass, whose log-probs stay with the ranks for the updates of the same samples. Where
        another epoch may have the samples on other ranks, the result has references to them, by their name in
        TokenBatch."""
        passes = [
            self._submit_batches(
                f"{policy} log-probs",
                "passes",
                f"{policy}_log_probs",
                lambda worker, batch: _keep_log_probs(worker, policy, batch),
                batches,
            )
            for batches in updates
        ]
        return join(passes).then(lambda parts: join_named_scores([part for ranks in parts for part in ranks]))

    def differences(self, batches: Sequence[RankBatch], scoring: Scoring) -> Pending[dict[str, list[float]]]:
        """Computes the trainer's less the engine's log-prob of each response token, by sample."""
        parts = self._submit_batches(
            "log-probs of canary prompts",
            "passes",
            "canaries",
            lambda worker, batch: worker.differences(batch, scoring),
            batches,
        )
        return parts.then(lambda found: {name: values for part in found for name, values in part.items()})

    def score_tokens(self, updates: Updates) -> Pending[tuple[Scores, dict[str, TokenTotals]]]:
        """Scores the samples' tokens. The result has references to the scores and, by sample, totals of the trained
        tokens' scores."""
        phase = f"{self._role}: scores"
        scored = [self._submit_batches(phase, "passes", "score_tokens", _score_tokens, batches) for batches in updates]
        return join(scored).then(lambda parts: _join_scores([part for ranks in parts for part in ranks]))

    def train(self, epochs: Sequence[Updates], begins_step: bool = True) -> Pending[dict[str, Metric]]:
        """Submits one optimizer step for each update of these epochs. The result has the metrics over all ranks and
        updates. begins_step: whether they are the first of the step, which `end_step` ends."""
        noted = self._note_advantages(epochs[0]) if begins_step and self._notes_advantages else []
        trained, ended = [], []
        for updates in epochs:
            trained += [
                self._submit_batches(
                    f"{self._role} update",
                    "update",
                    "update",
                    lambda worker, batch: worker.update(batch),
                    batches,
                )
                for batches in updates
            ]
            ended.append(self._end_epoch())
        done = join([*noted, *trained]).then(lambda parts: parts[len(noted) :])
        metrics = done.then(lambda parts: merge_updates([merge(ranks) for ranks in parts]))
        return metrics.then(lambda merged: join(ended).then(lambda _: merged))

    def _note_advantages(self, updates: Updates) -> list[Pending[list[None]]]:
        """Submits the estimates of all updates' advantages, whose moments whiten those of each update."""
        return [
            self._submit_batches(
                f"{self._role}: advantages",
                "update",
                "note_advantages",
                lambda worker, batch: worker.note_advantages(batch),
                batches,
            )
            for batches in updates
        ]

    def take_advantages(self) -> Pending[dict[str, float]]:
        """Takes from the ranks the mean advantage over the trained tokens of each sample of the step's updates."""
        taken = self._submit(
            "advantages of the samples", "update", "take_advantages", lambda worker: worker.take_advantages()
        )
        return taken.then(lambda parts: {name: advantage for part in parts for name, advantage in part.items()})

    def take_token_details(self) -> Pending[dict[str, dict[str, list[float]]]]:
        """Takes from the ranks what single tokens of a few samples have, by sample and name."""
        taken = self._submit(
            "details of tokens", "update", "take_token_details", lambda worker: worker.take_token_details()
        )
        return taken.then(lambda parts: {name: rows for part in parts for name, rows in part.items()})

    def _end_epoch(self) -> Pending[list[None]]:
        """Completes the parameters for those who read them."""
        calls = {name: actor.end_epoch.remote() for name, actor in self._actors.items()}
        return self._read("end of epoch", "update", "end_epoch", calls)

    def end_step(self) -> Pending[list[None]]:
        """Forgets the scores that passes have kept of the step's samples."""
        calls = {name: actor.end_step.remote() for name, actor in self._actors.items()}
        return self._read("end of step", "update", "end_step", calls)

    def start_profile(self, ranks: Sequence[int]) -> Pending[list[None]]:
        """Starts torch's profiler on these ranks, as far as there are such."""
        return self._submit(
            f"{self._role}: profile", "update", "start_profile", lambda worker: worker.start_profile(ranks)
        )

    def stop_profile(self, ranks: Sequence[int], folder: Path) -> Pending[list[None]]:
        """Writes the profile of each of these ranks into a file of the folder."""
        role = self._role
        return self._submit(
            f"{role}: profile", "update", "stop_profile", lambda worker: worker.stop_profile(ranks, folder, role)
        )

    def adapt_kl(self, divergence: float, num_samples: int) -> Pending[list[None]]:
        """Moves the actor's KL coefficient."""
        return self._submit(
            "change of the KL's coefficient",
            "update",
            "adapt_kl",
            lambda worker: worker.adapt_kl(divergence, num_samples),
        )

    def adapt_penalty(self, divergence: float) -> Pending[list[None]]:
        """Moves the penalty of the actor's objective."""
        return self._submit(
            "change of the penalty", "update", "adapt_penalty", lambda worker: worker.adapt_penalty(divergence)
        )

    def renew_reference(self) -> Pending[list[None]]:
        """Moves the actor's reference to the policy."""
        return self._submit(
            "renewal of the reference", "update", "renew_reference", lambda worker: worker.renew_reference()
        )

    def offload(self, parts: Collection[str]) -> Pending[dict[str, Metric]]:
        """Makes room on the devices, until `onload`: moves these parts away, as far as the key `offload` names them.
        The result has the bytes that this frees over all ranks, as metrics."""
        return self._submit(
            f"{self._role}: to host memory", "refit", "offload", lambda worker: worker.offload(parts)
        ).then(merge)

    def onload(self, parts: Collection[str]) -> Pending[list[None]]:
        return self._submit(
            f"{self._role}: back from host memory", "refit", "onload", lambda worker: worker.onload(parts)
        )

    def export(self, plan: Plan, out: Path) -> None:
        """Makes the first rank write the whole model as a Hugging Face folder, a few tensors at a time, or its adapters
        as a PEFT folder, where the recipe asks for it. It reads the others' where they lie, or, where some are on other
        nodes, from files that they have written beside `out`."""
        if self._exports_adapters is not None:
            plan = self._plan_of_adapters(self._exports_adapters)
        transport: Transport
        if len({process.node.number for process in self._processes}) == 1:
            transport = SharedMemory(self.publish(for_refit=False).result())
        else:
            parts = out.with_name(f".{out.name}-parts")
            parts.mkdir()
            folders = [parts / process.name for process in self._processes]
            self._write_parts(CompactPlan.of(plan), folders).result()
            transport = RankFiles({h.name: folder for h, folder in zip(self.holders, folders, strict=True)})
        self._write_model(plan, transport, out).result()

    def _plan_of_adapters(self, lora: Lora) -> Plan:
        holders = [adapter_holder(holder, lora.rank, lora.share_experts) for holder in self.holders]
        return make_plan(holders, [peft_holder(read_config(self._model_folder), lora.rank, lora.share_experts)])

    def _write_model(self, plan: Plan, transport: Transport, out: Path) -> Pending[None]:
        return self._submit_to_first(
            "export", "checkpoint", "export", lambda worker: worker.export(plan, transport, out)
        )

    def _write_parts(self, plan: CompactPlan, folders: Sequence[Path]) -> Pending[list[None]]:
        """Makes each rank write the parameters of which the plan takes something, into its folder."""
        whole = ray.put(plan)

        def write(worker: TrainerWorker, whole: CompactPlan, folder: Path) -> None:
            worker.write_part(whole.part([worker.holder.name]), folder)

        arguments = [(whole, folder) for folder in folders]
        return self._submit_each("export: parts of the ranks", "checkpoint", "write_part", write, arguments)

    def save_checkpoint(self, checkpoint: Path) -> Pending[list[None]]:
        """Starts a checkpoint in a folder of the role in this one. It is done when all ranks have copied what they will
        write."""
        role = self._role
        (checkpoint / role).mkdir()
        return self._submit(
            f"{role}: copy for the checkpoint",
            "checkpoint",
            "save_checkpoint",
            lambda worker: worker.save_checkpoint(checkpoint, role),
        )

    def checkpoint_written(self) -> Pending[bool]:
        """Asks whether all ranks have written their files, or failed to."""
        written = self._submit(
            f"{self._role}: state of the checkpoint",
            "checkpoint",
            "checkpoint_written",
            lambda worker: worker.checkpoint_written(),
        )
        return written.then(all)

    def written_files(self, checkpoint: Path) -> list[FileRecord] | None:
        """Returns the records of the files of all ranks, None as long as some are being written. No rank is asked, as
        its answer would come after the call that it is busy with, which may take minutes."""
        return noted_files(checkpoint, self._role, len(self._processes))

    def finish_checkpoint(self, checkpoint: Path) -> Pending[list[FileRecord]]:
        """Waits for the files of all ranks, and returns their records once they are on the disk."""
        records = self._submit(
            f"{self._role}: writing the checkpoint",
            "checkpoint",
            "finish_checkpoint",
            lambda worker: worker.finish_checkpoint(checkpoint),
        )
        return records.then(lambda parts: [record for part in parts for record in part])


def _keep_log_probs(worker: ActorWorker, policy: Policy, batch: LocalBatch) -> dict[str, Scores]:
    return {name: put_scores(scores) for name, scores in worker.keep_log_probs(policy, batch).items()}


def _score_tokens(worker: TrainerWorker, batch: LocalBatch) -> tuple[Scores, dict[str, TokenTotals]]:
    """Returns references to the scores, and totals of the trained tokens' scores, by sample."""
    scores = worker.score_tokens(batch)
    masks = {item.sample.id: item.sample.response_mask for item in batch.samples}
    totals = {
        name: TokenTotals.of(list(compress(sample_scores.tolist(), masks[name])))
        for name, sample_scores in scores.items()
    }
    return put_scores(scores), totals


def _join_scores(parts: Sequence[tuple[Scores, dict[str, TokenTotals]]]) -> tuple[Scores, dict[str, TokenTotals]]:
    scores: Scores = {}
    totals: dict[str, TokenTotals] = {}
    for part_scores, part_totals in parts:
        scores |= part_scores
        totals |= part_totals
    return scores, totals


def _add_checksums(parts: Sequence[Mapping[Region, Checksum]]) -> dict[Region, Checksum]:
    whole: dict[Region, Checksum] = {}
    for part in parts:
        for region, checksum in part.items():
            whole[region] = whole[region] + checksum if region in whole else checksum
    return whole


def readers_of(plan: Plan) -> dict[str, dict[str, set[str]]]:
    """Returns source -> destination that it gives something to -> which of the source's parameters."""
    readers: dict[str, dict[str, set[str]]] = {source: {} for source in plan.sources}
    for destination in plan.destinations:
        for copy in plan.into(destination).copies:
            readers[copy.source].setdefault(destination, set()).add(copy.move.source.parameter)
    return readers
