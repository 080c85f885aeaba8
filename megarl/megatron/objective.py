"""The scalar that a microbatch is trained on, from the head's two vectors."""

from __future__ import annotations

import torch

from megarl.algorithms import advantages, kl, policy_loss
from megarl.batch import TokenBatch
from megarl.config.schema import Algorithm
from megarl.metrics import Metric

Sums = dict[str, tuple[torch.Tensor, torch.Tensor | None, str]]
"""name -> (value, weight, reduction), as tensors: read only after the last microbatch, so that no microbatch waits."""


def objective(
    algorithm: Algorithm, batch: TokenBatch, log_prob: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, Sums]:
    """Σ w·ℓ over the microbatch, and its metrics. log_prob, entropy: float32 [N], differentiable."""
    # One update a step: the current policy is the old one, the ratio is 1, and its gradient that of log_prob.
    old = log_prob.detach() if batch.old is None else batch.old
    per_sample = advantages.grpo(batch.reward, batch.group_mean, batch.group_std, algorithm.advantage.std_epsilon)
    policy = policy_loss.clip(
        log_prob, old, per_sample[batch.row_sample], algorithm.objective.clip_low, algorithm.objective.clip_high
    )
    loss = (batch.weight * policy.loss).sum()
    sums = _metrics(batch, policy, log_prob.detach(), entropy.detach())
    if algorithm.objective.entropy_coefficient:
        loss = loss - algorithm.objective.entropy_coefficient * (batch.weight * entropy).sum()
    if batch.reference is not None:
        estimate = kl.kl_estimate(algorithm.kl.estimator, log_prob, batch.reference)
        loss = loss + algorithm.kl.coefficient * (batch.weight * estimate).sum()
        sums[f"kl/{algorithm.kl.estimator}"] = _mean(estimate.detach(), batch.mask)
    sums["policy/loss"] = (loss.detach().clone(), None, "sum")
    return loss, sums


def read(sums: Sums) -> dict[str, Metric]:
    return {
        name: Metric(float(value), 1.0 if weight is None else float(weight), reduction)
        for name, (value, weight, reduction) in sums.items()
    }


def _metrics(batch: TokenBatch, policy: policy_loss.PolicyLoss, log_prob, entropy) -> Sums:
    mismatch = (log_prob - batch.behaviour).abs()
    return {
        "policy/entropy": _mean(entropy, batch.mask),
        "policy/ratio_mean": _mean(policy.ratio, batch.mask),
        "policy/ratio_max": _max(policy.ratio, batch.mask),
        "policy/clip_low_share": _mean(policy.clipped_low, batch.mask),
        "policy/clip_high_share": _mean(policy.clipped_high, batch.mask),
        "mismatch/logprob_abs_mean": _mean(mismatch, batch.mask),
        "mismatch/logprob_abs_max": _max(mismatch, batch.mask),
    }


def _mean(values: torch.Tensor, mask: torch.Tensor):
    """Mean over the trained tokens, weighted by their number when microbatches are merged."""
    count = mask.sum()
    return (values * mask).sum() / count.clamp(min=1), count, "mean"


def _max(values: torch.Tensor, mask: torch.Tensor):
    return torch.cat((values[mask], values.new_zeros(1))).max(), None, "max"
