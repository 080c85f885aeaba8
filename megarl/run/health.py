"""Warnings about runs that cannot learn or are about to diverge, based on the metrics of their steps."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.config.run_schema import HealthWarning
from megarl.config.schema import Config
from megarl.core.files import is_plain

MIN_STEPS, MIN_SAMPLES = 3, 256
"""Minimum number of consecutive steps, and of samples in these steps, for which a condition must hold. If it holds for
256 samples, exceptions have a probability below 1.2 %, with a confidence of 95 % (rule of three)."""

TREND_STEPS = 10
"""Number of steps whose mean is compared with that of earlier steps."""

COLLAPSED_ENTROPY = 0.1
"""Entropy relative to the first steps below which the policy has collapsed."""

SOLVED_REWARD = 0.9
"""Mean reward at which low entropy is expected, because the policy solves most prompts. Most reward functions return at
most 1."""

MISMATCH_GROWTH, MISMATCH_SHARE = 3.0, 0.25
"""A warning is issued if the log-prob difference between trainer and engine has grown by the factor MISMATCH_GROWTH and
exceeds MISMATCH_SHARE · logprob_check.limit."""

Row = Mapping[str, Any]
"""The metrics of a step. Those of earlier attempts are read from metrics.jsonl, which users may edit."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A warning about a run. The message contains the likely causes and a remedy."""

    name: HealthWarning
    message: str


