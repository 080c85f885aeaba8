"""The ranks of a reward model in Megatron."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from megarl.cluster.groups.engines import RemoteSample
from megarl.cluster.groups.ranks import RankActor, RankGroup
from megarl.cluster.rank_batch import Assignment, Scores, Share, put_scores
from megarl.data.packing import Lengths, schedule


@ray.remote(num_cpus=0, max_restarts=0)
class RewardModelActor(RankActor):
    def scores(self, share: Share) -> Scores:
        return put_scores(self._worker.score_tokens(share.fetch(), share.microbatches))


class RewardModelGroup(RankGroup):
    actor_class = RewardModelActor

    def scores(self, samples: Sequence[RemoteSample]) -> Scores:
        """Of each response token, float32 [R]; of a sequence classifier that of the sample, [1]."""
        microbatches = schedule([Lengths.of(sample.info) for sample in samples], self.packing)
        assignments = [Assignment.unscored(sample.ref) for sample in samples]
        shares = [Share.of(assignments, own) for own in microbatches]
        calls = {name: actor.scores.remote(share) for name, actor, share in self._dealt(shares)}
        answers = self._session.wait(calls, "reward model: scores")
        return {sample: ref for answer in answers for sample, ref in answer.items()}
