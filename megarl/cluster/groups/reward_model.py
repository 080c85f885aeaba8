"""A reward model's Megatron ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray

from megarl.cluster.groups.ranks import RankActor, RankGroup
from megarl.cluster.groups.remote import remote
from megarl.cluster.pending import Pending
from megarl.cluster.rank_batch import RankBatch, Scores, join_scores, put_scores
from megarl.core.types import SampleRef
from megarl.data.packing import Lengths, schedule

if TYPE_CHECKING:
    from megarl.data.local_batch import LocalBatch


@ray.remote(num_cpus=0, max_restarts=0)
class RewardModelActor(RankActor):
    """One rank in a reward model."""

    def score_tokens(self, batch: LocalBatch) -> Scores:
        """Score samples without caching them for later passes."""
        self._batches.clear()
        return put_scores(self._worker.score_tokens(batch))


class RewardModelGroup(RankGroup):
    """All ranks in a reward model."""

    actor_class, title = RewardModelActor, "RewardModelActor"

    @remote(timeout="rewards", join=join_scores)
    def _score_tokens(self, batch: RankBatch) -> Scores: ...

    def scores(self, samples: Sequence[SampleRef]) -> Pending[Scores]:
        """Score each response token, float32 [R], or, with a sequence classifier, each sample, float32 [1]."""
        microbatches = schedule(list(map(Lengths.of, samples)), self.packing)
        batches = [RankBatch.of(samples, members) for members in microbatches]
        return self._score_tokens.on_each(self._by_rank(batches))
