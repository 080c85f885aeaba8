"""One denoising step of a rectified-flow model as a Gaussian policy: mean, standard deviation, log-prob and KL.

A rectified flow has latents x_σ = (1 − σ)·x0 + σ·ε with noise ε. The model predicts the velocity v = ε − x0. Sampling
lowers σ from 1 (noise) to 0 (image) in N steps, from σ to σ' with Δ = σ − σ' > 0. The score of the distribution of x_σ
is −(x + (1 − σ)·v)/σ, so an Euler step of the reverse SDE with diffusion coefficient g samples x' from N(μ, s²):

    μ = x − Δ·(v + g²/(2σ)·(x + (1 − σ)·v)),   s = g·√Δ

The kinds differ in g, with noise level a:

    flow    g = a·√(σ/(1 − σ)); at σ = 1, the schedule's second σ replaces σ in 1 − σ
            (Flow-GRPO, https://arxiv.org/abs/2505.05470; a = 0.7)
    dance   g = a (DanceGRPO, https://arxiv.org/abs/2505.07818; a = 0.3)
    cps     s = σ'·sin(a·π/2), μ = (1 − σ')·(x − σ·v) + σ'·cos(a·π/2)·(x + (1 − σ)·v)
            (FlowCPS, https://arxiv.org/abs/2509.05952)

`flow` and `dance` keep the ODE's distribution at every σ. `cps` does not: it is not an SDE of this distribution, and
more steps do not correct the error. With a = 0, every kind is the Euler step of the ODE, which has no log-prob.

Latents and velocities are [B, …] and have the same dtype, float32 or float64. σ, log-probs, KL and weights are [B], one
value per sample: values of shape [B, 1, 1, 1] would broadcast a loss [B] to [B, 1, 1, B]. No result depends on the
other samples in the batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from megarl.algorithms.shapes import require_latents, require_one_shape

if TYPE_CHECKING:
    import torch

TransitionKind = Literal["flow", "dance", "cps"]

StepWeight = Literal["none", "deviation", "inverse_interval"]
"""Weight of a denoising step's loss: 1, s / mean(s) with the step's standard deviation s, or 1/Δσ."""


class Transition(NamedTuple):
    """Denoising steps of B samples: x' ~ N(from_x·x + from_v·v, std²). Each field is float64 [B]."""

    from_x: torch.Tensor
    from_v: torch.Tensor
    std: torch.Tensor


def transition(
    kind: TransitionKind,
    noise_level: float,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
    second_sigma: torch.Tensor,
) -> Transition:
    """Return the transitions from σ to σ' of B samples.

    Args:
        sigma: [B], σ in (0, 1].
        sigma_next: [B], σ' in [0, σ).
        second_sigma: [B], the second σ of each sample's schedule.
    """
    require_one_shape(sigma=sigma, sigma_next=sigma_next, second_sigma=second_sigma)
    sigma, sigma_next = sigma.double(), sigma_next.double()
    if kind == "cps":
        angle = noise_level * math.pi / 2
        kept = sigma_next * math.cos(angle)
        from_v = kept * (1 - sigma) - sigma * (1 - sigma_next)
        return Transition(1 - sigma_next + kept, from_v, sigma_next * math.sin(angle))
    diffusions = {
        "flow": sigma / (1 - sigma.where(sigma < 1, second_sigma.double())),
        "dance": sigma.new_ones(sigma.shape),
    }
    interval, variance = sigma - sigma_next, noise_level**2 * diffusions[kind]
    drift = interval * variance / (2 * sigma)
    return Transition(1 - drift, -interval - drift * (1 - sigma), (variance * interval).sqrt())


def guided(conditional: torch.Tensor, unconditional: torch.Tensor, guidance: float) -> torch.Tensor:
    """Return v_u + w·(v_c − v_u), the velocity under classifier-free guidance (https://arxiv.org/abs/2207.12598), from
    the velocities with and without the caption. At w = 1, it is the conditional velocity. diffusers' Z-Image pipeline
    calls w − 1 the guidance scale."""
    require_latents(conditional=conditional, unconditional=unconditional)
    return unconditional + guidance * (conditional - unconditional)


