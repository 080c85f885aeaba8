"""DiffusionNFT: a contrastive loss on velocities that needs no log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_latents, require_one_shape
from megarl.algorithms.specs import VelocityObjective
from megarl.algorithms.transition import element_mean, per_sample
from megarl.core.ranges import PositiveFloat

if TYPE_CHECKING:
    import torch

SMALLEST_ERROR = 1e-5
"""Lower bound on the mean absolute error, the divisor of the squared error in DiffusionNFT."""


def diffusion_nft(
    v: torch.Tensor,
    old_v: torch.Tensor,
    x0: torch.Tensor,
    x: torch.Tensor,
    sigma: torch.Tensor,
    advantage: torch.Tensor,
    mixture: float,
    advantage_limit: float,
) -> torch.Tensor:
    """Return ℓ = c/β·(r·E(v⁺) + (1 − r)·E(v⁻)), [N], differentiable in v.

    DiffusionNFT (https://arxiv.org/abs/2509.16117): v⁺ = (1 − β)·v_old + β·v and v⁻ = (1 + β)·v_old − β·v are the
    implicit policies of good and bad samples, r = ½ + ½·clip(A/c, −1, 1) is the probability that the sample is good,
    and E(v) is the squared error of x − σ·v against x0, divided by its mean absolute error. Any sampler may have drawn
    x0.

    Args:
        v: [N, …], velocity at x.
        old_v: [N, …], velocity of the policy that sampled x0.
        x0: [N, …], sampled latents.
        x: [N, …], x0 with fresh noise: `interpolate(x0, noise, sigma)`.
        sigma: [N].
        mixture: β > 0.
        advantage_limit: c > 0.
    """
    require_latents(v=v, old_v=old_v, x0=x0, x=x)
    require_one_shape(sigma=sigma, advantage=advantage)
    good = 0.5 + 0.5 * (advantage / advantage_limit).clamp(-1, 1)

    def error(velocity: torch.Tensor) -> torch.Tensor:
        difference = x - per_sample(sigma, x) * velocity - x0
        return element_mean(difference.square()) / element_mean(difference.detach().abs()).clamp(min=SMALLEST_ERROR)

    better = error((1 - mixture) * old_v + mixture * v)
    worse = error((1 + mixture) * old_v - mixture * v)
    return (advantage_limit / mixture * (good * better + (1 - good) * worse)).to(v.dtype)


SPEC = VelocityObjective(
    name="diffusion_nft",
    formula="c/β·(r·E(v_old + β·(v − v_old)) + (1 − r)·E(v_old − β·(v − v_old))), r = ½ + ½·clip(A/c, −1, 1), with "
    "β = mixture, c = advantage_limit, and E(v) the error of the image predicted with velocity v",
    paper="DiffusionNFT, arXiv 2509.16117",
    loss=diffusion_nft,
    parameters={"mixture": (PositiveFloat, 0.1), "advantage_limit": (PositiveFloat, 5.0)},
)
