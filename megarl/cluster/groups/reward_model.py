"""The ranks of a reward model in Megatron."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from megarl.cluster.groups.engines import RemoteSample
from megarl.cluster.groups.ranks import RankActor, RankGroup
from megarl.cluster.rank_batch import RankBatch, SampleRef, Scores, put_scores
from megarl.data.packing import Lengths, schedule


@ray.remote(num_cpus=0, max_restarts=0)
class RewardModelActor(RankActor):
    def scores(self, rank_batch: RankBatch) -> Scores:
        return put_scores(self._worker.score_tokens(rank_batch.fetch()))


class RewardModelGroup(RankGroup):
    actor_class = RewardModelActor

    def scores(self, samples: Sequence[RemoteSample]) -> Scores:
        """Of each response token, float32 [R]; of a sequence classifier that of the sample, [1]."""
        microbatches = schedule([Lengths.of(sample.info) for sample in samples], self.packing)
        sample_refs = [SampleRef.unscored(sample.ref) for sample in samples]
        rank_batches = [RankBatch.of(sample_refs, own) for own in microbatches]
        calls = {name: actor.scores.remote(rank_batch) for name, actor, rank_batch in self._dealt(rank_batches)}
        answers = self._session.wait(calls, "reward model: scores")
        return {sample: ref for answer in answers for sample, ref in answer.items()}
