"""Estimators of KL(π ‖ π_ref) from log-probs of tokens sampled from π (Schulman, "Approximating KL divergence", 2020).

With r = log π_ref − log π:  k1 = −r (unbiased, may be negative) · k2 = r²/2 (biased, its gradient is right) ·
k3 = exp(r) − 1 − r (unbiased, never negative; the one in GRPO's loss).
"""

from __future__ import annotations

import torch


def k1(log_prob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return log_prob - reference


def k2(log_prob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return (log_prob - reference).square() / 2


def k3(log_prob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    log_ratio = reference - log_prob
    return torch.expm1(log_ratio) - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(estimator: str, log_prob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """log_prob, reference: float32 [N]. Returns the estimate per token, float32 [N], differentiable in log_prob."""
    if log_prob.shape != reference.shape:
        raise ValueError(f"log_prob {tuple(log_prob.shape)} and reference {tuple(reference.shape)} differ in shape")
    return ESTIMATORS[estimator](log_prob, reference)
