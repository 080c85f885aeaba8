"""Estimates from the scores of several samples per prompt: mean, pass@k and pass^k, each with a confidence interval.

A score of None marks a failed sample. It is not a wrong answer: it is excluded, as if it had not been sampled. A prompt
with fewer than k remaining scores does not contribute to pass@k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance, variance

Z = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution: 95 % of it lies within ±Z."""

Scores = Sequence[float | None]
"""Scores of one prompt's samples; None for a failed sample."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its 95 % confidence interval for the population that the prompts were drawn from."""

    value: float
    low: float
    high: float


def estimates(scores: Sequence[Scores], samples_per_prompt: int, success_above: float) -> dict[str, Estimate]:
    """Return all estimates that the scores allow, by name. `scores` contains one entry per prompt."""
    known = [[score for score in group if score is not None] for group in scores]
    num_samples = sum(map(len, known))
    by_name = {}
    if means := [fmean(group) for group in known if group]:
        are_shares = all(score in (0, 1) for group in known for score in group)
        ends = share_interval(means, num_samples) if are_shares else normal_interval(means)
        by_name[f"avg@{samples_per_prompt}"] = Estimate(fmean(means), *ends)
    successes = [(len(group), sum(score > success_above for score in group)) for group in known]
    for name, k, estimator in estimators(samples_per_prompt):
        if values := [estimator(n, c, k) for n, c in successes if n >= k]:
            by_name[name] = Estimate(fmean(values), *share_interval(values, num_samples))
    return by_name


def estimators(samples_per_prompt: int) -> list[tuple[str, int, Callable[[int, int, int], float]]]:
    """Return (name, k, function) for each success-rate estimator. k takes the powers of two below samples_per_prompt
    and samples_per_prompt itself. pass^1 is omitted because it equals pass@1."""
    ks = sorted({samples_per_prompt, *(2**i for i in range(samples_per_prompt.bit_length()))})
    ks = [k for k in ks if k <= samples_per_prompt]
    any_of = [(f"pass@{k}", k, pass_at_k) for k in ks]
    return any_of + [(f"pass^{k}", k, pass_all_k) for k in ks if k > 1]


def names(samples_per_prompt: int) -> list[str]:
    """Return the names of all estimates."""
    return [f"avg@{samples_per_prompt}", *(name for name, _, _ in estimators(samples_per_prompt))]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 − C(n − c, k) / C(n, k): the fraction of k-subsets with at least one success, given n samples with c
    successes. Unbiased estimate of the probability that any of k samples succeeds (arXiv 2107.03374, eq. 1)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def pass_all_k(n: int, c: int, k: int) -> float:
    """Return C(c, k) / C(n, k), pass^k: the fraction of k-subsets with successes only, given n samples with c
    successes. Unbiased estimate of the probability that all of k samples succeed (arXiv 2406.12045)."""
    return math.comb(c, k) / math.comb(n, k)


def share_interval(values: Sequence[float], num_samples: int) -> tuple[float, float]:
    """Return the 95 % confidence interval for the mean of per-prompt probability estimates.

    Prompts are independent draws, but samples of one prompt are not, so the standard error is computed from the
    per-prompt values (clusters). The interval is Wilson's with an effective number of draws: the number that would give
    a proportion this error, at least one per prompt and at most all samples. It has positive width even if all values
    are 0 or 1. With one sample per prompt it is the interval for a binomial proportion.
    """
    mean, count = fmean(values), len(values)
    squared_error = pvariance(values, mean) / count
    draws = float(count) if mean in (0.0, 1.0) else float(max(num_samples, count))
    if squared_error > 0:
        draws = min(draws, mean * (1 - mean) / squared_error)
    return wilson(mean, draws)


def normal_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the normal 95 % confidence interval for a mean over prompts; infinite for a single prompt."""
    mean, count = fmean(values), len(values)
    half = Z * math.sqrt(variance(values, mean) / count) if count > 1 else math.inf
    return mean - half, mean + half


def wilson(share: float, draws: float) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval for a proportion observed in `draws` draws."""
    center = (share + Z * Z / (2 * draws)) / (1 + Z * Z / draws)
    half = Z / (1 + Z * Z / draws) * math.sqrt(share * (1 - share) / draws + Z * Z / (4 * draws * draws))
    low, high = max(0.0, center - half), min(1.0, center + half)
    return min(share, low), max(share, high)  # despite rounding errors, the interval must contain the proportion
