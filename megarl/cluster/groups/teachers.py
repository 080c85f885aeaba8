"""Teachers: frozen language models in Megatron."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import ray

from megarl.cluster.groups.ranks import RankGroup, UntrainedRank
from megarl.cluster.groups.remote import remote
from megarl.cluster.pending import Pending
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import RankBatch, Scores, join_by_sample
from megarl.cluster.session import Session
from megarl.config.model_schema import Teacher
from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.core.sample import SampleRef


@ray.remote(num_cpus=0, max_restarts=0)
class TeacherActor(UntrainedRank):
    """One rank of a teacher."""


class TeacherGroup(RankGroup):
    """All ranks of one teacher."""

    actor_class, title = TeacherActor, "TeacherActor"

    def __init__(self, session: Session, config: Config, teacher: Teacher, folder: Path, processes: Sequence[Process]):
        super().__init__(session, config, "teachers", folder, processes)
        self.role, self.scores = f"teacher {teacher.name}", teacher.scores

    @remote(timeout="passes", join=join_by_sample)
    def _score_tokens(self, batch: RankBatch) -> Scores: ...

    def log_probs(self, samples: Sequence[SampleRef]) -> Pending[Scores]:
        """Return the teacher's log-prob of each response token, float32 [R], by sample id."""
        return self._score_tokens.on_each(self._by_rank(RankBatch.split(samples, self.packing)))


def all_log_probs(
    teachers: Sequence[TeacherGroup], samples: Sequence[SampleRef]
) -> tuple[dict[str, Scores], dict[str, Metric]]:
    """Return the log-probs of each teacher by its name among a sample's scores, and metrics. Teachers share devices, so
    they compute one after another."""
    begin = time.perf_counter()
    scores = {teacher.scores: teacher.log_probs(samples).result() for teacher in teachers}
    return scores, {"teachers/seconds": Metric(time.perf_counter() - begin)}
