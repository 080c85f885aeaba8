"""The ranks of a reward model in Megatron."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray

from megarl.cluster.groups.engines import RemoteSample
from megarl.cluster.groups.group import TimedResult
from megarl.cluster.groups.ranks import RankActor, RankGroup
from megarl.cluster.pending import Pending
from megarl.cluster.rank_batch import RankBatch, SampleRef, Scores, join_scores, put_scores
from megarl.data.packing import Lengths, schedule

if TYPE_CHECKING:
    from megarl.data.local_batch import LocalBatch
    from megarl.megatron.workers.reward_model import RewardModelWorker


@ray.remote(num_cpus=0, max_restarts=0)
class RewardModelActor(RankActor):
    """One rank of a reward model. It scores samples once, and does not keep them."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> TimedResult:
        answer = super().call(function, *arguments)
        self._batches.clear()
        return answer


class RewardModelGroup(RankGroup["RewardModelWorker"]):
    """All ranks of a reward model."""

    actor_class, title = RewardModelActor, "RewardModelActor"

    def scores(self, samples: Sequence[RemoteSample]) -> Pending[Scores]:
        """Scores each response token, float32 [R], or with a sequence classifier the sample, [1]."""
        microbatches = schedule([Lengths.of(sample.info) for sample in samples], self.packing)
        sample_refs = [SampleRef.unscored(sample.info.id, sample.ref) for sample in samples]
        batches = [RankBatch.of(sample_refs, members) for members in microbatches]
        scores = self._submit_batches("reward model: scores", "rewards", "score_tokens", _score_tokens, batches)
        return scores.then(join_scores)


def _score_tokens(worker: RewardModelWorker, batch: LocalBatch) -> Scores:
    return put_scores(worker.score_tokens(batch))
