"""The ranks of a model that the run trains: one Ray actor each, called together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from megarl.cluster.groups.ranks import RankActor, RankGroup
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import FetchedBatches, RankBatch, Scores, put_scores
from megarl.cluster.session import Session
from megarl.cluster.supervision import segments
from megarl.config.schema import Config, Role
from megarl.core.checkpoint import Checkpoint, FileRecord
from megarl.core.metrics import Metric, merge
from megarl.core.types import TokenTotals
from megarl.resharding.planning.compact import CompactPlan

if TYPE_CHECKING:
    from megarl.megatron.workers.actor import Policy
    from megarl.resharding.planning.plan import Plan
    from megarl.resharding.transports.p2p import Rendezvous, Sent
    from megarl.resharding.transports.published import Published
    from megarl.resharding.transports.shared_memory import SharedMemory
    from megarl.resharding.verification import Checksum, Region


@ray.remote(num_cpus=0, max_restarts=0)
class TrainerActor(RankActor):
    def __init__(self, *settings: Any):
        super().__init__(*settings)
        self._batches = FetchedBatches()

    def publish(self) -> Published:
        return self._worker.publish()

    def publish_on_gpu(self, readers: Mapping[str, Collection[str]], scratch: Path) -> dict[str, Published]:
        published = self._worker.publish_on_gpu(readers)
        segments.note(scratch)  # torch counts them in shared memory
        return published

    def connect(self, plan: CompactPlan, rendezvous: Rendezvous) -> None:
        self._worker.connect(plan.part([self._worker.holder.name]), rendezvous)

    def send(self) -> Sent:
        return self._worker.send()

    def checksums(self, wanted: Sequence[Region], plan: CompactPlan) -> dict[Region, Checksum]:
        return self._worker.checksums(wanted, plan.part([self._worker.holder.name]))

    def keep_log_probs(self, policy: Policy, rank_batch: RankBatch) -> None:
        self._worker.keep_log_probs(policy, self._batches.fetch(rank_batch))

    def score_tokens(self, rank_batch: RankBatch) -> tuple[Scores, dict[str, TokenTotals]]:
        """By sample: where its scores can be fetched by reference, and what those of its trained tokens amount to."""
        batch = self._batches.fetch(rank_batch)
        scores = self._worker.score_tokens(batch)
        masks = {item.sample.id: item.sample.response_mask for item in batch.samples}
        totals = {name: TokenTotals.of(list(compress(own.tolist(), masks[name]))) for name, own in scores.items()}
        return put_scores(scores), totals

    def update(self, rank_batch: RankBatch) -> dict[str, Metric]:
        return self._worker.update(self._batches.fetch(rank_batch))

    def end_step(self) -> None:
        self._batches.clear()  # first: what they have on the device goes back to it at the end of the step
        self._worker.end_step()

    def renew_reference(self) -> None:
        self._worker.renew_reference()

    def adapt_kl(self, divergence: float, num_samples: int) -> None:
        self._worker.adapt_kl(divergence, num_samples)

    def offload(self) -> dict[str, Metric]:
        return self._worker.offload()

    def onload(self) -> None:
        self._worker.onload()

    def export(self, plan: Plan, transport: SharedMemory, out: Path) -> None:
        self._worker.export(plan, transport, out)

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._worker.check_checkpoint(checkpoint, self._role)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._worker.load_checkpoint(checkpoint, self._role)

    def save_checkpoint(self, checkpoint: Path) -> None:
        self._worker.save_checkpoint(checkpoint, self._role)

    def checkpoint_written(self) -> bool:
        return self._worker.checkpoint_written()

    def finish_checkpoint(self, checkpoint: Path) -> list[FileRecord]:
        return self._worker.finish_checkpoint(checkpoint)


class TrainerGroup(RankGroup):
    """All ranks of a model that the run trains."""

    actor_class = TrainerActor

    def __init__(self, session: Session, config: Config, role: Role, model_folder: Path, processes: Sequence[Process]):
        super().__init__(session, config, role, model_folder, processes)
        self.offloads = bool(config.placed(role).offload)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Raises ValueError that names a damaged file, before any rank reads more than its checksum."""
        checks = {name: actor.check_checkpoint.remote(checkpoint) for name, actor in self._actors.items()}
        self._session.wait(checks, f"{self._role}: checksums of the checkpoint")
        calls = {name: actor.load_checkpoint.remote(checkpoint) for name, actor in self._actors.items()}
        self._session.wait(calls, f"{self._role}: loading the checkpoint")

    def publish(self) -> dict[str, Published]:
        """By holder name: where each live parameter lies in shared memory."""
        published = self._session.wait(
            {name: actor.publish.remote() for name, actor in self._actors.items()}, "publishing weights"
        )
        return {holder.name: parameters for holder, parameters in zip(self.holders, published, strict=True)}

    def publish_on_gpu(self, plan: Plan) -> dict[str, dict[str, Published]]:
        """By holder name and name of the holder that reads: where the parameters are that the plan copies to it."""
        readers = readers_of(plan)
        calls = {
            name: actor.publish_on_gpu.remote(readers[holder.name], self._session.scratch)
            for (name, actor), holder in zip(self._actors.items(), self.holders, strict=True)
        }
        published = self._session.wait(calls, "publishing weights")
        return {holder.name: own for holder, own in zip(self.holders, published, strict=True)}

    def connect(self, plan: CompactPlan, rendezvous: Rendezvous) -> None:
        """From now on `sending` is each rank's part of this plan."""
        same = ray.put(plan), rendezvous
        calls = {name: actor.connect.remote(*same) for name, actor in self._actors.items()}
        self._session.wait(calls, "connecting for the refit")

    def sending(self) -> dict[str, ray.ObjectRef]:
        """Calls, under way, by which the ranks send their parts of a refit, for the caller to wait for."""
        return {name: actor.send.remote() for name, actor in self._actors.items()}

    def checksums(self, wanted: Sequence[Region], plan: CompactPlan) -> dict[Region, Checksum]:
        """What whoever has these regions should have. plan: the export's."""
        same = ray.put(wanted), ray.put(plan)
        calls = {name: actor.checksums.remote(*same) for name, actor in self._actors.items()}
        whole: dict[Region, Checksum] = {}
        for part in self._session.wait(calls, "checksums of the weights"):
            for region, checksum in part.items():
                whole[region] = whole[region] + checksum if region in whole else checksum
        return whole

    def keep_log_probs(self, policy: Policy, rank_batches: Sequence[RankBatch]) -> None:
        """rank_batches: by data-parallel rank."""
        calls = {
            name: actor.keep_log_probs.remote(policy, rank_batch)
            for name, actor, rank_batch in self._dealt(rank_batches)
        }
        self._session.wait(calls, f"{policy} log-probs")

    def score_tokens(self, updates: Sequence[Sequence[RankBatch]]) -> tuple[Scores, dict[str, TokenTotals]]:
        """Of the samples of all updates: where what the model says of their tokens is, and what that of the trained
        ones amounts to. updates: the rank_batches of each, by data-parallel rank."""
        where: Scores = {}
        totals: dict[str, TokenTotals] = {}
        for rank_batches in updates:
            calls = {
                name: actor.score_tokens.remote(rank_batch) for name, actor, rank_batch in self._dealt(rank_batches)
            }
            for own, amounts in self._session.wait(calls, f"{self._role}: scores"):
                where |= own
                totals |= amounts
        return where, totals

    def update(self, rank_batches: Sequence[RankBatch]) -> Mapping[str, Metric]:
        """One optimizer step; rank_batches: by data-parallel rank. Returns metrics over all ranks."""
        calls = {name: actor.update.remote(rank_batch) for name, actor, rank_batch in self._dealt(rank_batches)}
        return merge(self._session.wait(calls, f"{self._role} update"))

    def end_step(self) -> None:
        calls = {name: actor.end_step.remote() for name, actor in self._actors.items()}
        self._session.wait(calls, "end of step")

    def adapt_kl(self, divergence: float, num_samples: int) -> None:
        """Of the actor."""
        calls = {name: actor.adapt_kl.remote(divergence, num_samples) for name, actor in self._actors.items()}
        self._session.wait(calls, "change of the KL's coefficient")

    def renew_reference(self) -> None:
        """Of the actor."""
        calls = {name: actor.renew_reference.remote() for name, actor in self._actors.items()}
        self._session.wait(calls, "renewal of the reference")

    def offload(self) -> Mapping[str, Metric]:
        """Makes room on the devices, until `onload`. Returns by how much, over all ranks."""
        calls = {name: actor.offload.remote() for name, actor in self._actors.items()}
        return merge(self._session.wait(calls, f"{self._role}: to host memory"))

    def onload(self) -> None:
        calls = {name: actor.onload.remote() for name, actor in self._actors.items()}
        self._session.wait(calls, f"{self._role}: back from host memory")

    def export(self, plan: Plan, transport: SharedMemory, out: Path) -> None:
        """The first rank writes the whole model, a few tensors at a time."""
        name, actor = next(iter(self._actors.items()))
        self._session.wait({name: actor.export.remote(plan, transport, out)}, "export")

    def save_checkpoint(self, checkpoint: Path) -> None:
        """Returns when all ranks have copied what they will write, into a folder of the role in this one."""
        (checkpoint / self._role).mkdir()
        calls = {name: actor.save_checkpoint.remote(checkpoint) for name, actor in self._actors.items()}
        self._session.wait(calls, f"{self._role}: copy for the checkpoint")

    def checkpoint_written(self) -> bool:
        """Whether all ranks have written their files, or failed to."""
        calls = {name: actor.checkpoint_written.remote() for name, actor in self._actors.items()}
        return all(self._session.wait(calls, f"{self._role}: state of the checkpoint"))

    def finish_checkpoint(self, checkpoint: Path) -> list[FileRecord]:
        """The files of all ranks, once they are on the disk."""
        calls = {name: actor.finish_checkpoint.remote(checkpoint) for name, actor in self._actors.items()}
        answers = self._session.wait(calls, f"{self._role}: writing the checkpoint")
        return [record for records in answers for record in records]


def readers_of(plan: Plan) -> dict[str, dict[str, set[str]]]:
    """Source -> destination that it gives something to -> which of the source's parameters."""
    readers: dict[str, dict[str, set[str]]] = {source: {} for source in plan.sources}
    for destination in plan.destinations:
        for copy in plan.into(destination).copies:
            readers[copy.source].setdefault(destination, set()).add(copy.move.source.parameter)
    return readers
