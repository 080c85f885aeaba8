"""Losses: the scalar that a microbatch is trained on, from the head's output for its rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import parallel_state

from megarl.algorithms import corrections, implicit_reward, kl
from megarl.algorithms.pairs import margins
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.ratio import ratio_of
from megarl.algorithms.sample_segments import SampleSegments
from megarl.algorithms.value_loss import squared_error
from megarl.config.algorithm_schema import KL, Algorithm, Correction, Objective, Value
from megarl.config.logprob_check_schema import Tolerance
from megarl.config.model_schema import ImplicitReward
from megarl.core.token_batch import TokenBatch
from megarl.megatron.context_parallel import sum_over_ranks
from megarl.megatron.metric_sums import Sums, largest, mean, total

Loss = Callable[[TokenBatch, torch.Tensor], tuple[torch.Tensor, Sums]]
"""A loss: (batch, scored) -> Σ w·ℓ over the microbatch, and its metrics. scored: float32 [N, columns of the head]."""


def policy_loss(
    algorithm: Algorithm,
    tolerance: Tolerance,
    kl_coefficient: float,
    batch: TokenBatch,
    scored: torch.Tensor,
    has_moved: bool = False,
) -> tuple[torch.Tensor, Sums]:
    """Returns the actor's loss and metrics.

    tolerance        how far the engine's log-probs may be from those of the policy at the start of the step
    kl_coefficient   the coefficient of this step
    scored           log-prob and entropy of each row, and its value where the critic is a head on the actor
    has_moved        whether the policy has been updated since the start of the step
    """
    assert batch.advantage is not None, "the batch has no advantages"
    scored = _of_trained(batch, scored)
    log_prob, entropy = scored[:, 0], scored[:, 1]
    old = _old(algorithm.correction, batch, log_prob)
    samples = _sample_segments(batch)
    objective, spec = algorithm.objective, algorithm.objective.spec
    assert batch.selected is not None or not spec.selects_tokens, (
        f"{spec.name}: the tokens that it treats apart are not selected"
    )
    inputs = [{"samples": samples, "selected": batch.selected}[name] for name in spec.inputs]
    policy = spec.loss(log_prob, old, batch.advantage, *inputs, **objective.options(spec.arguments))
    sums = _policy_metrics(batch, policy, log_prob, entropy) | _start_metrics(batch, log_prob, has_moved, tolerance)
    # Its mean over tokens of the old policy is KL(π_old ‖ π).
    sums["policy/kl_old"] = mean(kl.k3(old - log_prob), batch.mask)
    if objective.adapted_penalty_target is not None:
        sums["policy/penalty"] = mean(torch.full_like(log_prob, objective.option("penalty")), batch.mask)
    correction = _correction(algorithm.correction, batch, old, samples)
    factor = correction.factor
    if tolerance.mask is not None:
        start = _at_trained(batch, _start(batch, log_prob, has_moved), log_prob)
        log_ratio = start - _at_trained(batch, batch.rollout_logprobs, start)
        left_out = corrections.disagreeing(log_ratio, samples, tolerance.threshold, tolerance.mask)
        factor = factor.masked_fill(left_out, 0.0)
        sums["mismatch/masked_frac"] = mean(left_out, batch.mask)
    loss = (batch.weight * factor * policy.loss).sum()
    sums |= _correction_metrics(batch, correction)
    if objective.imitation_coefficient:
        imitation = -(batch.imitation_weight * log_prob).sum()
        loss = loss + objective.imitation_coefficient * imitation
        sums["policy/imitation_loss"] = total(imitation)
    if batch.selected is not None:
        sums["policy/selected_frac"] = mean(batch.selected, batch.in_loss)
    if objective.entropy_coefficient:
        loss = loss - objective.entropy_coefficient * (batch.weight * entropy).sum()
    if batch.reference is not None:
        estimate = _kl(algorithm.kl, batch, log_prob, samples)
        if algorithm.kl.placement == "loss":
            loss = loss + kl_coefficient * (batch.weight * estimate).sum()
        sums[algorithm.kl_metric] = mean(estimate, samples.share_at_level(algorithm.kl.level))
        sums["kl/coefficient"] = mean(torch.full_like(estimate, kl_coefficient), batch.mask)
    sums["policy/loss"] = total(loss)
    if scored.shape[-1] == 3:  # the critic is a head on the actor
        critic_loss, critic_sums = value_loss(algorithm.value, batch, scored[:, 2:])
        loss, sums = loss + critic_loss, sums | critic_sums
    return loss, sums


def _kl(config: KL, batch: TokenBatch, log_prob: torch.Tensor, samples: SampleSegments) -> torch.Tensor:
    """Returns the KL estimate of each token, or of its sample at each of its tokens. In a reward it is the KL of the
    policy at the start of the step, however far the updates have moved it since."""
    if config.placement == "reward":
        assert batch.old is not None, "the batch has no old log-probs"
        log_prob = batch.old
    log_ratio = log_prob - _at_trained(batch, batch.reference, log_prob)
    log_ratio = samples.at_level(config.level, log_ratio)
    return kl.estimate(config.estimator, log_ratio, config.straight_through, config.limit)


def _old(config: Correction, batch: TokenBatch, log_prob: torch.Tensor) -> torch.Tensor:
    """Returns the old policy's log-probs. Without a pass for them, because there is one update a step, the old policy
    is the current one: the ratio is 1, and its gradient that of log_prob."""
    old = batch.rollout_logprobs if config.old == "rollout" else batch.old
    return log_prob.detach() if old is None else _at_trained(batch, old, log_prob)


def _correction(
    config: Correction, batch: TokenBatch, old: torch.Tensor, samples: SampleSegments
) -> corrections.Factors:
    return corrections.factors(
        old - _at_trained(batch, batch.rollout_logprobs, old),
        samples,
        config.weight,
        config.weight_limit,
        config.mask,
        config.mask_low,
        config.mask_high,
        config.weight_floor,
    )


def _at_trained(batch: TokenBatch, other: torch.Tensor, log_prob: torch.Tensor) -> torch.Tensor:
    """Returns another policy's log-probs for trained tokens, and this one's for the others. Tokens that nobody sampled
    may have very different log-probs, and a weight of 0 would not keep an infinite ratio out of the loss."""
    return torch.where(batch.mask, other, log_prob.detach())


def _of_trained(batch: TokenBatch, scored: torch.Tensor) -> torch.Tensor:
    """Returns what the head says of trained tokens, and 0 for the others, whose gradient then is 0: no number times a
    weight of 0 is 0, where it is infinite or none."""
    return scored.where(batch.mask[:, None], 0.0)


def value_loss(config: Value, batch: TokenBatch, scored: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """Returns the critic's loss and metrics. scored: the value of each row, [N, 1]."""
    assert batch.values is not None and batch.returns is not None, "the batch has no returns"
    [value] = _of_trained(batch, scored).unbind(-1)
    error = squared_error(value, _at_trained(batch, batch.values, value), batch.returns, config.clip)
    loss = config.coefficient * (batch.weight * error.loss).sum()
    return loss, {
        "value/loss": total(loss),
        "value/mean": mean(value, batch.mask),
        "value/return_mean": mean(batch.returns, batch.mask),
        "value/error_abs_mean": mean((value - batch.returns).abs(), batch.mask),
        "value/clip_frac": mean(error.clipped, batch.mask),
        **_moments(batch),
    }


