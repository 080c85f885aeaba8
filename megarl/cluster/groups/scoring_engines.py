"""vLLM engines that score finished samples: reward models, judges and teachers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ray
from ray.actor import ActorHandle

from megarl.cluster.groups.remote import RemoteMethod
from megarl.cluster.groups.replicas import ReplicaGroup
from megarl.cluster.groups.vllm import VllmActor
from megarl.cluster.pending import Answers, Pending, ready
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import ScoreRef, Scores, put_scores
from megarl.cluster.session import Session
from megarl.cluster.supervision import segments
from megarl.cluster.supervision.scratch import own_scratch
from megarl.config.device_spans import is_alone
from megarl.config.model_schema import MegatronRole
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.sample import Sample, SampleRef
from megarl.rollout.router import Aborted, completed


class ScoringEngineActor(VllmActor):
    """One scoring engine. Its worker's method `scores` returns a tensor for each sample."""

    def _put_scores(self, samples: Sequence[Sample]) -> Scores:
        scores = self._worker.scores(samples) if samples else []
        segments.note(own_scratch())
        return put_scores({sample.id: of_sample for sample, of_sample in zip(samples, scores, strict=True)})


class ScoringEngineGroup(ReplicaGroup):
    """All engines of one model. A restarted engine rejoins before the next samples are scored. An engine that shares
    GPUs with other models does not restart, because they may leave no memory for it."""

    awaits_restarts = True

    def __init__(
        self,
        session: Session,
        config: Config,
        model_folder: Path,
        processes: Sequence[Process],
        placed: MegatronRole,
    ):
        """placed: the config section whose devices the engines use."""
        super().__init__(session, config, model_folder, processes, not device.on_cuda() or is_alone(config, placed))

    def _route_samples(
        self,
        phase: str,
        samples: Sequence[SampleRef],
        method: RemoteMethod,
        start: Callable[[ActorHandle, Sequence[SampleRef]], ray.ObjectRef],
    ) -> Pending[Scores]:
        """Score the samples with this method. Samples of a prompt go to the same engine. If an engine is lost, its
        samples are scored again. `phase`: as in `_route`. `start` submits a call that scores samples on an engine."""
        if not samples:
            return ready({})
        self.rejoin_restarted(phase)
        groups: dict[str, list[SampleRef]] = {}
        for sample in samples:
            groups.setdefault(sample.prompt_id, []).append(sample)
        names = [[sample.id for sample in group] for group in groups.values()]

        def run(
            parts: Mapping[str, Sequence[SampleRef]],
        ) -> Pending[dict[str, list[list[tuple[str, ScoreRef]]] | Aborted]]:
            """Score each engine's samples. Return the sample ids and their scores, keyed by engine name."""
            calls = {name: start(self._actors[name], part) for name, part in parts.items()}

            def by_engine(answers: Answers) -> dict[str, list[list[tuple[str, ScoreRef]]] | Aborted]:
                values = answers.values.items()
                return {name: [[(sample.id, scores[sample.id])] for sample in parts[name]] for name, scores in values}

            return self._submit(method, calls).then(by_engine)

        # Scoring is never aborted, because it ends before its step does.
        scored = self._route(phase, list(groups.values()), names, run, lambda *_: None)
        return scored.then(lambda results: dict(score for scores in results for score in completed(scores)))
