"""Losses of denoising steps, computed from the velocities of image models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch

from megarl.algorithms import transition
from megarl.algorithms.transition import TransitionKind
from megarl.core.step_batch import StepBatch
from megarl.megatron.losses import PolicyTerms, advantage_of


class VelocityTerms(NamedTuple):
    """The loss of an objective without log-probs, with float32 [N] tensors.

    Attributes:
        change: mean squared change of the velocity's elements since the start of the step.
        kl: divergence from the reference; None without a reference.
    """

    loss: torch.Tensor
    change: torch.Tensor
    kl: torch.Tensor | None


def velocity_loss(
    batch: StepBatch,
    v: torch.Tensor,
    *,
    objective: Callable[..., torch.Tensor],
    kl_coefficient: float,
    has_moved: bool,
) -> VelocityTerms:
    """Compute Σ w·ℓ + β·Σ w·mean((v − v_ref)²), differentiable in v.

    Args:
        v: [N, channels, height, width], the policy's velocity under guidance.
        objective: ℓ of each row; see VelocityObjective. Its options are bound.
        kl_coefficient: β.
        has_moved: whether the policy has been updated since the start of the step; if so, batch.old_v is required.
    """
    v = _trained_velocities(batch, v)
    old_v = v if batch.old_v is None and not has_moved else batch.old_v
    assert old_v is not None, "the batch has no velocities from the start of the step"
    old_v = _trained_velocities(batch, old_v).detach()
    inputs = (v, old_v, batch.next_latents, batch.latents, batch.sigma.to(v.dtype), advantage_of(batch).to(v.dtype))
    loss = (batch.weight * objective(*inputs).where(batch.mask, 0.0)).sum()
    kl = None
    if batch.reference_v is not None:
        kl = transition.velocity_kl(v, _trained_velocities(batch, batch.reference_v).detach())
        loss = loss + kl_coefficient * (batch.weight * kl).sum()
    return VelocityTerms(loss, transition.velocity_kl(v, old_v), kl)


def denoising_loss(
    batch: StepBatch,
    v: torch.Tensor,
    *,
    kind: TransitionKind,
    noise_level: float,
    reduction: Literal["mean", "sum"],
    policy: Callable[..., PolicyTerms],
    kl: Literal["gaussian", "velocity"],
    has_moved: bool,
) -> PolicyTerms:
    """Compute the policy loss over denoising steps, differentiable in v.

    Args:
        v: [N, channels, height, width], the policy's velocity under guidance.
        kind, noise_level: as in `transition`.
        reduction: as in `transition.log_prob`.
        policy: `policy_loss` with its options bound, except those that depend on v.
        kl: the divergence from the reference: the exact KL of the Gaussian policies, or `velocity_kl`.
        has_moved: whether the policy has been updated since the start of the step.

    The old policy's log-probs and the exact KL to it are computed from batch.old_v. If that is None because the step
    has a single update, the old policy is the current policy, so the KL and its gradient are 0.
    """
    x, mask = batch.latents, batch.mask
    trained = partial(_trained_velocities, batch)

    def masked(values: torch.Tensor) -> torch.Tensor:
        return values.to(x.dtype).where(mask, 0.0)

    step = transition.transition(kind, noise_level, batch.sigma, batch.sigma_next, batch.second_sigma)
    v = trained(v)
    log_prob = transition.log_prob(step, x, v, batch.next_latents, reduction)
    entropy = transition.entropy(step).to(x.dtype)
    start_v = v.detach() if batch.old_v is None and not has_moved else batch.old_v
    if batch.old_v is not None:
        old = transition.log_prob(step, x, trained(batch.old_v), batch.next_latents, reduction)
        batch = replace(batch, old=old.detach())
    divergence = None if start_v is None else masked(transition.gaussian_kl(step, v, trained(start_v).detach()))
    divergence_from_reference = None
    if batch.reference_v is not None:
        reference_v = trained(batch.reference_v).detach()
        divergence_from_reference = masked(
            transition.gaussian_kl(step, v, reference_v) if kl == "gaussian" else transition.velocity_kl(v, reference_v)
        )
    inputs = {"std": step.std.to(x.dtype)} | ({} if divergence is None else {"divergence": divergence})
    terms = policy(
        batch,
        torch.stack((log_prob, entropy), -1),
        estimate_kl=lambda *_: divergence_from_reference,
        inputs=inputs,
        row_factor=batch.step_weight,
    )
    return terms._replace(divergence=divergence)


def _trained_velocities(batch: StepBatch, velocity: torch.Tensor) -> torch.Tensor:
    """Return the velocities of trained rows, and 0 for all other rows, as in _mask_untrained."""
    return velocity.to(batch.latents.dtype).where(batch.mask.view(-1, 1, 1, 1), 0.0)
