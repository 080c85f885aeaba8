"""Losses. Each function computes a microbatch's loss from the head's output for the microbatch's rows.

A loss function takes tensors and named scalars, and returns the loss Σ w·ℓ and its terms. The functions in
`loss_metrics` compute metrics from these terms. `configured_losses` binds the scalars to a recipe's values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from megarl.algorithms import kl
from megarl.algorithms.corrections import Factors
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.rewards import binary_cross_entropy, margins, token_reward
from megarl.algorithms.sample_segments import SampleSegments
from megarl.algorithms.value_loss import squared_error
from megarl.core.row_batch import RowBatch
from megarl.core.token_batch import TokenBatch
from megarl.megatron.context_parallel import sum_over_ranks

if TYPE_CHECKING:
    from megarl.algorithms.specs import PairObjective, PolicyObjective
    from megarl.megatron.metric_sums import Sums


class Terms(Protocol):
    """A loss and the values from which its metrics are computed."""

    @property
    def loss(self) -> torch.Tensor:
        """Σ w·ℓ over the microbatch."""
        ...


class Scalar(NamedTuple):
    """A loss without metrics."""

    loss: torch.Tensor


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and its metrics. `terms` maps a batch and the model's output to the Terms, and `metrics` maps the batch
    and the terms to the microbatch's metrics. The output is the head's for each row of a TokenBatch, float32
    [N, columns], or the velocities of a StepBatch, float32 [N, channels, height, width]."""

    terms: Callable[[Any, torch.Tensor], Terms]
    metrics: Callable[[Any, Any], Sums]


class ValueTerms(NamedTuple):
    """The critic's loss, with float32 [N] tensors: the predicted value, the returns, and the residuals, which are
    returns minus the values before the step. `clipped`, bool [N], is true where clipping removed the gradient."""

    loss: torch.Tensor
    value: torch.Tensor
    clipped: torch.Tensor
    returns: torch.Tensor
    residual: torch.Tensor


class PolicyTerms(NamedTuple):
    """The actor's loss. Tensors are float32 [N] unless noted; a term is None if the loss does not include it.

    Attributes:
        loss: the total loss, including the critic's loss if its head is on the actor.
        actor_loss: the total loss minus the critic's loss.
        scored: the head's output for all rows, including rows that are not trained on.
        log_prob, entropy: values for trained tokens; 0 for all other tokens.
        start: log-probs under the policy at the start of the step; None after the first update if no pass computed
            them.
        old: log-probs under the objective's old policy.
        excluded: bool, tokens excluded from the loss because trainer and engine log-probs disagree.
        imitation: Σ w·(−log π) over positive examples.
        kl: KL estimate per token, or the sample's estimate at each of its tokens.
        divergence: for denoising steps, the exact KL to the policy at the start of the step, if that policy's velocity
            is known.
    """

    loss: torch.Tensor
    actor_loss: torch.Tensor
    scored: torch.Tensor
    log_prob: torch.Tensor
    entropy: torch.Tensor
    start: torch.Tensor | None
    old: torch.Tensor
    samples: SampleSegments
    policy: PolicyLoss
    correction: Factors
    excluded: torch.Tensor | None
    imitation: torch.Tensor | None
    kl: torch.Tensor | None
    value: ValueTerms | None
    divergence: torch.Tensor | None = None


