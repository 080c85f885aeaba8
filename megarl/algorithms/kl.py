"""Estimators of KL(π ‖ π_ref) from log-ratios d = log π − log π_ref of tokens sampled from π.

Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html), with r = exp(−d): k1 = d (unbiased, may
be negative) · k2 = d²/2 (biased, but its gradient is unbiased) · k3 = r − 1 − log r (unbiased, never negative; the one
in GRPO's loss, https://arxiv.org/abs/2402.03300, eq. 4) · abs = |d|. r is bounded as in ratio.py.

Which one a paper has follows from where its KL is: k1 in the reward, whose mean is the divergence that is taken off
(InstructGPT, https://arxiv.org/abs/2203.02155, eq. 2; RLOO, https://arxiv.org/abs/2402.14740; REINFORCE++,
https://arxiv.org/abs/2501.03262), and k3 of tokens in the loss. Of a whole response k3 grows exponentially in the sum
of the log-ratios, up to e²⁰ here, and one response drowns the others; k2 grows with its square, and has the gradient of
the divergence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from megarl.algorithms.ratio import bounded

if TYPE_CHECKING:
    import torch


class KLEstimator(NamedTuple):
    """An estimator: its formula in d for people to read, and its function of log-ratios d, float32 [N]."""

    formula: str
    function: Callable[[torch.Tensor], torch.Tensor]


def k1(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio


def k2(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.square() / 2


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    inverse = bounded(-log_ratio)
    return inverse.expm1() - inverse


def absolute(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.abs()


KL_ESTIMATORS: Mapping[str, KLEstimator] = {
    "k1": KLEstimator("d", k1),
    "k2": KLEstimator("d² / 2", k2),
    "k3": KLEstimator("exp(−d) − 1 + d", k3),
    "abs": KLEstimator("|d|", absolute),
}


def usual_estimator(placement: str, level: str) -> str:
    """Return the estimator of the papers whose KL is at this place: "reward" or "loss", of the "token" or the
    "sequence"."""
    if placement == "reward":
        return "k1"
    return "k3" if level == "token" else "k2"


def estimate(
    estimator: str, log_ratio: torch.Tensor, straight_through: bool = False, limit: float | None = None
) -> torch.Tensor:
    """Return the estimate of each log-ratio, float32 [N], differentiable in log_ratio.

    log_ratio          float32 [N], of single tokens or of the sum over whole samples
    straight_through   the estimate's value with the gradient of k2, d·∇d. Its mean over samples of π is the gradient of
                       the divergence, which no other of these has (k1's has the mean 0).
    limit              an estimate beyond ± this is cut down to it, and has no gradient unless it is straight-through;
                       verl's low_var_kl is k3 with 10
    """
    value = KL_ESTIMATORS[estimator].function(log_ratio)
    if limit is not None:
        value = value.clamp(-limit, limit)
    if not straight_through:
        return value
    surrogate = k2(log_ratio)
    return value.detach() + (surrogate - surrogate.detach())


def adapted(coefficient: float, divergence: float, target: float, num_samples: int, horizon: int) -> float:
    """Return β·(1 + e·num_samples/horizon) with e = clip(divergence/target − 1, −0.2, 0.2), which moves the divergence
    towards the target. Ziegler et al. (https://arxiv.org/abs/1909.08593, section 2.2), whose published code counts
    samples.

    divergence   the step's mean estimate
    """
    error = min(max(divergence / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_samples / horizon)


def adapted_penalty(penalty: float, divergence: float, target: float) -> float:
    """Return β / 2 where the divergence from the old policy is below target / 1.5, 2·β where it is above 1.5 · target,
    else β: PPO's adaptive penalty (https://arxiv.org/abs/1707.06347, section 4)."""
    if divergence < target / 1.5:
        return penalty / 2
    return penalty * 2 if divergence > target * 1.5 else penalty


def metric_name(placement: str, credits_to_go: bool, level: str, estimator: str, straight_through: bool) -> str:
    """Return the metric that names the form of the KL, such as kl/loss_token_k3, or kl/reward_to_go_token_k1 for a
    reward that counts for the tokens up to it."""
    parts = [placement, level, estimator]
    if placement == "reward":
        parts.insert(1, "to_go" if credits_to_go else "whole")
    return "kl/" + "_".join(parts) + ("_straight_through" if straight_through else "")
