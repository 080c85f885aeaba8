"""The scalar that a microbatch is trained on, from what the head gives for its rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megarl.algorithms import kl, policy_loss, value_loss
from megarl.batch import TokenBatch
from megarl.config.schema import Algorithm, Value
from megarl.megatron.sums import Sums, largest, mean, total

Objective = Callable[[TokenBatch, torch.Tensor], tuple[torch.Tensor, Sums]]
"""(batch, scored) -> Σ w·ℓ over the microbatch, and its metrics. scored: float32 [N, columns of the head]."""


def policy_objective(algorithm: Algorithm, batch: TokenBatch, scored: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """The actor's. scored: log-prob and entropy of each row."""
    assert batch.advantage is not None, "the batch has no advantages"
    log_prob, entropy = scored.unbind(-1)
    # One update a step: the current policy is the old one, the ratio is 1, and its gradient that of log_prob.
    old = log_prob.detach() if batch.old is None else batch.old
    policy = policy_loss.clip(
        log_prob, old, batch.advantage, algorithm.objective.clip_low, algorithm.objective.clip_high
    )
    loss = (batch.weight * policy.loss).sum()
    sums = _policy_metrics(batch, policy, log_prob, entropy)
    if algorithm.objective.entropy_coefficient:
        loss = loss - algorithm.objective.entropy_coefficient * (batch.weight * entropy).sum()
    if batch.reference is not None:
        estimate = kl.kl_estimate(algorithm.kl.estimator, log_prob, batch.reference)
        loss = loss + algorithm.kl.coefficient * (batch.weight * estimate).sum()
        sums[f"kl/{algorithm.kl.estimator}"] = mean(estimate, batch.mask)
    sums["policy/loss"] = total(loss)
    return loss, sums


def value_objective(config: Value, batch: TokenBatch, scored: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """The critic's. scored: the value of each row, [N, 1]."""
    assert batch.values is not None and batch.returns is not None, "the batch has no returns"
    [value] = scored.unbind(-1)
    error = value_loss.squared_error(value, batch.values, batch.returns, config.clip)
    loss = (batch.weight * error.loss).sum()
    return loss, {
        "value/loss": total(loss),
        "value/mean": mean(value, batch.mask),
        "value/return_mean": mean(batch.returns, batch.mask),
        "value/error_abs_mean": mean((value - batch.returns).abs(), batch.mask),
        "value/clip_share": mean(error.clipped, batch.mask),
    }


def _policy_metrics(batch: TokenBatch, policy: policy_loss.PolicyLoss, log_prob, entropy) -> Sums:
    mismatch = (log_prob - batch.behaviour).abs()
    return {
        "policy/entropy": mean(entropy, batch.mask),
        "policy/ratio_mean": mean(policy.ratio, batch.mask),
        "policy/ratio_max": largest(policy.ratio, batch.mask),
        "policy/clip_low_share": mean(policy.clipped_low, batch.mask),
        "policy/clip_high_share": mean(policy.clipped_high, batch.mask),
        "mismatch/logprob_abs_mean": mean(mismatch, batch.mask),
        "mismatch/logprob_abs_max": largest(mismatch, batch.mask),
    }
