"""Microbatch metrics, computed from the terms of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core import parallel_state

from megarl.algorithms import kl
from megarl.algorithms.corrections import Factors
from megarl.algorithms.policy_loss import ratio_of
from megarl.core.row_batch import RowBatch
from megarl.core.step_batch import StepBatch
from megarl.core.token_batch import TokenBatch
from megarl.megatron import added_losses, denoising_losses, losses
from megarl.megatron.metric_sums import Sum, Sums, largest, mean, total


def policy_metrics(
    batch: RowBatch,
    terms: losses.PolicyTerms,
    *,
    mismatch_threshold: float,
    has_moved: bool,
    penalty: float | None,
    kl_name: str,
    kl_level: str,
    kl_coefficient: float,
    teachers: Sequence[str] = (),
) -> Sums:
    """Return the actor's metrics.

    Args:
        mismatch_threshold: log-prob difference, in nats, above which a token counts as an outlier.
        has_moved: whether the policy has been updated since the start of the step.
        penalty: the objective's penalty if it is adapted between steps, else None.
        kl_name, kl_level, kl_coefficient: the KL metric's name, and the KL's level and coefficient in this step.
        teachers: names of the teachers.
    """
    policy, log_prob, mask = terms.policy, terms.log_prob, batch.mask
    sums = _truncation_metrics(batch) | {
        "policy/entropy": mean(terms.entropy, mask),
        "policy/ratio_mean": mean(policy.ratio, mask),
        "policy/ratio_max": largest(policy.ratio, mask),
        "policy/clip_low_frac": mean(policy.clipped_low, mask),
        "policy/clip_high_frac": mean(policy.clipped_high, mask),
    }
    sums |= start_metrics(batch, log_prob, terms.start, has_moved, mismatch_threshold)
    divergence = _kl(batch, terms.old - log_prob) if terms.divergence is None else terms.divergence
    sums["policy/kl_old"] = mean(divergence, mask)
    if penalty is not None:
        sums["policy/penalty"] = mean(torch.full_like(log_prob, penalty), mask)
    if terms.excluded is not None:
        sums["mismatch/masked_frac"] = mean(terms.excluded, mask)
    sums |= _correction_metrics(batch, terms.correction)
    if terms.imitation is not None:
        sums["policy/imitation_loss"] = total(terms.imitation)
    if batch.selected is not None:
        sums["policy/selected_frac"] = mean(batch.selected, batch.in_loss)
    if terms.kl is not None:
        sums |= _reference_metrics(batch, terms.kl, terms.samples.share_at_level(kl_level), kl_name, kl_coefficient)
    if batch.teachers is not None:
        for name, log_probs in zip(teachers, batch.teachers.unbind(-1), strict=True):
            is_scored = mask & (log_probs != kl.UNSCORED)
            sums[f"kl/teacher_{name}"] = mean(kl.k1(terms.old - log_probs).where(is_scored, 0.0), is_scored)
    sums["policy/loss"] = total(terms.actor_loss)
    return sums if terms.value is None else sums | value_metrics(batch, terms.value)


def velocity_metrics(
    batch: StepBatch, terms: denoising_losses.VelocityTerms, *, has_moved: bool, kl_name: str, kl_coefficient: float
) -> Sums:
    """Return the metrics of an objective without log-probs. The arguments are as in `policy_metrics`."""
    sums = {"policy/loss": total(terms.loss)}
    if has_moved:
        sums["policy/velocity_change"] = mean(terms.change, batch.mask)
    if terms.kl is not None:
        sums |= _reference_metrics(batch, terms.kl, batch.mask, kl_name, kl_coefficient)
    return sums


def _reference_metrics(
    batch: RowBatch, divergence: torch.Tensor, share: torch.Tensor, name: str, coefficient: float
) -> Sums:
    """Return the metrics of the KL to the reference. `share`: weight of each value in `mean`."""
    return {
        name: mean(divergence, share),
        "kl/coefficient": mean(torch.full_like(divergence, coefficient), batch.mask),
    }


def start_metrics(
    batch: RowBatch, log_prob: torch.Tensor, start: torch.Tensor | None, has_moved: bool, mismatch_threshold: float
) -> Sums:
    """Return metrics relative to the policy at the start of the step. They include the mismatch between its log-probs
    and the engine's. Once updates have moved the policy, they also include the drift from its starting point.

    For stale samples, the difference between these log-probs also reflects the updates since they were sampled, so it
    is reported as policy lag. Updates without log-probs from the start of the step have no mismatch metrics, and their
    drift is measured from the engine's log-probs. The moments of the importance weights (trainer / engine) give the
    effective sample size.
    """
    sums: Sums = {}
    if start is not None:
        log_ratio = start - batch.rollout_logprobs
        weight = ratio_of(log_ratio).double()
        if batch.stale is None:
            sums |= _difference_metrics(batch, "mismatch", log_ratio, batch.mask)
        else:
            is_stale = batch.stale[batch.row_sample]
            sums |= _difference_metrics(batch, "mismatch", log_ratio, batch.mask & ~is_stale)
            sums |= _difference_metrics(batch, "policy_lag", log_ratio, batch.mask & is_stale)
        sums["mismatch/outlier_frac"] = mean(log_ratio.abs() > mismatch_threshold, batch.mask)
        sums["mismatch/weight_mean"] = mean(weight, batch.mask)
        sums["mismatch/weight_square_mean"] = mean(weight.square(), batch.mask)
    if has_moved:
        drift = (log_prob - (batch.rollout_logprobs if start is None else start)).abs()
        sums["policy/drift_abs_mean"] = mean(drift, batch.mask)
        sums["policy/drift_abs_max"] = largest(drift, batch.mask)
    return sums


def _difference_metrics(batch: RowBatch, section: str, log_ratio: torch.Tensor, mask: torch.Tensor) -> Sums:
    """Return the metrics of a log-ratio, log(trainer's / engine's probability), float32 [N]."""
    return {
        f"{section}/logprob_abs_mean": mean(log_ratio.abs(), mask),
        f"{section}/logprob_abs_max": largest(log_ratio.abs(), mask),
        f"{section}/kl": mean(_kl(batch, -log_ratio), mask),
    }


def _kl(batch: RowBatch, log_ratio: torch.Tensor) -> torch.Tensor:
    """Return an estimate, float32 [N], whose mean over rows is KL(μ ‖ π), from log μ − log π of rows sampled by μ.

    The log-prob of a denoising step is a mean over elements and varies far less than that of one element. k3 would
    underestimate its KL by a factor of the number of elements, and k1 has almost no variance.
    """
    return kl.k1(log_ratio) if isinstance(batch, StepBatch) else kl.k3(log_ratio)


def value_metrics(batch: RowBatch, terms: losses.ValueTerms) -> Sums:
    """Return the critic's metrics. The moments of returns and residuals give explained_variance."""
    mask, returns, residual = batch.mask, terms.returns, terms.residual.double()
    return {
        "value/loss": total(terms.loss),
        "value/mean": mean(terms.value, mask),
        "value/return_mean": mean(returns, mask),
        "value/error_abs_mean": mean((terms.value - returns).abs(), mask),
        "value/clip_frac": mean(terms.clipped, mask),
        "value/return_square_mean": mean(returns.double().square(), mask),
        "value/residual_mean": mean(residual, mask),
        "value/residual_square_mean": mean(residual.square(), mask),
    }