def _moments(batch: TokenBatch) -> Sums:
    """Returns the moments that `explained_variance` follows from: of returns, and of what the values before the step
    lack of them."""
    error = batch.returns - batch.values
    return {
        "value/return_square_mean": mean(batch.returns.double().square(), batch.mask),
        "value/residual_mean": mean(error.double(), batch.mask),
        "value/residual_square_mean": mean(error.double().square(), batch.mask),
    }


def implicit_reward_loss(config: ImplicitReward, batch: TokenBatch, scored: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """Returns the implicit reward model's loss and metrics: a mean over the update's samples. scored: log-prob and
    entropy."""
    assert batch.reference is not None, "the batch has no reference log-probs"
    samples = _sample_segments(batch)
    reward = samples.of_each(implicit_reward.token_reward(scored[:, 0], batch.reference, config.beta))
    success = (batch.reward > config.success_above).float()
    losses = implicit_reward.outcome_cross_entropy(reward, success)
    loss = (_sample_weight(batch, samples) * losses).sum()
    trained = samples.count > 0
    return loss, {
        "implicit_reward/loss": _whole_loss(loss),
        "implicit_reward/accuracy": mean((reward > 0) == (success > 0), trained),
        "implicit_reward/mean": mean(reward, trained),
    }


def imitation_loss(objective: Objective, batch: TokenBatch, scored: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """Returns loss and metrics of imitating the assistant's tokens. scored: log-prob and entropy."""
    log_prob, entropy = _of_trained(batch, scored).unbind(-1)
    loss = (batch.weight * objective.spec.loss(log_prob)).sum()
    return loss, {
        "policy/loss": total(loss),
        "policy/entropy": mean(entropy, batch.mask),
        "policy/nll": mean(-log_prob, batch.mask),
    }


def reward_model_loss(objective: Objective, batch: TokenBatch, scored: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """Returns a reward model's loss and metrics on pairs of samples. One token of each sample is trained on, and its
    score is the sample's. scored: [N, 1]."""
    samples = _sample_segments(batch)
    return _pair_loss(objective, batch, samples, samples.of_each(scored[:, 0]), "reward_model")


def label_loss(objective: Objective, batch: TokenBatch, scored: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """Returns a reward model's loss and metrics on labelled tokens, which are those that are trained on. scored:
    [N, 1]."""
    assert batch.labels is not None, "the batch has no labels"
    [score] = _of_trained(batch, scored).unbind(-1)
    label = batch.labels.where(batch.mask, 0.0)
    losses = objective.spec.loss(score, label, **objective.options(objective.spec.arguments))
    loss = (batch.weight * losses).sum()
    return loss, {
        "reward_model/loss": total(loss),
        "label/loss": mean(losses, batch.mask),
        "label/accuracy": mean((score > 0) == (label > 0.5), batch.mask),
        "label/mean": mean(label, batch.mask),
        "label/predicted_mean": mean(score.sigmoid(), batch.mask),
    }


def preference_loss(
    objective: Objective,
    tolerance: Tolerance | None,
    batch: TokenBatch,
    scored: torch.Tensor,
    has_moved: bool = False,
) -> tuple[torch.Tensor, Sums]:
    """Returns loss and metrics of pairs of samples, whose rewards are their log-probs, or their log-ratios to the
    reference.

    tolerance   as in policy_loss; None where no engine has sampled them
    scored      log-prob and entropy
    has_moved   whether the policy has been updated since the start of the step
    """
    samples, log_prob, entropy = _sample_segments(batch), scored[:, 0], scored[:, 1]
    reward = log_prob
    if objective.spec.reads_reference:
        assert batch.reference is not None, "the batch has no reference log-probs"
        reward = objective.option("beta") * (log_prob - _at_trained(batch, batch.reference, log_prob))
    rewards = samples.of_each(reward)
    if objective.option("length_normalised"):
        rewards = rewards / samples.count.clamp(min=1)
    loss, sums = _pair_loss(objective, batch, samples, rewards, "policy")
    sums["policy/entropy"] = mean(entropy, batch.mask)
    return loss, sums | ({} if tolerance is None else _start_metrics(batch, log_prob, has_moved, tolerance))


def _pair_loss(
    objective: Objective, batch: TokenBatch, samples: SampleSegments, rewards: torch.Tensor, name: str
) -> tuple[torch.Tensor, Sums]:
    """Returns loss and metrics of an update's pairs, whose samples stand two by two, the better one first: a mean over
    the pairs. rewards: the model's, float32 [S]. name: the first part of the loss metric's name."""
    margin = margins(rewards)
    weight = _sample_weight(batch, samples).view(-1, 2).sum(-1)
    chosen, rejected = rewards.view(-1, 2).unbind(-1)
    inputs = [{"better": chosen}[name] for name in objective.spec.inputs]
    losses = objective.spec.loss(margin, *inputs, **objective.options(objective.spec.arguments))
    loss = (weight * losses).sum()
    every = torch.ones_like(margin, dtype=torch.bool)
    return loss, {
        f"{name}/loss": _whole_loss(loss),
        "preference/loss": mean(losses, every),
        "preference/accuracy": mean(margin > 0, every),
        "preference/margin": mean(margin, every),
        "preference/chosen": mean(chosen, every),
        "preference/rejected": mean(rejected, every),
    }


def _sample_segments(batch: TokenBatch) -> SampleSegments:
    return SampleSegments(batch.mask, batch.row_sample, len(batch.reward), sum_over_ranks)


def _sample_weight(batch: TokenBatch, samples: SampleSegments) -> torch.Tensor:
    """Returns each sample's weight, float32 [S], which is the weight of each of its trained tokens."""
    return samples.total(batch.weight) / samples.count.clamp(min=1)


def _whole_loss(loss: torch.Tensor) -> tuple[torch.Tensor, None, str]:
    """Returns the metric of a loss of whole samples: every context-parallel rank has computed all of it, and reports
    its share."""
    return total(loss / parallel_state.get_context_parallel_world_size())


def _correction_metrics(batch: TokenBatch, correction: corrections.Factors) -> Sums:
    """Returns metrics of the correction, none without one."""
    sums: Sums = {}
    if correction.weight is not None:
        sums["correction/weight_mean"] = mean(correction.weight, batch.mask)
        sums["correction/weight_square_mean"] = mean(correction.weight.square(), batch.mask)
        sums["correction/weight_max"] = largest(correction.weight, batch.mask)
        sums["correction/limited_frac"] = mean(correction.limited, batch.mask)
    if correction.masked is not None:
        sums["correction/masked_frac"] = mean(correction.masked, batch.mask)
    return sums


def _truncation_metrics(batch: TokenBatch) -> Sums:
    """Returns how many candidate tokens the engine sampled from, where it listed them, and the share of sampled tokens
    that it did not list: a token as likely as the last of them."""
    if batch.candidate_ids is None:
        return {}
    listed = (batch.candidate_ids >= 0).sum(1)
    outside = (batch.candidate_ids != batch.targets[:, None]).all(1)
    return {
        "policy/candidates_mean": mean(listed.float(), batch.mask & (listed > 0)),
        "policy/outside_candidates_frac": mean(outside, batch.mask & (listed > 0)),
    }


def _policy_metrics(batch: TokenBatch, policy: PolicyLoss, log_prob, entropy) -> Sums:
    return _truncation_metrics(batch) | {
        "policy/entropy": mean(entropy, batch.mask),
        "policy/ratio_mean": mean(policy.ratio, batch.mask),
        "policy/ratio_max": largest(policy.ratio, batch.mask),
        "policy/clip_low_frac": mean(policy.clipped_low, batch.mask),
        "policy/clip_high_frac": mean(policy.clipped_high, batch.mask),
    }


def _start(batch: TokenBatch, log_prob: torch.Tensor, has_moved: bool) -> torch.Tensor | None:
    """Returns the log-probs of the policy at the start of the step, float32 [N]. Without a pass for them the first
    update alone has them, and later ones None."""
    return log_prob.detach() if batch.old is None and not has_moved else batch.old


def _start_metrics(batch: TokenBatch, log_prob: torch.Tensor, has_moved: bool, tolerance: Tolerance) -> Sums:
    """Returns metrics of the policy at the start of the step: the mismatch of its log-probs and the engine's, and once
    the policy has moved, its drift from there.

    Updates without log-probs of the start have no mismatch, and their drift is measured from the engine's. The moments
    of the weights trainer / engine are what `effective_share` follows from.
    """
    start = _start(batch, log_prob, has_moved)
    sums: Sums = {}
    if start is not None:
        log_ratio = start - batch.rollout_logprobs
        weight = ratio_of(log_ratio).double()
        sums["mismatch/logprob_abs_mean"] = mean(log_ratio.abs(), batch.mask)
        sums["mismatch/logprob_abs_max"] = largest(log_ratio.abs(), batch.mask)
        sums["mismatch/outlier_frac"] = mean(log_ratio.abs() > tolerance.threshold, batch.mask)
        # The engine sampled: its mean over tokens is KL(engine ‖ trainer).
        sums["mismatch/kl"] = mean(kl.k3(-log_ratio), batch.mask)
        sums["mismatch/weight_mean"] = mean(weight, batch.mask)
        sums["mismatch/weight_square_mean"] = mean(weight.square(), batch.mask)
    if has_moved:
        drift = (log_prob - (batch.rollout_logprobs if start is None else start)).abs()
        sums["policy/drift_abs_mean"] = mean(drift, batch.mask)
        sums["policy/drift_abs_max"] = largest(drift, batch.mask)
    return sums
