"""Rewards in a process of their own: it reads the samples' text, so that the driver need not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import ray

from megarl.batch import Sample, Score
from megarl.cluster.engine_group import RemoteSample
from megarl.cluster.logs import log_to
from megarl.cluster.placement import Process
from megarl.cluster.reward_model_group import RewardModelGroup
from megarl.cluster.session import Session
from megarl.config.schema import Config
from megarl.rewards.scorer import Scorer


@ray.remote(num_cpus=0, max_restarts=0)
class RewardActor:
    def __init__(self, config: Config, process: Process, logs: Path):
        log_to(logs / f"{process.name}.log")
        self._config = config

    def start(self) -> None:
        self._scorer = Scorer(self._config.rewards.functions, self._config.reward_model.weight)

    def score(
        self, refs: Sequence[ray.ObjectRef], model_scores: Mapping[str, float] | None, step: int, rollouts: Path
    ) -> list[Score]:
        """Scores the samples and writes them, decoded, to a JSONL file for people to read. model_scores: what the
        reward model says of each, by sample id (None: there is no model)."""
        samples: list[Sample] = ray.get(list(refs))
        scores = [
            self._scorer.score(sample, None if model_scores is None else model_scores[sample.id]) for sample in samples
        ]
        with rollouts.open("w", encoding="utf-8") as file:
            for sample, score in zip(samples, scores, strict=True):
                file.write(json.dumps(_row(step, sample, score), ensure_ascii=False) + "\n")
        return scores


def _row(step: int, sample: Sample, score: Score) -> dict:
    return {
        "step": step,
        "sample_id": sample.id,
        "prompt": sample.prompt.text,
        "response": sample.text,
        "answer": sample.prompt.answer,
        "reward": score.value,
        "parts": score.parts,
        "failure": score.failure,
        "version": [asdict(run) for run in sample.versions],
        "finish_reason": sample.finish_reason,
        "num_response_tokens": len(sample.response_ids),
    }


class RewardWorker:
    def __init__(self, session: Session, config: Config, process: Process, model: RewardModelGroup | None):
        self._session, self._name, self._model = session, process.name, model
        self._actor = RewardActor.remote(config, process, session.logs)
        session.watch({self._name: self._actor})

    def start(self) -> None:
        self._session.wait({self._name: self._actor.start.remote()}, "reward start")

    def score(self, samples: Sequence[RemoteSample], step: int, rollouts: Path) -> list[Score]:
        """By the reward model, then by the functions."""
        model_scores = None if self._model is None else self._model.scores(samples)
        call = self._actor.score.remote([sample.ref for sample in samples], model_scores, step, rollouts.resolve())
        [scores] = self._session.wait({self._name: call}, "rewards")
        return scores
