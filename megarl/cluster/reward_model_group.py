"""The ranks of the reward model."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from megarl.cluster.engine_group import RemoteSample
from megarl.cluster.rank_group import RankActor, RankGroup
from megarl.cluster.share import Assignment, Share
from megarl.data.packing import Lengths, schedule


@ray.remote(num_cpus=0, max_restarts=0)
class RewardModelActor(RankActor):
    def scores(self, share: Share) -> dict[str, float]:
        return self._worker.scores([item.fetch() for item in share.samples], share.microbatches)


class RewardModelGroup(RankGroup):
    actor_class = RewardModelActor

    def scores(self, samples: Sequence[RemoteSample]) -> dict[str, float]:
        """Sample id -> what the reward model says of it; not finite where it fails."""
        microbatches = schedule([Lengths.of(sample.info) for sample in samples], self.packing)
        assignments = [Assignment.unscored(sample.ref) for sample in samples]
        shares = [Share.of(assignments, own) for own in microbatches]
        calls = {name: actor.scores.remote(share) for name, actor, share in self._dealt(shares)}
        answers = self._session.wait(calls, "reward model")
        return {sample: score for answer in answers for sample, score in answer.items()}