def mtp_metrics(batch: TokenBatch, terms: added_losses.MtpTerms, *, others: Callable) -> Sums:
    return {**others(batch, terms.others), "mtp/loss": total(terms.mtp)}


def distillation_metrics(
    batch: TokenBatch, terms: added_losses.DistillationTerms, *, others: Callable, teachers: Sequence[str]
) -> Sums:
    """Return the other loss's metrics with the divergence added to policy/loss, and the mean divergence from each
    teacher. `teachers`: names."""
    sums = others(batch, terms.others)
    value, weight, reduction = sums["policy/loss"]
    sums["policy/loss"] = value + terms.distillation.detach(), weight, reduction
    for name, divergence in zip(teachers, terms.divergences.unbind(-1), strict=True):
        sums[f"kl/teacher_{name}"] = mean(divergence, batch.mask & (divergence != kl.UNSCORED))
    return sums


def implicit_reward_metrics(batch: TokenBatch, terms: losses.ImplicitRewardTerms) -> Sums:
    trained = terms.samples.count > 0
    return {
        "implicit_reward/loss": _whole_loss(terms.loss),
        "implicit_reward/accuracy": mean((terms.reward > 0) == (terms.success > 0), trained),
        "implicit_reward/mean": mean(terms.reward, trained),
    }