def policy_loss(
    batch: RowBatch,
    scored: torch.Tensor,
    *,
    objective: PolicyObjective,
    options: Mapping[str, Any],
    old_is_rollout: bool,
    has_moved: bool,
    correct: Callable[[torch.Tensor, SampleSegments], Factors],
    exclude: Callable[[torch.Tensor, SampleSegments], torch.Tensor] | None,
    estimate_kl: Callable[[RowBatch, torch.Tensor, SampleSegments], torch.Tensor | None],
    kl_coefficient: float | None,
    distillation: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None,
    entropy_coefficient: float,
    imitation_coefficient: float,
    value_coefficient: float,
    value_clip: float | None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    row_factor: torch.Tensor | None = None,
) -> PolicyTerms:
    """Compute Σ w·f·ℓ + c_I·Σ w_I·(−log π) − c_H·Σ w·H + β·Σ w·KL + Σ w·D, plus the critic's loss if its head is on
    the actor.

    Args:
        scored: log-prob and entropy for each row, and the value if the critic's head is on the actor.
        objective: the objective whose `loss` computes ℓ for each token.
        options: keyword arguments for `loss`.
        old_is_rollout: whether the ratio uses the engine's log-probs instead of the old policy's.
        has_moved: whether the policy has been updated since the start of the step.
        correct: (log π_old − log μ, samples) -> the correction factors f.
        exclude: (log π_start − log μ, samples) -> tokens to exclude from all of these terms except the critic's loss;
            None excludes no tokens.
        estimate_kl: (batch, log-probs, samples) -> the KL to the reference for each row, such as `token_kl` with its
            options bound; None without a reference.
        kl_coefficient: β; None if the KL is part of the reward.
        distillation: D, the divergence from the teachers: `kl.distillation` with its options bound. None without
            teachers, or if the divergence is part of the advantage or exact.
        inputs: inputs of the objective that the batch does not hold, by name, float32 [N].
        row_factor: a factor of each row's ℓ, in addition to f, float32 [N]; None: 1.
    """
    trained = _mask_untrained(batch, scored)
    log_prob, entropy, samples = trained[:, 0], trained[:, 1], sample_segments(batch)
    start = log_prob.detach() if batch.old is None and not has_moved else batch.old
    old = _old(batch, log_prob, batch.rollout_logprobs if old_is_rollout else batch.old)
    assert batch.selected is not None or not objective.selects_tokens, (
        f"{objective.name}: the batch has no token selection"
    )
    known_inputs = {"samples": samples, "selected": batch.selected, **(inputs or {})}
    assert known_inputs.keys() >= {*objective.inputs}, f"{objective.name}: inputs {objective.inputs} are incomplete"
    policy = objective.loss(
        log_prob, old, advantage_of(batch), *(known_inputs[name] for name in objective.inputs), **options
    )
    correction = correct(old - _replace_untrained(batch, batch.rollout_logprobs, old), samples)
    factor, excluded, weight = correction.factor, None, batch.weight
    if exclude is not None:
        assert start is not None, "the batch has no log-probs from the start of the step"
        known = _replace_untrained(batch, start, log_prob)
        excluded = exclude(known - _replace_untrained(batch, batch.rollout_logprobs, known), samples)
        weight = weight.masked_fill(excluded, 0.0)
    loss = (weight * factor * (policy.loss if row_factor is None else row_factor * policy.loss)).sum()
    imitation = None
    if imitation_coefficient:
        assert batch.imitation_weight is not None, "the batch has no imitation weights"
        imitation_weight = batch.imitation_weight
        if excluded is not None:
            imitation_weight = imitation_weight.masked_fill(excluded, 0.0)
        imitation = -(imitation_weight * log_prob).sum()
        loss = loss + imitation_coefficient * imitation
    if entropy_coefficient:
        loss = loss - entropy_coefficient * (weight * entropy).sum()
    kl_estimate = estimate_kl(batch, log_prob, samples)
    if kl_estimate is not None and kl_coefficient is not None:
        loss = loss + kl_coefficient * (weight * kl_estimate).sum()
    if distillation is not None:
        assert batch.teachers is not None, "the batch has no log-probs under the teachers"
        loss = loss + (weight * distillation(log_prob, batch.teachers, batch.mask)).sum()
    whole, value = loss, None
    if scored.shape[-1] == 3:  # the critic is a head on the actor
        value = value_loss(batch, scored[:, 2:], coefficient=value_coefficient, clip=value_clip)
        whole = loss + value.loss
    parts = (whole, loss, scored, log_prob, entropy, start, old, samples)
    return PolicyTerms(*parts, policy, correction, excluded, imitation, kl_estimate, value)


def advantage_of(batch: RowBatch) -> torch.Tensor:
    assert batch.advantage is not None, "the batch has no advantages"
    return batch.advantage


