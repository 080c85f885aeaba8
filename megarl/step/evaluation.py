"""Evaluations: sampling of held-out prompts with one weight version, and the resulting estimates."""

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
"""The prompts of each set, by name."""


@dataclass(frozen=True, slots=True)
class SetResult:
    """The result of one set.

    Attributes:
        shares: further metrics: failed_frac, the fraction of rollouts without a score, which no estimate counts; and
            over rollouts whose environment has not failed truncated_frac, length_mean (tokens of the policy) and, in
            an environment, turns_mean.
        failure: why the first of the failed rollouts has no score; None if none failed.
    """

    given: EvaluationSet
    num_prompts: int
    estimates: Mapping[str, Estimate]
    shares: Mapping[str, float]
    failure: str | None = None

    def metrics(self) -> dict[str, float]:
        """Return the values by name in metrics.jsonl, with the ends of intervals as NAME_low and NAME_high."""
        found: dict[str, float] = {}
        for name, estimate in self.estimates.items():
            found[name] = estimate.value
            if math.isfinite(estimate.low):  # a single prompt may have no interval
                found |= {f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        return {self.given.prefix + name: value for name, value in (found | dict(self.shares)).items()}

    def describe(self) -> str:
        """Return a line with the estimates for the largest number of samples."""
        most = self.given.samples_per_prompt
        names = [name for name in (f"avg@{most}", f"pass@{most}", f"pass^{most}") if name in self.estimates]
        shown = [f"{name} {_shown(self.estimates[name])}" for name in names]
        size = f"{self.num_prompts} prompts × {most}"
        if self.failure is not None:
            shown.append(f"{self.shares['failed_frac']:.1%} failed, such as by {self.failure}")
        return f"{self.given.name} ({size}): {', '.join(shown)}"


def evaluate(
    config: Config, workers: Workers, number: int, prompts: Prompts, file: Callable[[str, int], Path]
) -> dict[str, float]:
    """Evaluate the sets that are due after this step, whose number is the engines' weight version. Return the metrics.

    Args:
        file: returns the file of a set's samples after a step.
    """
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
    """Sample and score the sets in order. While one is scored, the next is sampled.

    Args:
        environments: runs the sets that have an environment.
        version: the engines' weight version.
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
    """Return the requests for each prompt of a set. Their seeds are the same in every evaluation."""
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
    """Return the weight versions of all tokens. A rollout that fails before its first turn has none."""
    infos = [info for group in groups for info in group if info.num_response_tokens]
    return {version for info in infos for version in (info.version_oldest, info.version_newest)}


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout of an evaluation: its samples, which are one without an environment, and its score."""

    infos: Sequence[SampleInfo]
    score: Score

    @property
    def is_truncated(self) -> bool:
        """Whether it reached a limit of tokens or turns."""
        reason = self.infos[0].rollout and self.infos[0].rollout.stop_reason
        return reason in LIMITS or any(info.finish_reason == "length" for info in self.infos)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy generated."""
        return sum(info.num_trained_tokens for info in self.infos)


def result(given: EvaluationSet, groups: Sequence[Sequence[SampleInfo]], scores: Sequence[Score]) -> SetResult:
    """Return the result of a set. groups: its samples by prompt. scores: those of all samples, in order."""
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
        {"failed_frac": fmean(rollout.score.value is None for rollout in rollouts), **lengths(rollouts)},
        next((score.failure for score in scores if score.failure is not None), None),
    )


def scored_rollouts(samples: Sequence[tuple[SampleInfo, Score]]) -> list[ScoredRollout]:
    """Return the rollouts of a prompt's samples. Each counts once, however many samples it has."""
    by_rollout: dict[str, list[tuple[SampleInfo, Score]]] = {}
    for info, score in samples:
        by_rollout.setdefault(info.rollout_id, []).append((info, score))
    return [ScoredRollout([info for info, _ in found], found[0][1]) for found in by_rollout.values()]


def lengths(rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
    """Return metrics of the rollouts' lengths, without rollouts whose environment failed."""
    whole = [rollout for rollout in rollouts if not rollout.infos[0].has_failed]
    if not whole:
        return {}
    turns = [rollout.infos[0].rollout.num_turns for rollout in whole if rollout.infos[0].rollout is not None]
    return {
        "truncated_frac": fmean(rollout.is_truncated for rollout in whole),
        "length_mean": fmean(rollout.num_tokens for rollout in whole),
        **({"turns_mean": fmean(turns)} if turns else {}),
    }


def _shown(estimate: Estimate) -> str:
    if not math.isfinite(estimate.low):
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