def imitation_metrics(batch: TokenBatch, terms: losses.ImitationTerms) -> Sums:
    return {
        "policy/loss": total(terms.loss),
        "policy/entropy": mean(terms.entropy, batch.mask),
        "policy/nll": mean(-terms.log_prob, batch.mask),
    }


def label_metrics(batch: TokenBatch, terms: losses.LabelTerms) -> Sums:
    score, label, mask = terms.score, terms.label, batch.mask
    return {
        "reward_model/loss": total(terms.loss),
        "label/loss": mean(terms.losses, mask),
        "label/accuracy": mean((score > 0) == (label > 0.5), mask),
        "label/mean": mean(label, mask),
        "label/predicted_mean": mean(score.sigmoid(), mask),
    }


def reward_model_metrics(batch: TokenBatch, terms: losses.PairTerms) -> Sums:
    return {"reward_model/loss": _whole_loss(terms.loss), **_pair_metrics(terms)}


def preference_metrics(
    batch: TokenBatch, terms: losses.PreferenceTerms, *, mismatch_threshold: float | None, has_moved: bool
) -> Sums:
    """Return the metrics for a policy trained on preference pairs. `mismatch_threshold` is as in policy_metrics; None
    if the pairs were not sampled by an engine."""
    sums: Sums = {"policy/loss": _whole_loss(terms.loss), **_pair_metrics(terms.pairs)}
    sums["policy/entropy"] = mean(terms.entropy, batch.mask)
    if mismatch_threshold is None:
        return sums
    return sums | start_metrics(batch, terms.log_prob, terms.start, has_moved, mismatch_threshold)


def _pair_metrics(terms: losses.PairTerms) -> Sums:
    every = torch.ones_like(terms.margin, dtype=torch.bool)
    return {
        "preference/loss": mean(terms.losses, every),
        "preference/accuracy": mean(terms.margin > 0, every),
        "preference/margin": mean(terms.margin, every),
        "preference/chosen": mean(terms.chosen, every),
        "preference/rejected": mean(terms.rejected, every),
    }


def _whole_loss(loss: torch.Tensor) -> Sum:
    """Return the metric for a loss on whole samples. Each context-parallel rank reports 1/cp of the full loss."""
    return total(loss / parallel_state.get_context_parallel_world_size())


def _correction_metrics(batch: RowBatch, correction: Factors) -> Sums:
    sums: Sums = {}
    weight, limited = correction.weight, correction.limited
    if weight is not None and limited is not None:
        sums["correction/weight_mean"] = mean(weight, batch.mask)
        sums["correction/weight_square_mean"] = mean(weight.square(), batch.mask)
        sums["correction/weight_max"] = largest(weight, batch.mask)
        sums["correction/limited_frac"] = mean(limited, batch.mask)
    if correction.masked is not None:
        sums["correction/masked_frac"] = mean(correction.masked, batch.mask)
    return sums


def _truncation_metrics(batch: RowBatch) -> Sums:
    """If the engine listed its candidate tokens, return their mean number and the fraction of sampled tokens that are
    not listed. Such tokens are exactly as likely as the last candidate."""
    if not isinstance(batch, TokenBatch) or batch.candidate_ids is None:
        return {}
    listed = (batch.candidate_ids >= 0).sum(1)
    outside = (batch.candidate_ids != batch.targets[:, None]).all(1)
    return {
        "policy/candidates_mean": mean(listed.float(), batch.mask & (listed > 0)),
        "policy/outside_candidates_frac": mean(outside, batch.mask & (listed > 0)),
    }