def token_kl(
    batch: RowBatch,
    log_prob: torch.Tensor,
    samples: SampleSegments,
    *,
    in_reward: bool,
    level: str,
    estimator: str,
    straight_through: bool,
    limit: float | None,
) -> torch.Tensor | None:
    """Return the KL estimate per token, float32 [N], or at sample level the sample's estimate at each of its tokens. A
    KL in the reward is computed for the policy at the start of the step, regardless of later updates. Return None if
    the batch has no reference log-probs."""
    if batch.reference is None:
        return None
    if in_reward:
        assert batch.old is not None, "the batch has no old log-probs"
        log_prob = batch.old
    log_ratio = samples.at_level(level, log_prob - _replace_untrained(batch, batch.reference, log_prob))
    return kl.estimate(estimator, log_ratio, straight_through, limit)


def value_loss(batch: RowBatch, scored: torch.Tensor, *, coefficient: float, clip: float | None) -> ValueTerms:
    """Compute the critic's loss. `scored` holds one value per row, [N, 1]."""
    assert batch.values is not None and batch.returns is not None, "the batch has no returns"
    [value] = _mask_untrained(batch, scored).unbind(-1)
    error = squared_error(value, _replace_untrained(batch, batch.values, value), batch.returns, clip)
    loss = coefficient * (batch.weight * error.loss).sum()
    return ValueTerms(loss, value, error.clipped, batch.returns, batch.returns - batch.values)


class ImplicitRewardTerms(NamedTuple):
    """The implicit reward model's loss, and each sample's reward and success (1 or 0), float32 [S]."""

    loss: torch.Tensor
    samples: SampleSegments
    reward: torch.Tensor
    success: torch.Tensor


def implicit_reward_loss(
    batch: TokenBatch, scored: torch.Tensor, *, beta: float, success_above: float
) -> ImplicitRewardTerms:
    """Compute the implicit reward model's loss, a mean over samples. `scored` holds log-prob and entropy."""
    assert batch.reference is not None, "the batch has no reference log-probs"
    samples = sample_segments(batch)
    reward = samples.differentiable_total(token_reward(scored[:, 0], batch.reference, beta))
    success = (batch.reward > success_above).float()
    losses = binary_cross_entropy(reward, success)
    return ImplicitRewardTerms((_sample_weight(batch, samples) * losses).sum(), samples, reward, success)


class ImitationTerms(NamedTuple):
    """The imitation loss, with log-prob and entropy of trained tokens, float32 [N]."""

    loss: torch.Tensor
    log_prob: torch.Tensor
    entropy: torch.Tensor


def imitation_loss(
    batch: TokenBatch, scored: torch.Tensor, *, token_loss: Callable[[torch.Tensor], torch.Tensor]
) -> ImitationTerms:
    """Compute the imitation loss on assistant tokens. `scored` holds log-prob and entropy."""
    log_prob, entropy = _mask_untrained(batch, scored).unbind(-1)
    return ImitationTerms((batch.weight * token_loss(log_prob)).sum(), log_prob, entropy)


class LabelTerms(NamedTuple):
    """A reward model's loss on token labels, with the losses, scores and labels of the tokens, float32 [N]."""

    loss: torch.Tensor
    losses: torch.Tensor
    score: torch.Tensor
    label: torch.Tensor


def label_loss(batch: TokenBatch, scored: torch.Tensor, *, token_loss: Callable[..., torch.Tensor]) -> LabelTerms:
    """Compute a reward model's loss on the labeled (trained) tokens. `scored`, [N, 1], holds one score per row."""
    assert batch.labels is not None, "the batch has no labels"
    [score] = _mask_untrained(batch, scored).unbind(-1)
    label = batch.labels.where(batch.mask, 0.0)
    losses = token_loss(score, label)
    return LabelTerms((batch.weight * losses).sum(), losses, score, label)


class PairTerms(NamedTuple):
    """The loss on an update's pairs, with each pair's loss, margin and the rewards of both samples, float32 [P]."""

    loss: torch.Tensor
    losses: torch.Tensor
    margin: torch.Tensor
    chosen: torch.Tensor
    rejected: torch.Tensor


