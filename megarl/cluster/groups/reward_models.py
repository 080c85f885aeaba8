"""A reward model, in Megatron or in vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from megarl.cluster.groups.ranks import RankActor, RankGroup
from megarl.cluster.groups.remote import remote
from megarl.cluster.groups.vllm import VllmActor, VllmGroup
from megarl.cluster.pending import Pending
from megarl.cluster.rank_batch import RankBatch, Scores, join_by_sample, put_scores
from megarl.cluster.supervision import segments
from megarl.cluster.supervision.scratch import own_scratch
from megarl.core.types import SampleRef
from megarl.rollout.router import Router

if TYPE_CHECKING:
    from megarl.data.local_batch import LocalBatch
    from megarl.rollout.vllm.reward_model import VllmClassifier, VllmJudge


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

    @remote(timeout="rewards", join=join_by_sample)
    def _score_tokens(self, batch: RankBatch) -> Scores: ...

    def scores(self, samples: Sequence[SampleRef]) -> Pending[Scores]:
        """Score each response token, float32 [R], or, with a sequence classifier, each sample, float32 [1]."""
        return self._score_tokens.on_each(self._by_rank(RankBatch.split(samples, self.packing)))


@ray.remote(num_cpus=0, max_restarts=0)
class RewardEngineActor(VllmActor):
    """One classifier or judge model on vLLM."""

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


class RewardEngineGroup(VllmGroup):
    """All reward engines. The samples for one prompt go to the same engine, where they share a prefix cache."""

    actor_class, title, role = RewardEngineActor, "RewardEngineActor", "reward model"

    @remote(timeout="rewards", join=join_by_sample)
    def _score(self, samples: Sequence[SampleRef]) -> Scores: ...

    def scores(self, samples: Sequence[SampleRef]) -> Pending[Scores]:
        """Score each response token, float32 [R], or each sample, [1], with a sequence classifier. A judge returns the
        token ids in its answer about the sample, int64 [A]."""
        router = Router(list(self._actors), weighs_speed=False)
        prompts = router.assign(Counter(sample.prompt_id for sample in samples))
        engine_of = {prompt: engine for engine, part in prompts.items() for prompt in part}
        shares = [[sample for sample in samples if engine_of[sample.prompt_id] == engine] for engine in self._actors]
        return self._score.on_each((share,) for share in shares)
