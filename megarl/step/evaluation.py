"""Evaluations: samples of prompts that are not trained on, all by weights of one version, and what they say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from megarl.algorithms.evaluation import Estimate, estimates
from megarl.cluster.groups.engines import EngineGroup
from megarl.cluster.groups.environments import EnvironmentGroup
from megarl.cluster.groups.rewards import RewardGroup
from megarl.cluster.workers import Workers
from megarl.config.evaluation import config_of_set, longest_response, seed_of_set
from megarl.config.evaluation_schema import EvaluationSet
from megarl.config.schema import Config
from megarl.core.timing import Stopwatch
from megarl.core.types import SampleInfo, Score
from megarl.data.prompts import PromptSet
from megarl.environments.protocol import StopReason
from megarl.rollout.engine import SamplingRequest

PURPOSE = "evaluation"

LIMITS = (StopReason.MAX_TOKENS, StopReason.MAX_TURNS)

Prompts = Mapping[str, PromptSet]
"""The prompts of each set, by its name."""


@dataclass(frozen=True, slots=True)
class SetResult:
    """The result of one set.

    shares   beside the estimates: failed_share, of rollouts that could not be scored and count in no estimate; and of
             those whose environment has not failed truncated_share, length_mean, in tokens of the policy, and
             turns_mean, of a set in an environment
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
        workers.switch_to_rollout()
        environments = workers.evaluation_environments
        results = evaluate_sets(config, due, workers.engines, environments, workers.rewards, number, prompts, file)
        workers.leave_until_rollouts()
    for result in results:
        print(f"evaluation after step {number}: {result.describe()}", flush=True)
    metrics = {name: value for result in results for name, value in result.metrics().items()}
    return metrics | {"evaluation/version": number, "time/evaluation": watch.metrics()["time/evaluation"]}


def evaluate_sets(
    config: Config,
    sets: Sequence[EvaluationSet],
    engines: EngineGroup,
    environments: EnvironmentGroup | None,
    rewards: RewardGroup,
    version: int,
    prompts: Prompts,
    file: Callable[[str, int], Path],
) -> list[SetResult]:
    """Samples and scores the sets, one after the other; while one is scored the next is sampled.

    environments   what plays the sets that are in one
    version        that of the engines' weights
    """
    scoring = []
    for given in sets:
        asked, of_set = requests(config, given, prompts[given.name]), config_of_set(config, given)
        groups = (environments.evaluate(asked, of_set) if of_set.has_environment else engines.generate(asked)).result()
        samples = [sample for group in groups for sample in group]
        infos = [[sample.info for sample in group] for group in groups]
        versions = versions_of(infos)
        assert versions <= {version}, f"{given.name}: samples of the versions {versions}, not {version}"
        scoring.append((given, infos, rewards.evaluate(samples, given.name, version, file(given.name, version))))
    return [result(given, infos, scores.result()) for given, infos, scores in scoring]


def requests(config: Config, given: EvaluationSet, prompts: PromptSet) -> list[list[SamplingRequest]]:
    """Returns the requests for each prompt of a set, whose seeds are the same in every evaluation."""
    return [
        [
            SamplingRequest(
                f"{given.name}.{i}.{k}",
                prompts[i],
                seed=seed_of_set(config, given, i, k),
                group_seed=seed_of_set(config, given, i),
                purpose=PURPOSE,
                temperature=given.temperature,
                top_p=given.top_p,
                top_k=given.top_k or 0,
                max_new_tokens=longest_response(config, given),
                stop=tuple(given.stop),
            )
            for k in range(given.samples_per_prompt)
        ]
        for i in range(len(prompts))
    ]


def versions_of(groups: Sequence[Sequence[SampleInfo]]) -> set[int]:
    """Returns the weight versions of all tokens. A rollout that fails before its first turn has none."""
    infos = [info for group in groups for info in group if info.num_response_tokens]
    return {version for info in infos for version in (info.version_oldest, info.version_newest)}


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout of an evaluation: its samples, one but in environments, and their score, which is that of the whole."""

    infos: Sequence[SampleInfo]
    score: Score

    @property
    def is_truncated(self) -> bool:
        """Whether it came to a limit, of tokens or of turns."""
        reason = self.infos[0].rollout and self.infos[0].rollout.stop_reason
        return reason in LIMITS or any(info.finish_reason == "length" for info in self.infos)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the policy said."""
        return sum(info.num_trained_tokens for info in self.infos)


def result(given: EvaluationSet, groups: Sequence[Sequence[SampleInfo]], scores: Sequence[Score]) -> SetResult:
    """Returns the result of a set. groups: its samples, by prompt; scores: of all of them, in their order."""
    remaining = iter(scores)
    by_prompt = [scored_rollouts([(info, next(remaining)) for info in group]) for group in groups]
    rollouts = [rollout for group in by_prompt for rollout in group]
    return SetResult(
        given,
        len(groups),
        estimates(
            [[rollout.score.value for rollout in group] for group in by_prompt],
            given.samples_per_prompt,
            given.success_above,
        ),
        {"failed_share": fmean(rollout.score.value is None for rollout in rollouts), **lengths(rollouts)},
        next((score.failure for score in scores if score.failure is not None), None),
    )


def scored_rollouts(samples: Sequence[tuple[SampleInfo, Score]]) -> list[ScoredRollout]:
    """Returns the rollouts of a prompt's samples, each of which counts once however many samples it has."""
    by_rollout: dict[str, list[tuple[SampleInfo, Score]]] = {}
    for info, score in samples:
        by_rollout.setdefault(info.rollout_id, []).append((info, score))
    return [ScoredRollout([info for info, _ in found], found[0][1]) for found in by_rollout.values()]


def lengths(rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
    """Returns the metrics of how long rollouts are, without those that a failure of their environment has cut short."""
    whole = [rollout for rollout in rollouts if not rollout.infos[0].has_failed]
    if not whole:
        return {}
    turns = [rollout.infos[0].rollout.num_turns for rollout in whole if rollout.infos[0].rollout is not None]
    return {
        "truncated_share": fmean(rollout.is_truncated for rollout in whole),
        "length_mean": fmean(rollout.num_tokens for rollout in whole),
        **({"turns_mean": fmean(turns)} if turns else {}),
    }


def _shown(estimate: Estimate) -> str:
    if not math.isfinite(estimate.low):
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
