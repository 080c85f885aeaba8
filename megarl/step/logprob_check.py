"""Comparison of trainer and engine log-probs: on the samples of every step, and on canary prompts before the first
step or after each refit."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from megarl.cluster.failure import RunFailure
from megarl.cluster.workers import Workers
from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.core.timing import ElapsedTime
from megarl.data.prompts import PromptSet
from megarl.step.canaries import Canaries
from megarl.step.causes import Evidence, describe, ranked
from megarl.step.scoring import Metrics


class LogprobCheck:
    """The comparison of log-probs during a run."""

    def __init__(self, config: Config, workers: Workers, data: PromptSet):
        self._config = config
        self._canaries = Canaries.of(config, workers, data)
        self._is_explained = False
        """Whether causes have been searched for, which a run that continues does once."""

    def begin(self) -> None:
        """Check the canary prompts before the first step, if logprob_check.canaries is set. Raises RunFailure, with the
        ranked causes, if an engine differs from the trainer by more than the limit."""
        if self._has_gate:
            elapsed = ElapsedTime()
            found = " and ".join(f"{metric.value:.1e}" for metric in self._gate("before the first step").values())
            elapsed.print(f"agreement: canary prompts differ by {found} a token, greedy and sampled, found")

    def after_refit(self, step: int) -> Metrics:
        """Check them after a step's refit. Return metrics. Raises RunFailure as `begin` does."""
        is_due = self._has_gate and self._config.logprob_check.canaries == "refits"
        return self._gate(f"after the refit of step {step}") if is_due else {}

    @property
    def _has_gate(self) -> bool:
        """Whether the run has canaries. A tokenizer may produce no tokens for any of them."""
        return self._config.logprob_check.canaries != "off" and bool(self._canaries.prompts)

    def check_step(self, metrics: Mapping[str, Metric]) -> None:
        """Warn if a step's tokens differ by more than the limit, the first time with the ranked causes. With
        logprob_check.action=stop, raise RunFailure with them instead.

        Args:
            metrics: those of the training, whose weights the engines now have.
        """
        found = excess(self._config, metrics)
        if found is None:
            return
        stops = self._config.logprob_check.action == "stop"
        if self._canaries.prompts and (stops or not self._is_explained):
            self._is_explained = True
            found = f"{found}. {self._explain()}"
        if stops:
            raise RunFailure(f"logprob_check.action=stop: {found}")
        print(f"megarl: warning: {found}", file=sys.stderr, flush=True)

    def _gate(self, when: str) -> Metrics:
        answers = self._canaries.ask()
        measured = self._canaries.measure(answers)
        if not all(evidence.agrees for evidence in measured.values()):
            explained = self._canaries.explain(answers, measured)
            raise RunFailure(
                f"agreement: {when}, {tell(explained)}\nagreement.canaries=off starts the run without this"
            )
        return {
            "mismatch/canary_greedy_abs_mean": Metric(max(evidence.greedy for evidence in measured.values())),
            "mismatch/canary_sampled_abs_mean": Metric(max(evidence.sampled for evidence in measured.values())),
        }

    def _explain(self) -> str:
        answers = self._canaries.ask()
        measured = self._canaries.measure(answers)
        if all(evidence.agrees for evidence in measured.values()):
            worst = max(max(evidence.greedy, evidence.sampled) for evidence in measured.values())
            return (
                f"With the weights that engines have taken since, canary prompts differ by at most {worst:.1e}: it has "
                "passed with the step's weights, or does not show in so few tokens"
            )
        return f"With the weights that engines have taken since, {tell(self._canaries.explain(answers, measured))}"


def announce(config: Config) -> list[str]:
    """Return a line about the tokens that the run excludes from the loss, if it does."""
    tolerance = config.tolerance
    if config.is_offline or tolerance.mask is None:
        return []
    what = {"token": "tokens", "sample": "samples with a token"}[tolerance.mask]
    return [f"agreement: {what} on which trainer and engine differ by more than {tolerance.threshold:g} have no loss"]


def excess(config: Config, metrics: Mapping[str, Metric]) -> str | None:
    """Describe by how much a step's tokens differ, if by more than the limit."""
    mismatch, limit = metrics.get("mismatch/logprob_abs_mean"), config.agreement_limit
    if mismatch is None or limit is None or mismatch.value <= limit:
        return None
    return f"the engines' log-probs differ from the trainer's by {mismatch.value:.1e} a token, above {_limit(config)}"


def tell(explained: Mapping[str, Evidence]) -> str:
    """Describe the engines' differences from the trainer on canary prompts, with ranked causes for the largest."""
    name, worst = max(explained.items(), key=lambda item: max(item[1].greedy, item[1].sampled))
    apart = [engine for engine, evidence in explained.items() if not evidence.agrees]
    return (
        f"{', '.join(apart)} of {len(explained)} engines differ from the trainer on canary prompts. {name} does by "
        f"{worst.greedy:.1e} a token where it samples greedily and by {worst.sampled:.1e} where it samples as the run "
        f"does, above {worst.limit:g}. Causes of this, the likeliest first:\n{describe(ranked(worst))}"
    )


def _limit(config: Config) -> str:
    if config.logprob_check.limit is not None:
        return f"logprob_check.limit={config.logprob_check.limit:g}"
    return f"what rounding of {config.precision} explains ({config.agreement_limit:g})"
