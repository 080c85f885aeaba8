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
from megarl.cluster.reward_engine_group import RewardEngineGroup
from megarl.cluster.reward_model_group import RewardModelGroup
from megarl.cluster.session import Session
from megarl.cluster.share import Scores
from megarl.config.classifier import score_head_of
from megarl.config.schema import Config
from megarl.data.model_folder import read_config
from megarl.data.tokenizer import load_tokenizer
from megarl.rewards.classifier import ClassifierReward, ModelReward
from megarl.rewards.scorer import Scorer


@ray.remote(num_cpus=0, max_restarts=0)
class RewardActor:
    def __init__(self, config: Config, model_folder: Path | None, process: Process, logs: Path):
        """model_folder: the reward model's (None: there is none)."""
        log_to(logs / f"{process.name}.log")
        self._config, self._model_folder = config, model_folder

    def start(self) -> None:
        self._scorer = Scorer(self._config.rewards.functions, self._config.reward_model.weight)
        self._of_model = None if self._model_folder is None else classifier_reward(self._config, self._model_folder)

    def score(
        self, refs: Sequence[ray.ObjectRef], model_scores: Scores, step: int, rollouts: Path
    ) -> tuple[list[Score], Scores]:
        """Scores the samples and writes them, decoded, to a JSONL file for people to read. model_scores: where the
        reward model's are, if there is one. Returns, too, where rewards of single tokens are, if it gives them."""
        samples: list[Sample] = ray.get(list(refs))
        of_model = self._model_rewards(samples, model_scores)
        scores = [self._scorer.score(sample, of_model.get(sample.id)) for sample in samples]
        with rollouts.open("w", encoding="utf-8") as file:
            for sample, score in zip(samples, scores, strict=True):
                file.write(json.dumps(_row(step, sample, score), ensure_ascii=False) + "\n")
        return scores, self._of_tokens(of_model)

    def _model_rewards(self, samples: Sequence[Sample], model_scores: Scores) -> dict[str, ModelReward]:
        if self._of_model is None:
            return {}
        scores = ray.get([model_scores[sample.id] for sample in samples])
        return {
            sample.id: self._of_model.reward(sample, own.tolist()) for sample, own in zip(samples, scores, strict=True)
        }

    def _of_tokens(self, of_model: Mapping[str, ModelReward]) -> Scores:
        """Sample id -> float32 [R]."""
        given = {name: reward.by_token for name, reward in of_model.items() if reward.by_token is not None}
        if not given:
            return {}
        import torch

        weight = self._config.reward_model.weight
        return {name: ray.put(weight * torch.tensor(rewards)) for name, rewards in given.items()}


def classifier_reward(config: Config, folder: Path) -> ClassifierReward:
    """Of the reward model in this folder."""
    head = score_head_of(read_config(folder))
    assert head is not None, "checked before the run starts"
    rewards_tokens = config.algorithm.advantage.estimator == "gae"
    return ClassifierReward(head.kind, config.reward_model, load_tokenizer(folder), rewards_tokens)


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
    def __init__(
        self,
        session: Session,
        config: Config,
        process: Process,
        model: RewardModelGroup | RewardEngineGroup | None,
        model_folder: Path | None,
    ):
        self._session, self._name, self._model = session, process.name, model
        self._actor = RewardActor.remote(config, model_folder, process, session.logs)
        session.watch({self._name: self._actor})

    def start(self) -> None:
        self._session.wait({self._name: self._actor.start.remote()}, "reward start")

    def score(self, samples: Sequence[RemoteSample], step: int, rollouts: Path) -> tuple[list[Score], Scores]:
        """By the reward model, then by the functions. Returns, too, where rewards of single tokens are, if the reward
        model gives them: float32 [R]."""
        model_scores = {} if self._model is None else self._model.scores(samples)
        call = self._actor.score.remote([sample.ref for sample in samples], model_scores, step, rollouts.resolve())
        [answer] = self._session.wait({self._name: call}, "rewards")
        return answer