def mean(step: Transition, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return μ, the mean of x', [B, …], differentiable in v."""
    require_latents(x=x, v=v)
    return per_sample(step.from_x, x) * x + per_sample(step.from_v, x) * v


def sample(step: Transition, x: torch.Tensor, v: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return x' = μ + s·noise, [B, …]. The noise is standard normal, [B, …]."""
    require_latents(x=x, noise=noise)
    return mean(step, x, v) + per_sample(step.std, x) * noise


def log_prob(
    step: Transition,
    x: torch.Tensor,
    v: torch.Tensor,
    x_next: torch.Tensor,
    reduction: Literal["mean", "sum"] = "mean",
) -> torch.Tensor:
    """Return log N(x'; μ, s²), [B] in the dtype of x, differentiable in v.

    The published mean over a latent's elements makes the ratio the geometric mean of the elements' ratios. Clip ranges
    of 1e-5 to 1e-3 suit it. The sum is the log-density itself; for 10⁵ elements, float32 resolves it only to 0.01. s
    must be positive: `cps` has no log-prob at σ' = 0.
    """
    require_latents(x=x, x_next=x_next)
    error = (x_next - mean(step, x, v)) / per_sample(step.std, x)
    each = -element_mean(error.square()) / 2 - step.std.log() - math.log(2 * math.pi) / 2
    return (each if reduction == "mean" else each * x[0].numel()).to(x.dtype)


def entropy(step: Transition) -> torch.Tensor:
    """Return log s + ½·log(2πe), the entropy of x' as the mean over elements, float64 [B]. It does not depend on v."""
    return step.std.log() + math.log(2 * math.pi * math.e) / 2


def gaussian_kl(step: Transition, v: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return KL(π ‖ π_other), the mean over elements, [B] in the dtype of v, differentiable in both velocities.

    Both policies have the same s, so the divergence is mean((μ − μ_other)²)/(2·s²) and symmetric. It is computed from
    from_v·(v − v_other), to avoid the cancellation in μ − μ_other. For the SDEs it equals
    Δ/2·(g·(1 − σ)/(2σ) + 1/g)²·mean((v − v_other)²). Flow-GRPO's code divides by g² instead of s² and therefore
    returns Δ times the KL.
    """
    return ((step.from_v / step.std).square() / 2 * _mean_square_difference(v, other)).to(v.dtype)


def velocity_kl(v: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return mean((v − v_other)²) over elements, [B] in the dtype of v: the KL without its step-dependent factor
    (DiffusionNFT, https://arxiv.org/abs/2509.16117)."""
    return _mean_square_difference(v, other).to(v.dtype)


def _mean_square_difference(v: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    require_latents(v=v, other=other)
    return element_mean((v - other).square())


def interpolate(x0: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Return x_σ = (1 − σ)·x0 + σ·noise, [B, …], with σ [B]."""
    require_latents(x0=x0, noise=noise)
    return per_sample(1 - sigma, x0) * x0 + per_sample(sigma, x0) * noise


def per_sample(values: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Cast values [B] to the latents' dtype and reshape them to [B, 1, …], so that they broadcast over latents [B, …].
    Raise a ValueError for any other shape."""
    if values.shape != latents.shape[:1]:
        raise ValueError(f"values must have shape ({len(latents)},), one value per sample; got {tuple(values.shape)}")
    return values.to(latents.dtype).view(-1, *[1] * (latents.dim() - 1))


def element_mean(latents: torch.Tensor) -> torch.Tensor:
    """Return the mean over each sample's elements, float64 [B]. The order of summation may depend on the batch
    size; rounding the result to float32 hides the difference."""
    return latents.flatten(1).double().mean(1)


def sigma_schedule(num_steps: int, shift: float) -> list[float]:
    """Return σ = shift·t/(1 + (shift − 1)·t) for t = 1, 1 − 1/N, …, 0, N + 1 values.

    The shift is SD3's (https://arxiv.org/abs/2403.03206); a larger shift spends more steps at high noise.
    """
    return [_shifted(1 - i / num_steps, shift) for i in range(num_steps + 1)]


def trained_sigma_schedule(num_steps: int, shift: float) -> list[float]:
    """Return N + 1 values of σ. The first N are evenly spaced over the training schedule, from 1 to its smallest noise
    level (t = 1/1000, shifted), and then shifted. The last value is 0.

    Diffusers samples with these noise levels by default, and so do SD3's pipeline and Flow-GRPO's code.
    """
    smallest = _shifted(1e-3, shift)
    times = (1 - i * (1 - smallest) / max(1, num_steps - 1) for i in range(num_steps))
    return [*(_shifted(t, shift) for t in times), 0.0]


def _shifted(t: float, shift: float) -> float:
    return shift * t / (1 + (shift - 1) * t)


def sde_window(num_sde_steps: int, within: range, seed: int, run_step: int) -> range:
    """Return the denoising steps that a training step samples with the SDE and trains on; all others use the ODE.

    Flow-GRPO-Fast and MixGRPO (https://arxiv.org/abs/2507.21802) train on such a window. All samples of a training
    step share it, so that the rewards in a group differ by noise in the same denoising steps.

    Args:
        num_sde_steps: the length of the window.
        within: the denoising steps that may contain the window, such as the first half. Exclude the last one: its small
            s amplifies the latents' rounding errors in the log-prob.
    """
    start = random.Random(f"sde window {seed} {run_step}").randint(within.start, within.stop - num_sde_steps)
    return range(start, start + num_sde_steps)


def noised_steps(num_steps: int, within: range, seed: int, sample_id: str) -> list[int]:
    """Return the denoising steps, in ascending order, whose noise levels a training step uses to add new noise to a
    sampled image.

    DiffusionNFT (https://arxiv.org/abs/2509.16117) trains on such images. Its published code draws 9 of 10 steps for
    each image. Unlike the steps of `sde_window`, they may differ between images, because they do not affect rewards.
    """
    return sorted(random.Random(f"noised steps {seed} {sample_id}").sample(within, num_steps))


def step_weights(
    weight: StepWeight, kind: TransitionKind, noise_level: float, sigmas: torch.Tensor, trained: Sequence[int]
) -> torch.Tensor:
    """Return the loss weight of each denoising step of a schedule, float64 [N].

    "deviation" is s / mean(s): noisier steps explore more, and log-prob gradients grow with 1/s (TempFlow-GRPO,
    https://arxiv.org/abs/2508.04324). Its published constant 2.25 is 1/mean(s) for one schedule. "inverse_interval" is
    1/Δ, a factor of the loss in GRPO-Guard's published code (https://arxiv.org/abs/2510.22319).

    Args:
        sigmas: [N + 1], the schedule.
        trained: the denoising steps that the run trains on; s is averaged over them. With a window, pass all steps that
            it can contain, so that a step's weight does not depend on the window.
    """
    sigmas = sigmas.double()
    if weight == "none":
        return sigmas.new_ones(len(sigmas) - 1)
    if weight == "inverse_interval":
        return 1 / (sigmas[:-1] - sigmas[1:])
    std = transition(kind, noise_level, sigmas[:-1], sigmas[1:], sigmas[1].expand(len(sigmas) - 1)).std
    return std / std[list(trained)].mean()