class Health:
    """Checks the metrics of each step and returns each warning once in a run.

    Args:
        rows: the metrics of the steps before this attempt.
        found: warnings of earlier attempts.
    """

    def __init__(self, config: Config, rows: Sequence[Row] = (), found: Collection[str] = ()) -> None:
        self._config, self._found = config, set(found)
        self._rows = [_checked_metrics(row) for row in rows]
        samples = config.batch.prompts_per_step * (1 if config.is_offline else config.batch.samples_per_prompt)
        self._window = max(MIN_STEPS, -(-MIN_SAMPLES // samples))

    def check(self, row: Row) -> list[Finding]:
        """Add the metrics of a step. Return the new warnings."""
        self._rows.append(_checked_metrics(row))
        findings = []
        for name, check in CHECKS.items():
            if name not in self._found and (message := check(self._config, self._rows, self._window)) is not None:
                self._found.add(name)
                findings.append(Finding(name, message))
        return findings


def _constant_reward(config: Config, rows: Sequence[Row], window: int) -> str | None:
    if not config.has_rewards or not _holds(rows, window, "reward/std", lambda std: std == 0):
        return None
    rewards = [reward for row in rows[-window:] if (reward := row.get("reward/mean")) is not None]
    if len(rewards) < window or len(set(rewards)) > 1:
        return None
    start = f"all rewards of the last {window} steps are {rewards[-1]:g}{_zero_gradient_note(rows, window)}. "
    earlier = [reward for row in rows[:-window] if (reward := row.get("reward/mean")) is not None]
    if earlier and rewards[-1] > min(earlier):
        return f"{start}Likely cause: the policy solves all prompts. Fix: add harder prompts, or end the run"
    if rewards[-1] <= 0 and _holds(rows, window, "response/truncated_frac", lambda frac: frac == 1):
        return f"{start}Likely cause: all responses are truncated before the answer. Fix: {_truncation_remedy(config)}"
    if earlier and rewards[-1] < max(earlier):
        return (
            f"{start}Earlier steps had rewards of up to {max(earlier):.3g}. Likely cause: updates have damaged the "
            "policy. Fix: read the responses in report.html, and resume from an earlier checkpoint with a lower "
            "actor.optimizer.lr"
        )
    return (
        f"{start}Likely causes: the reward function returns the same value for all responses, or the prompts are too "
        "hard or too easy. Fix: read responses and rewards in report.html, then correct the reward function, the "
        "prompts or data.answer_column"
    )


def _uninformative_groups(config: Config, rows: Sequence[Row], window: int) -> str | None:
    if not _learns_only_from_differences(config):
        return None
    is_varied = _holds(rows, window, "reward/std", lambda std: std > 0)
    if not is_varied or not _holds(rows, window, "reward/zero_std_groups", lambda frac: frac == 1):
        return None
    is_pairwise = config.algorithm.objective.spec.is_pairwise
    effect = "no sample is preferred over another" if is_pairwise else "group-relative advantages are 0"
    return (
        f"in the last {window} steps, all samples of each prompt have the same reward, so {effect}. "
        "Likely causes: the samples of a prompt are alike, or each prompt is either too easy or too hard. Fix: raise "
        "rollout.temperature or batch.samples_per_prompt, or use prompts of medium difficulty"
    )


def _zero_gradient(config: Config, rows: Sequence[Row], window: int) -> str | None:
    if not _holds(rows, window, "policy/grad_norm", lambda norm: norm == 0):
        return None
    start = f"the gradient norm was 0 in the last {window} steps"
    if config.is_offline:
        return (
            f"{start}. Likely causes: no token of the responses is trained on, or the loss is saturated. Fix: check "
            "the responses in the data, or start over with a lower actor.optimizer.lr"
        )
    has_equal_groups = _learns_only_from_differences(config) and any(
        row.get("reward/zero_std_groups") == 1 for row in rows[-window:]
    )
    if has_equal_groups or any(row.get("reward/std") == 0 for row in rows[-window:]):
        return None  # the rewards explain the gradient of 0
    return (
        f"{start}, but rewards differ. Likely causes: no token is trained on "
        "(algorithm.objective.skip_truncated, algorithm.correction.mask), or all tokens are clipped. Fix: check "
        "response/truncated_frac, policy/clip_low_frac and policy/clip_high_frac in report.html"
    )


def _all_truncated(config: Config, rows: Sequence[Row], window: int) -> str | None:
    if not _holds(rows, window, "response/truncated_frac", lambda frac: frac == 1):
        return None
    if _constant_reward(config, rows, window) is not None:
        return None  # the warning about constant rewards mentions the truncation
    return (
        f"all responses of the last {window} steps were truncated. Likely causes: rollout.max_new_tokens is too small "
        "for the prompts, or the model never ends its responses, like base models without a chat format. Fix: "
        f"{_truncation_remedy(config)}"
    )


def _entropy_collapse(config: Config, rows: Sequence[Row], window: int) -> str | None:
    entropies, rewards = _values(rows, "policy/entropy"), _values(rows, "reward/mean")
    if len(entropies) < max(window, TREND_STEPS) + MIN_STEPS or len(rewards) < 2 * TREND_STEPS:
        return None
    initial = fmean(entropies[:MIN_STEPS])
    recent, before = fmean(rewards[-TREND_STEPS:]), fmean(rewards[-2 * TREND_STEPS : -TREND_STEPS])
    has_collapsed = max(entropies[-max(window, MIN_STEPS) :]) < COLLAPSED_ENTROPY * initial
    if not has_collapsed or recent > before or recent >= SOLVED_REWARD:
        return None
    return (
        f"the policy's entropy fell from {initial:.3g} to {entropies[-1]:.3g}, while the mean reward no longer rises "
        f"({before:.3g} to {recent:.3g}), so the policy hardly explores. Likely causes: the learning rate is too high, "
        "or clipping suppresses rare tokens. Fix: resume from an earlier checkpoint with a lower actor.optimizer.lr, a "
        "higher algorithm.objective.clip_high or an algorithm.kl.coefficient"
    )


def _mismatch(config: Config, rows: Sequence[Row], window: int) -> str | None:
    values, limit = _values(rows[-1:], "mismatch/logprob_abs_mean"), config.agreement_limit
    if not values or values[0] <= limit:
        return None
    return (
        f"the mean log-prob difference between trainer and engines is {values[0]:.1e} (limit {limit:g}), so the "
        "engines do not sample from the policy that is trained. Likely causes are in this step's log. Fix: "
        f"address them, or run megarl diagnose {_folder(config)}"
    )


def _rising_mismatch(config: Config, rows: Sequence[Row], window: int) -> str | None:
    values, limit = _values(rows, "mismatch/logprob_abs_mean"), config.agreement_limit
    if len(values) < 3 * TREND_STEPS:
        return None
    first, before, recent = (
        fmean(part) for part in (values[:TREND_STEPS], values[-2 * TREND_STEPS : -TREND_STEPS], values[-TREND_STEPS:])
    )
    if recent <= max(MISMATCH_GROWTH * first, before, MISMATCH_SHARE * limit):
        return None
    return (
        f"the mean log-prob difference between trainer and engines has risen from {first:.1e} in the first "
        f"{TREND_STEPS} steps to {recent:.1e}. Likely causes: kernels whose rounding differs, or an unstable policy "
        f"(high learning rate). Fix: run megarl diagnose {_folder(config)}, set algorithm.correction.weight=token, or "
        "lower actor.optimizer.lr"
    )


Check = Callable[[Config, Sequence[Row], int], str | None]
"""Function that returns a message if a condition holds after the last of the given steps. The third argument is the
number of consecutive steps for which it must hold."""

CHECKS: Mapping[HealthWarning, Check] = {
    "constant_reward": _constant_reward,
    "uninformative_groups": _uninformative_groups,
    "zero_gradient": _zero_gradient,
    "all_truncated": _all_truncated,
    "entropy_collapse": _entropy_collapse,
    "mismatch": _mismatch,
    "rising_mismatch": _rising_mismatch,
}


METRICS = (
    *("reward/mean", "reward/std", "reward/zero_std_groups", "response/truncated_frac"),
    *("policy/grad_norm", "policy/entropy", "mismatch/logprob_abs_mean"),
)
"""The metrics that the checks read."""


def _checked_metrics(row: Row) -> Row:
    """Return the metrics that the checks read. Values that are not finite numbers become None."""
    values = {name: row.get(name) for name in METRICS}
    return {name: value if is_plain(value, float) else None for name, value in values.items()}


def _folder(config: Config) -> str:
    return shlex.quote(str(Path(config.run.folder) / config.run.name))


def _learns_only_from_differences(config: Config) -> bool:
    """Return whether groups whose samples all have the same reward do not train the actor."""
    if config.is_offline or config.batch.samples_per_prompt == 1:
        return False
    if config.algorithm.objective.spec.is_pairwise:
        return True
    advantage = config.algorithm.advantage
    rewards_tokens = advantage.credits_to_go or config.kl_in_reward or config.has_implicit_reward
    return advantage.spec.compares_samples and not rewards_tokens


def _truncation_remedy(config: Config) -> str:
    return (
        f"raise rollout.max_new_tokens={config.rollout.max_new_tokens}, or check in report.html how responses end "
        "(data.chat_template, rollout.stop)"
    )


def _zero_gradient_note(rows: Sequence[Row], window: int) -> str:
    is_zero = _holds(rows, window, "policy/grad_norm", lambda norm: norm == 0)
    return ", and the gradient norm is 0" if is_zero else ""


def _holds(rows: Sequence[Row], window: int, metric: str, condition: Callable[[float], bool]) -> bool:
    """Return whether the metric of each of the last `window` steps is finite and satisfies the condition."""
    values = [row.get(metric) for row in rows[-window:]]
    return len(values) == window and all(value is not None and condition(value) for value in values)


def _values(rows: Sequence[Row], metric: str) -> list[float]:
    return [value for row in rows if (value := row.get(metric)) is not None]
