"""Teachers: frozen language models in Megatron."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import ray

from megarl.cluster.groups.ranks import RankGroup, UntrainedRank
from megarl.cluster.groups.remote import remote
from megarl.cluster.pending import Pending, ready
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import RankBatch, Scores, join_by_sample
from megarl.cluster.session import Session
from megarl.config.model_schema import Teacher
from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef


@ray.remote(num_cpus=0, max_restarts=0)
class TeacherActor(UntrainedRank):
    """One rank of a teacher."""


class TeacherGroup(RankGroup):
    """All ranks of one teacher."""

    actor_class, title = TeacherActor, "TeacherActor"

    def __init__(self, session: Session, config: Config, teacher: Teacher, folder: Path, processes: Sequence[Process]):
        super().__init__(session, config, "teachers", folder, processes)
        self.role, self.scores, self._teacher = f"teacher {teacher.name}", teacher.scores, teacher
        self._prompts: frozenset[str] | None = None
        """Ids of the prompts from the teacher's sources; None: all prompts."""

    @remote(timeout="passes", join=join_by_sample)
    def _score_tokens(self, batch: RankBatch) -> Scores: ...

    def select(self, prompts: Sequence[Prompt], source_column: str | None) -> None:
        """Restrict the teacher to the prompts from its sources."""
        if self._teacher.sources is not None and source_column is not None:
            own = (prompt.id for prompt in prompts if self._teacher.applies_to(prompt.columns[source_column]))
            self._prompts = frozenset(own)

    def score_tokens(self, samples: Sequence[SampleRef]) -> Pending[Scores]:
        """Return the teacher's log-prob of each response token, float32 [R], or its hidden states, [R, h], by sample
        id, for the samples of its prompts. See TeacherWorker.score_tokens."""
        own = [sample for sample in samples if self._prompts is None or sample.prompt_id in self._prompts]
        return self._score_tokens.on_each(self._by_rank(RankBatch.split(own, self.packing))) if own else ready({})


def all_scores(
    teachers: Sequence[TeacherGroup], samples: Sequence[SampleRef]
) -> tuple[dict[str, Scores], dict[str, Metric]]:
    """Return the scores of each teacher by its name among a sample's scores, and metrics. Teachers share devices, so
    they compute one after another."""
    begin = time.perf_counter()
    scores = {teacher.scores: teacher.score_tokens(samples).result() for teacher in teachers}
    return scores, {"teachers/seconds": Metric(time.perf_counter() - begin)}
