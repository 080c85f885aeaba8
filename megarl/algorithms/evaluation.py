"""What is estimated from scores of several samples a prompt: their mean, pass@k and pass^k, each with an interval.

A score is None where the sample failed, which is no wrong answer: it counts nowhere, as if it had not been sampled. A
prompt that has fewer than k scores left says nothing of pass@k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance, variance

Z = 1.959963984540054
"""The quantile of the normal distribution that 95 % of it lie within, on both sides of its mean."""

Scores = Sequence[float | None]
"""The scores of the samples of one prompt."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts, and the 95 % interval of what it would be over all prompts that these were drawn from."""

    value: float
    low: float
    high: float


def estimates(scores: Sequence[Scores], samples_per_prompt: int, success_above: float) -> dict[str, Estimate]:
    """Return by name the estimates that the scores allow. scores: those of each prompt."""
    known = [[score for score in group if score is not None] for group in scores]
    num_samples = sum(map(len, known))
    found = {}
    if means := [fmean(group) for group in known if group]:
        are_shares = all(score in (0, 1) for group in known for score in group)
        ends = share_interval(means, num_samples) if are_shares else normal_interval(means)
        found[f"avg@{samples_per_prompt}"] = Estimate(fmean(means), *ends)
    successes = [(len(group), sum(score > success_above for score in group)) for group in known]
    for name, k, estimator in estimators(samples_per_prompt):
        if values := [estimator(n, c, k) for n, c in successes if n >= k]:
            found[name] = Estimate(fmean(values), *share_interval(values, num_samples))
    return found


def estimators(samples_per_prompt: int) -> list[tuple[str, int, Callable[[int, int, int], float]]]:
    """Return name, k and function of the estimates of successes: for k the powers of two below the number of samples,
    and this itself. With one sample pass^1 is pass@1."""
    ks = sorted({samples_per_prompt, *(2**i for i in range(samples_per_prompt.bit_length()))})
    ks = [k for k in ks if k <= samples_per_prompt]
    any_of = [(f"pass@{k}", k, pass_at_k) for k in ks]
    return any_of + [(f"pass^{k}", k, pass_all_k) for k in ks if k > 1]


def names(samples_per_prompt: int) -> list[str]:
    """Return the names of all estimates."""
    return [f"avg@{samples_per_prompt}", *(name for name, _, _ in estimators(samples_per_prompt))]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 − C(n − c, k) / C(n, k): the share of all sets of k of n samples, c of them successes, in which at
    least one is a success. Its mean is the probability that one of k samples is (arXiv 2107.03374, eq. 1)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def pass_all_k(n: int, c: int, k: int) -> float:
    """Return C(c, k) / C(n, k), pass^k: the share of all sets of k of n samples, c of them successes, in which all are
    (arXiv 2406.12045). Its mean is the probability that k samples are all successes."""
    return math.comb(c, k) / math.comb(n, k)


def share_interval(values: Sequence[float], num_samples: int) -> tuple[float, float]:
    """Return the ends of the 95 % interval of a mean over prompts of estimated probabilities.

    Prompts are drawn independently, the samples of one are not: the standard error is that of the prompts' values, as
    of clusters. The interval is Wilson's, of as many draws as give a share this error: at least one a prompt, at most
    all samples. It has a width also where all values are 0 or 1, and with one sample a prompt it is that of a binomial
    share.
    """
    mean, count = fmean(values), len(values)
    squared_error = pvariance(values, mean) / count
    draws = float(count) if mean in (0.0, 1.0) else float(max(num_samples, count))
    if squared_error > 0:
        draws = min(draws, mean * (1 - mean) / squared_error)
    return wilson(mean, draws)


def normal_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the normal 95 % interval of a mean over prompts, without end for one prompt."""
    mean, count = fmean(values), len(values)
    half = Z * math.sqrt(variance(values, mean) / count) if count > 1 else math.inf
    return mean - half, mean + half


def wilson(share: float, draws: float) -> tuple[float, float]:
    """Return the ends of Wilson's 95 % interval of a share of so many draws."""
    center = (share + Z * Z / (2 * draws)) / (1 + Z * Z / draws)
    half = Z / (1 + Z * Z / draws) * math.sqrt(share * (1 - share) / draws + Z * Z / (4 * draws * draws))
    return min(share, max(0.0, center - half)), max(share, min(1.0, center + half))  # exactly it at 0 and 1
