"""Comparison between trainer and engine log-probs: on the samples in every step, and on canary prompts before the first
step and, if configured, after each refit."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from megarl.cluster.workers import Workers
from megarl.config.schema import Config
from megarl.core.errors import PermanentFailure
from megarl.core.metrics import Metric
from megarl.core.timing import ElapsedTime
from megarl.data.prompts import PromptSet
from megarl.step.canaries import Canaries
from megarl.step.causes import Evidence, describe, ranked
from megarl.step.image_canaries import ImageCanaries
from megarl.step.scoring import Metrics


class LogprobCheck:
    """Compares trainer and engine log-probs during a run."""

    def __init__(self, config: Config, workers: Workers, data: PromptSet):
        self._config = config
        self._canaries = (
            ImageCanaries.of(config, workers) if config.samples_images else Canaries.of(config, workers, data)
        )
        self._is_explained = False
        """Whether the possible causes have been checked. A run that continues after a warning checks them only once."""

    def begin(self) -> None:
        """Check the canary prompts before the first step, if logprob_check.canaries is set. Raise PermanentFailure if
        an engine differs from the trainer by more than the limit. The message ranks the causes."""
        if not self._has_gate:
            return
        elapsed = ElapsedTime()
        if isinstance(self._canaries, ImageCanaries):
            [difference] = (metric.value for metric in self._gate("before the first step").values())
            elapsed.print(f"logprob_check: passed, relative difference of canary velocities {difference:.1e}")
        else:
            greedy, sampled = (metric.value for metric in self._gate("before the first step").values())
            elapsed.print(
                f"logprob_check: passed, canary log-probs differ by {greedy:.1e} (greedy) and {sampled:.1e} (sampled) "
                "per token"
            )

    def after_refit(self, step: int) -> Metrics:
        """Check the canary prompts after a step's refit, if configured. Return metrics, or raise like `begin`."""
        is_due = self._has_gate and self._config.logprob_check.canaries == "refits"
        return self._gate(f"after the refit of step {step}") if is_due else {}

    @property
    def _has_gate(self) -> bool:
        """Whether the run checks canaries. False if the tokenizer yields no tokens for any canary prompt."""
        return self._config.logprob_check.canaries != "off" and self._has_canaries

    @property
    def _has_canaries(self) -> bool:
        return isinstance(self._canaries, ImageCanaries) or bool(self._canaries.prompts)

    def check_step(self, metrics: Mapping[str, Metric]) -> None:
        """Warn if log-probs in a step differ by more than the limit. The first warning ranks the causes. With
        logprob_check.action=stop, raise a PermanentFailure with the ranked causes instead. `metrics` are the step's
        training metrics. The engines must already have the weights trained in this step."""
        message = excess(self._config, metrics)
        if message is None:
            return
        stops = self._config.logprob_check.action == "stop"
        if self._has_canaries and (stops or not self._is_explained):
            self._is_explained = True
            message = f"{message}. {self._explain()}"
        if stops:
            raise PermanentFailure(f"logprob_check.action=stop: {message}")
        print(f"megarl: warning: {message}", file=sys.stderr, flush=True)

    def _gate(self, when: str) -> Metrics:
        if isinstance(self._canaries, ImageCanaries):
            differences = self._canaries.measure()
            if max(differences.values()) > self._canaries.limit:
                raise PermanentFailure(
                    f"logprob_check: {when}, {self._canaries.explain(differences)}\nThe limit is "
                    f"{self._canaries.limit:g}. Fix: check the installed versions with megarl doctor, or set "
                    "logprob_check.canaries=off to disable this check"
                )
            return {"mismatch/canary_velocity": Metric(max(differences.values()))}
        answers = self._canaries.sample()
        measured = self._canaries.measure(answers)
        if not all(evidence.agrees for evidence in measured.values()):
            explained = self._canaries.explain(answers, measured)
            raise PermanentFailure(
                f"logprob_check: {when}, {describe_differences(explained)}\nFix: apply the fix of the most likely "
                "cause, or set logprob_check.canaries=off to disable this check"
            )
        return {
            "mismatch/canary_greedy_abs_mean": Metric(max(evidence.greedy for evidence in measured.values())),
            "mismatch/canary_sampled_abs_mean": Metric(max(evidence.sampled for evidence in measured.values())),
        }

    def _explain(self) -> str:
        if isinstance(self._canaries, ImageCanaries):
            return f"With the engines' current weights, {self._canaries.explain(self._canaries.measure())}"
        answers = self._canaries.sample()
        measured = self._canaries.measure(answers)
        if all(evidence.agrees for evidence in measured.values()):
            worst = max(max(evidence.greedy, evidence.sampled) for evidence in measured.values())
            return (
                f"With the engines' current weights, canary log-probs differ by at most {worst:.1e}. Either the "
                "difference depends on the step's weights, or the canary prompts have too few tokens to show it"
            )
        return f"With the engines' current weights, {describe_differences(self._canaries.explain(answers, measured))}"


def announce(config: Config) -> list[str]:
    """Return a line about the tokens or denoising steps that the loss excludes; empty if it excludes none."""
    tolerance = config.tolerance
    if config.is_offline or tolerance.mask is None:
        return []
    excluded = {
        "token": f"{_unit(config)}s whose log-probs differ",
        "sample": "samples with a token whose log-prob differs",
    }[tolerance.mask]
    return [
        f"logprob_check: the loss excludes {excluded} between the trainer and the engine by more than "
        f"{tolerance.threshold:g}"
    ]


def excess(config: Config, metrics: Mapping[str, Metric]) -> str | None:
    """Describe the log-prob difference in a step if it is above the limit; otherwise return None."""
    mismatch, limit = metrics.get("mismatch/logprob_abs_mean"), config.agreement_limit
    if mismatch is None or mismatch.value <= limit:
        return None
    return (
        f"the engines' log-probs differ from the trainer's by {mismatch.value:.1e} per {_unit(config)}, which "
        f"exceeds {_limit(config)}"
    )


def _unit(config: Config) -> str:
    """Return the noun for an action of the policy: a token or a denoising step."""
    return "denoising step" if config.samples_images else "token"


def describe_differences(explained: Mapping[str, Evidence]) -> str:
    """Describe the engines' differences from the trainer on canary prompts. Rank the causes for the largest one."""
    name, worst = max(explained.items(), key=lambda item: max(item[1].greedy, item[1].sampled))
    differing = [engine for engine, evidence in explained.items() if not evidence.agrees]
    return (
        f"{len(differing)} of {len(explained)} engines ({', '.join(differing)}) exceed the limit of {worst.limit:g} "
        f"on canary prompts. {name} differs most from the trainer: by {worst.greedy:.1e} per token in greedy responses "
        f"and by {worst.sampled:.1e} in sampled responses. Possible causes, most likely first:\n"
        f"{describe(ranked(worst))}"
    )


def _limit(config: Config) -> str:
    if config.logprob_check.limit is not None:
        return f"logprob_check.limit={config.logprob_check.limit:g}"
    name = "limit for images" if config.samples_images else f"rounding limit for {config.precision}"
    return f"the {name} ({config.agreement_limit:g})"
