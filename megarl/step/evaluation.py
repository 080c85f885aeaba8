"""Evaluations: samples of prompts that are not trained on, all by weights of one version, and what they say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from megarl.algorithms.evaluation import Estimate, estimates
from megarl.cluster.groups.engines import EngineGroup
from megarl.cluster.groups.rewards import RewardGroup
from megarl.cluster.workers import Workers
from megarl.config.evaluation import longest_response, seed_of_set
from megarl.config.evaluation_schema import EvaluationSet
from megarl.config.schema import Config
from megarl.core.timing import Stopwatch
from megarl.core.types import SampleInfo, Score
from megarl.data.prompts import PromptSet
from megarl.rollout.engine import SamplingRequest

PURPOSE = "evaluation"

Prompts = Mapping[str, PromptSet]
"""The prompts of each set, by its name."""


@dataclass(frozen=True, slots=True)
class SetResult:
    """The result of one set.

    shares   beside the estimates: failed_share, of samples that could not be scored and count nowhere else,
             truncated_share, and length_mean, in tokens
    failure  why the first of these could not be scored; None if all could
    """

    given: EvaluationSet
    num_prompts: int
    estimates: Mapping[str, Estimate]
    shares: Mapping[str, float]
    failure: str | None = None

    def metrics(self) -> dict[str, float]:
        """Returns the values by their names in metrics.jsonl; ends of intervals as NAME_low and NAME_high."""
        found: dict[str, float] = {}
        for name, estimate in self.estimates.items():
            found[name] = estimate.value
            if math.isfinite(estimate.low):  # of one prompt there may be no interval
                found |= {f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        return {self.given.prefix + name: value for name, value in (found | dict(self.shares)).items()}

    def describe(self) -> str:
        """Returns a line with the estimates of the most samples."""
        most = self.given.samples_per_prompt
        names = [name for name in (f"avg@{most}", f"pass@{most}", f"pass^{most}") if name in self.estimates]
        shown = [f"{name} {_shown(self.estimates[name])}" for name in names]
        size = f"{self.num_prompts} prompts × {most}"
        if self.failure is not None:
            shown.append(f"{self.shares['failed_share']:.1%} failed, such as by {self.failure}")
        return f"{self.given.name} ({size}): {', '.join(shown)}"


def evaluate(
    config: Config, workers: Workers, number: int, prompts: Prompts, file: Callable[[str, int], Path]
) -> dict[str, float]:
    """Evaluates the sets that are due after this step, whose number is the version of the engines' weights. Returns the
    metrics. file: returns the file of a set's samples after a step."""
    due = config.evaluation.due(number, config.run.steps)
    if not due:
        return {}
    watch = Stopwatch()
    with watch.phase("evaluation"):
        workers.leave_to_engines()
        results = evaluate_sets(config, due, workers.engines, workers.rewards, number, prompts, file)
        workers.leave_until_rollouts()
    for result in results:
        print(f"evaluation after step {number}: {result.describe()}", flush=True)
    metrics = {name: value for result in results for name, value in result.metrics().items()}
    return metrics | {"evaluation/version": number, "time/evaluation": watch.metrics()["time/evaluation"]}


def evaluate_sets(
    config: Config,
    sets: Sequence[EvaluationSet],
    engines: EngineGroup,
    rewards: RewardGroup,
    version: int,
    prompts: Prompts,
    file: Callable[[str, int], Path],
) -> list[SetResult]:
    """Samples and scores the sets, one after the other; while one is scored the next is sampled. version: that of the
    engines' weights."""
    scoring = []
    for given in sets:
        groups = engines.generate(requests(config, given, prompts[given.name])).result()
        samples = [sample for group in groups for sample in group]
        infos = [[sample.info for sample in group] for group in groups]
        versions = {v for group in infos for info in group for v in (info.version_oldest, info.version_newest)}
        assert versions == {version}, f"{given.name}: samples of the versions {versions}, not {version}"
        scoring.append((given, infos, rewards.evaluate(samples, given.name, version, file(given.name, version))))
    return [result(given, infos, scores.result()) for given, infos, scores in scoring]


def requests(config: Config, given: EvaluationSet, prompts: PromptSet) -> list[list[SamplingRequest]]:
    """Returns the requests for each prompt of a set, whose seeds are the same in every evaluation."""
    return [
        [
            SamplingRequest(
                f"{given.name}.{i}.{k}",
                prompts[i],
                seed_of_set(config, given, i, k),
                purpose=PURPOSE,
                temperature=given.temperature,
                top_p=given.top_p,
                top_k=given.top_k or 0,
                max_new_tokens=longest_response(config, given),
            )
            for k in range(given.samples_per_prompt)
        ]
        for i in range(len(prompts))
    ]


def result(given: EvaluationSet, groups: Sequence[Sequence[SampleInfo]], scores: Sequence[Score]) -> SetResult:
    """Returns the result of a set. groups: its samples, by prompt; scores: of all of them, in their order."""
    remaining = iter(scores)
    values = [[next(remaining).value for _ in group] for group in groups]
    infos = [info for group in groups for info in group]
    return SetResult(
        given,
        len(groups),
        estimates(values, given.samples_per_prompt, given.success_above),
        {
            "failed_share": fmean(score.value is None for score in scores),
            "truncated_share": fmean(info.finish_reason == "length" for info in infos),
            "length_mean": fmean(info.num_response_tokens for info in infos),
        },
        next((score.failure for score in scores if score.failure is not None), None),
    )


def _shown(estimate: Estimate) -> str:
    if not math.isfinite(estimate.low):
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
