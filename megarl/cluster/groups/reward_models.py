"""A reward model, in Megatron or in vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from megarl.cluster.groups.ranks import RankGroup, UntrainedRank
from megarl.cluster.groups.remote import remote
from megarl.cluster.groups.scoring_engines import ScoringEngineActor, ScoringEngineGroup
from megarl.cluster.pending import Pending
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import RankBatch, Scores, join_by_sample
from megarl.cluster.session import Session
from megarl.config.schema import Config
from megarl.core.sample import SampleRef

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
        """Return the scores of each sample: one per response token, float32 [R]; with a sequence classifier, a single
        one, float32 [1]."""
        return self._score_tokens.on_each(self._by_rank(RankBatch.split(samples, self.packing)))


@ray.remote(num_cpus=0, max_restarts=0)
class RewardEngineActor(ScoringEngineActor):
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
        return self._put_scores(ray.get([ref.sample for ref in samples]))

    @property
    def _judges(self) -> bool:
        return self._config.reward_model.judges


class RewardEngineGroup(ScoringEngineGroup):
    """All reward engines."""

    actor_class, title, role = RewardEngineActor, "RewardEngineActor", "reward model"

    @remote(timeout="rewards")
    def _score(self, samples: Sequence[SampleRef]) -> Scores: ...

    def __init__(self, session: Session, config: Config, model_folder: Path, processes: Sequence[Process]):
        super().__init__(session, config, model_folder, processes, "reward_model")

    def scores(self, samples: Sequence[SampleRef]) -> Pending[Scores]:
        """Return the scores of each sample: one per response token, float32 [R]; with a sequence classifier, a single
        one, float32 [1]; with a judge, the token ids of its response, int64 [A]."""
        return self._route_samples("rewards", samples, self._score.method, self._score.on)