class PreferenceTerms(NamedTuple):
    """A policy's loss on an update's pairs. log_prob, entropy and start are as in PolicyTerms."""

    loss: torch.Tensor
    pairs: PairTerms
    log_prob: torch.Tensor
    entropy: torch.Tensor
    start: torch.Tensor | None


def reward_model_loss(
    batch: TokenBatch, scored: torch.Tensor, *, objective: PairObjective, options: Mapping[str, Any]
) -> PairTerms:
    """Compute a reward model's loss on sample pairs from the score of each sample's trained token. `scored`: [N, 1]."""
    samples = sample_segments(batch)
    return _pair_loss(batch, samples, samples.differentiable_total(scored[:, 0]), objective, options)


def preference_loss(
    batch: TokenBatch,
    scored: torch.Tensor,
    *,
    objective: PairObjective,
    options: Mapping[str, Any],
    beta: float | None,
    length_normalised: bool,
    has_moved: bool,
) -> PreferenceTerms:
    """Compute a policy's loss on sample pairs. A sample's reward is its log-prob, or β times its log-ratio. `scored`
    holds log-prob and entropy for each row. beta is None if the objective has no reference. has_moved is true if the
    policy has been updated since the start of the step."""
    samples, log_prob, entropy = sample_segments(batch), scored[:, 0], scored[:, 1]
    reward = log_prob
    if beta is not None:
        assert batch.reference is not None, "the batch has no reference log-probs"
        reward = beta * (log_prob - _replace_untrained(batch, batch.reference, log_prob))
    rewards = samples.differentiable_total(reward)
    if length_normalised:
        rewards = rewards / samples.count.clamp(min=1)
    start = log_prob.detach() if batch.old is None and not has_moved else batch.old
    pairs = _pair_loss(batch, samples, rewards, objective, options)
    return PreferenceTerms(pairs.loss, pairs, log_prob, entropy, start)


def _pair_loss(
    batch: TokenBatch,
    samples: SampleSegments,
    rewards: torch.Tensor,
    objective: PairObjective,
    options: Mapping[str, Any],
) -> PairTerms:
    """Compute the mean loss over pairs. `rewards`, float32 [S], lists pair after pair, preferred first."""
    margin = margins(rewards)
    weight = _sample_weight(batch, samples).view(-1, 2).sum(-1)
    chosen, rejected = rewards.view(-1, 2).unbind(-1)
    inputs = [{"better": chosen}[name] for name in objective.inputs]
    losses = objective.loss(margin, *inputs, **options)
    return PairTerms((weight * losses).sum(), losses, margin, chosen, rejected)


def sample_segments(batch: RowBatch) -> SampleSegments:
    """Return the samples of a batch. Context-parallel ranks split the tokens of a sample, but each has all denoising
    steps of an image."""
    rows = batch.mask, batch.row_sample, len(batch.reward)
    return SampleSegments(*rows, sum_over_ranks) if isinstance(batch, TokenBatch) else SampleSegments(*rows)


def _old(batch: RowBatch, log_prob: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """Return the old policy's log-probs. If no pass computed them because the step has a single update, the old policy
    is the current policy: the ratio is 1, and its gradient is the gradient of log_prob."""
    return log_prob.detach() if old is None else _replace_untrained(batch, old, log_prob)


def _replace_untrained(batch: RowBatch, other: torch.Tensor, log_prob: torch.Tensor) -> torch.Tensor:
    """Return the log-probs `other` for trained tokens and `log_prob` for all remaining tokens. Tokens that no policy
    sampled may have very different log-probs, and a weight of 0 does not remove an infinite ratio from the loss."""
    return torch.where(batch.mask, other, log_prob.detach())


def _mask_untrained(batch: RowBatch, scored: torch.Tensor) -> torch.Tensor:
    """Return the head's output for trained tokens and 0 for all remaining tokens, which makes their gradient 0. A
    weight of 0 would not suffice: it turns an infinite or NaN output into NaN."""
    return scored.where(batch.mask[:, None], 0.0)


def _sample_weight(batch: RowBatch, samples: SampleSegments) -> torch.Tensor:
    """Return each sample's weight, float32 [S]. All trained tokens in a sample have this weight."""
    return samples.total(batch.weight) / samples.count.clamp(min=1)
