"""Teachers: frozen language models in Megatron or vLLM, and the policy or reference with privileged prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle

from megarl.cluster.groups.ranks import RankGroup, UntrainedRank
from megarl.cluster.groups.remote import remote
from megarl.cluster.groups.scoring_engines import ScoringEngineActor, ScoringEngineGroup
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.pending import Pending, ready
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import RankBatch, Replacement, Scores, join_by_sample
from megarl.cluster.session import Session
from megarl.config.model_schema import Teacher
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.core.sample import SampleRef, prompt_checksum
from megarl.data.packing import Packing
from megarl.models.folder import vocab_size

if TYPE_CHECKING:
    from megarl.data.prompts import PromptSet
    from megarl.rollout.vllm.teacher import VllmTeacher


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """The prompts that a teacher scores.

    Attributes:
        names: ids of the prompts; None: all prompts.
        privileged: prompt id -> token ids that replace the prompt's for the teacher, int32 [P]; None: the teacher sees
            the prompt itself, or the feedback on each sample.
        checksums: prompt id -> checksum of the prompt's own token ids; None without a prompt column.
        context_length: maximum number of tokens in a sample whose prompt is replaced; 0 before the data is known.
        vocab_size: number of rows in the teacher's embedding; None for the actor's own.
    """

    teacher: Teacher
    names: frozenset[str] | None = None
    privileged: Mapping[str, NDArray[np.int32]] | None = None
    checksums: Mapping[str, int] | None = None
    context_length: int = 0
    vocab_size: int | None = None

    def among(self, data: PromptSet, config: Config) -> ScoredPrompts:
        """Return this teacher's prompts in the data: the rows from its sources. With a prompt column, omit rows without
        a value in it."""
        teacher = self.teacher
        source_column, names, prompts = config.data.source_column, None, data.prompts
        if teacher.sources is not None and source_column is not None:
            prompts = [prompt for prompt in prompts if teacher.applies_to(prompt.columns[source_column])]
            names = frozenset(prompt.id for prompt in prompts)
        known = replace(self, names=names, context_length=config.rollout.context_length)
        if teacher.prompt_column is None:
            return known
        privileged = data.privileged[teacher.prompt_column]
        prompts = [prompt for prompt in prompts if prompt.id in privileged]
        return replace(
            known,
            names=frozenset(prompt.id for prompt in prompts),
            privileged=privileged,
            checksums={prompt.id: prompt_checksum(prompt.token_ids) for prompt in prompts},
        )

    def select_samples(
        self, samples: Sequence[SampleRef], feedback: Mapping[str, Scores] = MappingProxyType({})
    ) -> tuple[list[SampleRef], dict[str, Replacement]]:
        """Return the samples that the teacher scores, and the token ids that replace their prompts, by sample id; empty
        if the teacher sees the samples' own prompts. Omit samples with a token that is not in the teacher's embedding,
        and samples that would exceed rollout.context_length with the privileged prompt. If the teacher sees feedback,
        also omit samples without feedback. If it has a prompt column, omit samples that do not start with the row's
        prompt, and raise a UserError if the first sample of a rollout does not start with it. `feedback`: references to
        prompts with feedback, int32 [P], by teacher and sample id."""
        own = [sample for sample in samples if self.names is None or sample.prompt_id in self.names]
        # The policy may sample a padding row of its vocabulary, which no tokenizer maps to a token.
        own = [sample for sample in own if self.vocab_size is None or sample.largest_id < self.vocab_size]
        privileged: dict[str, Replacement] = {}
        if self.teacher.feedback is not None:
            given = feedback.get(self.teacher.name, {})
            privileged = {sample.id: given[sample.id] for sample in own if sample.id in given}
        elif self.privileged is not None:
            privileged = {item.id: self.privileged[item.prompt_id] for item in own if self._starts_with_prompt(item)}
        else:
            return own, {}
        own = [item for item in own if item.id in privileged and self._fits(item, len(privileged[item.id]))]
        return own, {item.id: privileged[item.id] for item in own}

    def batches(
        self, samples: Sequence[SampleRef], packing: Packing, feedback: Mapping[str, Scores] = MappingProxyType({})
    ) -> list[RankBatch]:
        """Return each data-parallel rank's batch for a pass over the samples that the teacher scores; empty if there
        are none."""
        own, privileged = self.select_samples(samples, feedback)
        if not privileged:
            return RankBatch.split(own, packing) if own else []
        return RankBatch.split_privileged(own, packing, privileged)

    def _fits(self, sample: SampleRef, num_prompt_tokens: int) -> bool:
        return num_prompt_tokens + sample.num_response_tokens <= self.context_length

    def _starts_with_prompt(self, sample: SampleRef) -> bool:
        assert self.checksums is not None, "the teacher sees the samples' own prompts"
        has_own_prompt = sample.rollout is None or sample.beginning == self.checksums[sample.prompt_id]
        if not has_own_prompt and sample.id == sample.rollout_id:
            column = self.teacher.prompt_column
            raise UserError(
                f"teachers.models: {self.teacher.name} with prompt_column={column}: the environment started a rollout "
                f"of {sample.prompt_id} with a prompt that differs from the row's, so the prompt in column {column!r} "
                "cannot replace it. Fix: use an environment without tools whose reset returns no messages, or remove "
                "prompt_column"
            )
        return has_own_prompt


@ray.remote(num_cpus=0, max_restarts=0)
class TeacherActor(UntrainedRank):
    """One rank of a teacher."""


class TeacherGroup(RankGroup):
    """All ranks of one teacher."""

    actor_class, title = TeacherActor, "TeacherActor"

    def __init__(self, session: Session, config: Config, teacher: Teacher, folder: Path, processes: Sequence[Process]):
        super().__init__(session, _config_of(config, teacher), "teachers", folder, processes)
        self.role, self.scores = f"teacher {teacher.name}", teacher.scores
        self.prompts = ScoredPrompts(teacher, vocab_size=vocab_size(folder))

    @remote(timeout="passes", join=join_by_sample)
    def _score_tokens(self, batch: RankBatch) -> Scores: ...

    def score_tokens(
        self, samples: Sequence[SampleRef], feedback: Mapping[str, Scores] = MappingProxyType({})
    ) -> Pending[Scores]:
        """Score the samples of the teacher's prompts. Return sample id -> log-prob of each response token, float32 [R],
        final hidden states, [R, h], or packed TopTokens, float32 [R, 2k + 1]. See TeacherWorker.score_tokens.
        `feedback`: as in ScoredPrompts.select_samples."""
        batches = self.prompts.batches(samples, self.packing, feedback)
        return self._score_tokens.on_each(self._by_rank(batches)) if batches else ready({})


@ray.remote(num_cpus=0, max_restarts=0)
class TeacherEngineActor(ScoringEngineActor):
    """One engine of a teacher in vLLM."""

    section = "teachers"

    def _arguments(self) -> dict[str, Any]:
        from megarl.rollout.vllm.teacher import teacher_arguments

        return teacher_arguments(self._config, self._model_folder)

    def _load(self, arguments: Mapping[str, Any]) -> VllmTeacher:
        from megarl.rollout.vllm.teacher import VllmTeacher

        return VllmTeacher(arguments, self._config.rollout.temperature)

    def score(self, samples: Sequence[SampleRef], privileged: Mapping[str, Replacement]) -> Scores:
        """Score samples. `privileged`: as in RankBatch."""
        fetched = RankBatch(tuple(samples), (), privileged).fetch_samples()
        return self._put_scores([item.sample for item in fetched])


class TeacherEngineGroup(ScoringEngineGroup):
    """All engines of one teacher in vLLM."""

    actor_class, title = TeacherEngineActor, "TeacherEngineActor"

    @remote(timeout="passes")
    def _score(self, samples: Sequence[SampleRef], privileged: Mapping[str, Replacement]) -> Scores: ...

    def __init__(self, session: Session, config: Config, teacher: Teacher, folder: Path, processes: Sequence[Process]):
        self.role, self.scores = f"{teacher.name} teacher", teacher.scores
        super().__init__(session, _config_of(config, teacher), folder, processes, "teachers")
        self.prompts = ScoredPrompts(teacher, vocab_size=vocab_size(folder))

    def score_tokens(
        self, samples: Sequence[SampleRef], feedback: Mapping[str, Scores] = MappingProxyType({})
    ) -> Pending[Scores]:
        """Return the log-probs or the most probable tokens as in TeacherGroup.score_tokens."""
        own, privileged = self.prompts.select_samples(samples, feedback)

        def start(actor: ActorHandle, part: Sequence[SampleRef]) -> ray.ObjectRef:
            replacements = {item.id: privileged[item.id] for item in part} if privileged else {}
            return self._score.on(actor, [replace(item, scores={}) for item in part], replacements)

        return self._route_samples("teachers", own, self._score.method, start)


def _config_of(config: Config, teacher: Teacher) -> Config:
    """Return the config for the teacher's processes, with the teacher's layout as `teachers.layout`."""
    return config.model_copy(update={"teachers": config.teachers.for_ranks_of(teacher)})


PlacedTeacher = TeacherGroup | TeacherEngineGroup
"""A teacher with its own processes."""


class SelfTeacher:
    """The policy or the reference as a teacher with privileged prompts. It runs on the actor's ranks."""

    def __init__(self, teacher: Teacher, actor: TrainerGroup):
        self.scores, self._actor = teacher.scores, actor
        self.prompts = ScoredPrompts(teacher)

    def score_tokens(
        self, samples: Sequence[SampleRef], feedback: Mapping[str, Scores] = MappingProxyType({})
    ) -> Pending[Scores]:
        """Return the scores as in TeacherGroup.score_tokens. The actor's weights must be on its devices."""
        batches = self.prompts.batches(samples, self._actor.packing, feedback)
        return self._actor.score_as_teacher(self.prompts.teacher.name, batches) if batches else ready({})


def scores_in_turn(
    teachers: Sequence[PlacedTeacher],
    samples: Sequence[SampleRef],
    feedback: Mapping[str, Scores] = MappingProxyType({}),
) -> dict[str, Scores]:
    """Return each teacher's scores keyed by Teacher.scores. Teachers share devices, so they run one after another.
    `feedback`: as in ScoredPrompts.select_samples."""
    return {teacher.scores: teacher.score_tokens(samples, feedback).result() for teacher in teachers}
