"""The ranks of a reward model in Megatron."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from megarl.cluster.engine_group import RemoteSample
from megarl.cluster.rank_group import RankActor, RankGroup
from megarl.cluster.share import Assignment, Scores, Share
from megarl.data.packing import Lengths, schedule


class RewardModelGroup(RankGroup):
    actor_class = ray.remote(num_cpus=0, max_restarts=0)(RankActor)

    def scores(self, samples: Sequence[RemoteSample]) -> Scores:
        """Of each response token, float32 [R]; of a sequence classifier that of the sample, [1]."""
        microbatches = schedule([Lengths.of(sample.info) for sample in samples], self.packing)
        assignments = [Assignment.unscored(sample.ref) for sample in samples]
        return self.token_scores([Share.of(assignments, own) for own in microbatches])
