"""A reward model, in Megatron or in vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from megarl.cluster.groups.ranks import RankGroup, UntrainedRank
from megarl.cluster.groups.remote import remote
from megarl.cluster.groups.replicas import ReplicaGroup
from megarl.cluster.groups.vllm import VllmActor
from megarl.cluster.pending import Answers, Pending, ready
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import RankBatch, ScoreRef, Scores, join_by_sample, put_scores
from megarl.cluster.session import Session
from megarl.cluster.supervision import segments
from megarl.cluster.supervision.scratch import own_scratch
from megarl.config.device_spans import is_alone
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.sample import SampleRef
from megarl.rollout.router import Aborted, completed

if TYPE_CHECKING:
    from megarl.rollout.vllm.reward_model import VllmClassifier, VllmJudge


@ray.remote(num_cpus=0, max_restarts=0)
class RewardModelActor(UntrainedRank):
    """One rank of a reward model."""


class RewardModelGroup(RankGroup):
    """All ranks of a reward model."""

    actor_class, title = RewardModelActor, "RewardModelActor"

    @remote(timeout="rewards", join=join_by_sample)
    def _score_tokens(self, batch: RankBatch) -> Scores: ...

    def scores(self, samples: Sequence[SampleRef]) -> Pending[Scores]:
        """Return the scores of each sample: one per response token, float32 [R], or a single one, float32 [1], with a
        sequence classifier."""
        return self._score_tokens.on_each(self._by_rank(RankBatch.split(samples, self.packing)))


@ray.remote(num_cpus=0, max_restarts=0)
class RewardEngineActor(VllmActor):
    """One classifier or judge model on vLLM."""

    section = "reward_model"

    def _arguments(self) -> dict[str, Any]:
        from megarl.rollout.vllm.reward_model import classifier_arguments, judge_arguments

        return (judge_arguments if self._judges else classifier_arguments)(self._config, self._model_folder)

    def _load(self, arguments: Mapping[str, Any]) -> VllmClassifier | VllmJudge:
        from megarl.rollout.vllm.reward_model import VllmClassifier, VllmJudge

        judge = self._config.reward_model.judge
        return VllmJudge(arguments, judge.max_new_tokens) if self._judges else VllmClassifier(arguments)

    def score(self, samples: Sequence[SampleRef]) -> Scores:
        scores = self._worker.scores(ray.get([ref.sample for ref in samples])) if samples else []
        segments.note(own_scratch())
        return put_scores({sample.id: sample_scores for sample, sample_scores in zip(samples, scores, strict=True)})

    @property
    def _judges(self) -> bool:
        return self._config.reward_model.judges


class RewardEngineGroup(ReplicaGroup):
    """All reward engines. A restarted engine rejoins before the next samples are scored. An engine that shares GPUs
    with other models does not restart, because they may leave no memory for it."""

    actor_class, title, role = RewardEngineActor, "RewardEngineActor", "reward model"
    awaits_restarts = True

    @remote(timeout="rewards")
    def _score(self, samples: Sequence[SampleRef]) -> Scores: ...

    def __init__(self, session: Session, config: Config, model_folder: Path, processes: Sequence[Process]):
        restarts = not device.on_cuda() or is_alone(config, "reward_model")
        super().__init__(session, config, model_folder, processes, restarts)

    def scores(self, samples: Sequence[SampleRef]) -> Pending[Scores]:
        """Score each response token, float32 [R], or each sample, [1], with a sequence classifier. With a
        judge, return the token ids of its response for each sample, int64 [A]. If an engine is lost, its samples are
        scored again."""
        if not samples:
            return ready({})
        self.rejoin_restarted("rewards")
        groups: dict[str, list[SampleRef]] = {}
        for sample in samples:
            groups.setdefault(sample.prompt_id, []).append(sample)
        names = [[sample.id for sample in group] for group in groups.values()]
        scored = self._route("rewards", list(groups.values()), names, self._run, lambda *_: None)
        return scored.then(lambda results: dict(score for scores in results for score in completed(scores)))

    def _run(
        self, parts: Mapping[str, Sequence[SampleRef]]
    ) -> Pending[dict[str, list[list[tuple[str, ScoreRef]]] | Aborted]]:
        """Score each engine's samples. Return the sample ids and their scores, keyed by engine name."""
        calls = {name: self._score.on(self._actors[name], samples) for name, samples in parts.items()}

        def by_engine(answers: Answers) -> dict[str, list[list[tuple[str, ScoreRef]]] | Aborted]:
            values = answers.values.items()
            return {name: [[(sample.id, scores[sample.id])] for sample in parts[name]] for name, scores in values}

        return self._submit(self._score.method, calls).then(by_engine)
