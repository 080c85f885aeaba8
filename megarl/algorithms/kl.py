"""Estimators of KL(π ‖ π_ref) from log-ratios d = log π − log π_ref of tokens sampled from π.

Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html), with r = exp(−d):

    k1 = d               unbiased, may be negative
    k2 = d²/2            biased, but its gradient is unbiased
    k3 = r − 1 − log r   unbiased, never negative; used in GRPO's loss (https://arxiv.org/abs/2402.03300, eq. 4)
    abs = |d|

r is bounded as in policy_loss.py.

Papers choose the estimator by the placement of the KL. In the reward it is k1, whose mean is the divergence to subtract
(InstructGPT, https://arxiv.org/abs/2203.02155, eq. 2; RLOO, https://arxiv.org/abs/2402.14740; REINFORCE++,
https://arxiv.org/abs/2501.03262). In the loss it is k3 per token. k3 of a whole response grows exponentially with the
summed log-ratio, here up to e²⁰, so a single response would dominate the update; k2 grows quadratically and has the
gradient of the divergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from megarl.algorithms.policy_loss import bounded
from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


class KLEstimator(NamedTuple):
    """A KL estimator: its formula in d as text, and its function of log-ratios d, float32 [N]."""

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


STEP_KLS: Mapping[str, str] = {
    "gaussian": "mean((μ − μ_ref)²) / (2·s²), the exact KL",
    "velocity": "mean((v − v_ref)²)",
}
"""Estimator -> formula of the KL of a denoising step, computed from velocities and averaged over elements. Estimators
that use log-probs are not offered, because they would add variance."""


def usual_estimator(placement: str, level: str) -> str:
    """Return the estimator that papers use for a placement ("reward" or "loss") and level ("token" or "sequence")."""
    if placement == "reward":
        return "k1"
    return "k3" if level == "token" else "k2"


DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]
"""A divergence from a teacher over the full vocabulary. See ops.divergence."""


UNSCORED = math.inf
"""Placeholder for the log-prob under a teacher, or the divergence from the teacher, in rows that the teacher does not
score."""


def distillation_estimator(placement: str) -> str:
    """Return the estimator whose gradient, in this placement, is that of KL(π ‖ π_teacher): k1 in the advantage, k2 in
    the loss. The placement is "advantage" or "loss"."""
    return "k1" if placement == "advantage" else "k2"


def distillation(
    log_prob: torch.Tensor,
    teachers: torch.Tensor,
    mask: torch.Tensor,
    *,
    weights: Sequence[float],
    estimator: str,
    limit: float | None,
) -> torch.Tensor:
    """Return Σ_k w_k·K(log π − log π_k) over teachers k, float32 [N], differentiable in log_prob; 0 where the mask is
    false.

    On-policy distillation (https://arxiv.org/abs/2306.13649; https://thinkingmachines.ai/blog/on-policy-distillation)
    minimizes the divergence on the student's own samples. Tokens are independent: as an advantage, −K is the reward to
    go with discount 0.

    Args:
        log_prob: float32 [N], log-probs of sampled tokens under the student.
        teachers: float32 [N, K], log-probs of the same tokens under each teacher, or UNSCORED, which excludes the
            teacher from the token's divergence.
        mask: bool [N], true for trained tokens.
        weights: w_k of each teacher.
        limit: the bound on each estimate, as in `estimate`.
    """
    require_one_shape(log_prob=log_prob, mask=mask)
    if teachers.shape != (len(log_prob), len(weights)):
        expected = f"[{len(log_prob)}, {len(weights)}]"
        raise ValueError(f"teachers must have shape {expected}, got {tuple(teachers.shape)}")
    log_ratio = (log_prob[:, None] - teachers).where(mask[:, None] & (teachers != UNSCORED), 0.0)
    return estimate(estimator, log_ratio, limit=limit) @ log_ratio.new_tensor(weights)


def estimate(
    estimator: str, log_ratio: torch.Tensor, straight_through: bool = False, limit: float | None = None
) -> torch.Tensor:
    """Return the KL estimate of each log-ratio, float32 [N], differentiable in log_ratio.

    Args:
        log_ratio: float32 [N], of single tokens or summed over whole samples.
        straight_through: keep the estimate's value but use the gradient of k2, d·∇d. Its mean over samples of π is
            the gradient of the divergence. No other estimator has this property; k1's gradient has mean 0.
        limit: clamp estimates to ±limit. Clamped estimates have no gradient unless straight_through is set. verl's
            low_var_kl is k3 with limit 10.
    """
    value = KL_ESTIMATORS[estimator].function(log_ratio)
    if limit is not None:
        value = value.clamp(-limit, limit)
    if not straight_through:
        return value
    surrogate = k2(log_ratio)
    return value.detach() + (surrogate - surrogate.detach())


def kl_reward(
    old: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    coefficient: float,
    estimator: str,
    level: str,
    limit: float | None = None,
) -> torch.Tensor:
    """Return −coefficient · KL to the reference, float32 [R], for one sample's response; 0 where the mask is false.

    Level "token": r_t = −β·K(d_t) with d = log π_old − log π_ref, a reward at each trained token (InstructGPT with k1,
    arXiv 2203.02155, eq. 2; REINFORCE++, arXiv 2501.03262). Level "sequence": −β·K(Σ_t d_t) at the last trained token.

    Args:
        old: float32 [R], log-probs under the policy that sampled the response.
        reference: float32 [R], log-probs under the reference policy.
        mask: bool [R], true for trained tokens.
        limit: the bound on the estimates, as in `estimate`.
    """
    require_one_shape(old=old, reference=reference, mask=mask)
    log_ratio = (old - reference).where(mask, 0.0)
    if level == "token":
        return (-coefficient * estimate(estimator, log_ratio, limit=limit)).where(mask, 0.0)
    reward = old.new_zeros(old.shape)
    reward[mask.nonzero()[-1:, 0]] = -coefficient * estimate(estimator, log_ratio.sum(), limit=limit)
    return reward


def annealed(coefficient: float, final: float, num_steps: int, step: int) -> float:
    """Return the coefficient for a step, counting from 1: linear from `coefficient` in step 1 to `final` in step
    num_steps + 1, then constant."""
    done = min((step - 1) / num_steps, 1.0)
    return (1 - done) * coefficient + done * final


def adapted(coefficient: float, divergence: float, target: float, num_samples: int, horizon: int) -> float:
    """Return β·(1 + e·num_samples/horizon) with e = clip(divergence/target − 1, −0.2, 0.2), to reach the target.

    Ziegler et al. (https://arxiv.org/abs/1909.08593, section 2.2); counting samples follows their published code. The
    divergence is the step's mean KL estimate.
    """
    error = min(max(divergence / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_samples / horizon)


def adapted_penalty(penalty: float, divergence: float, target: float) -> float:
    """Return β / 2 if the divergence from the old policy is below target / 1.5, 2·β if it is above 1.5 · target, else
    β: PPO's adaptive penalty (https://arxiv.org/abs/1707.06347, section 4)."""
    if divergence < target / 1.5:
        return penalty / 2
    return penalty * 2 if divergence > target * 1.5 else penalty


def metric_name(placement: str, credits_to_go: bool, level: str, estimator: str, straight_through: bool) -> str:
    """Return the metric name for this form of the KL, such as kl/loss_token_k3, or kl/reward_to_go_token_k1 if the KL
    reward is credited to preceding tokens."""
    parts = [placement, level, estimator]
    if placement == "reward":
        parts.insert(1, "to_go" if credits_to_go else "whole")
    return "kl/" + "_".join(parts) + ("_straight_through" if straight_through else "")
