"""KL-Cov: a KL penalty on the tokens with the highest covariance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.policy_loss import PolicyLoss, ratio_of
from megarl.algorithms.shapes import require_one_shape
from megarl.algorithms.specs import PolicyObjective, Selection
from megarl.core.ranges import PositiveFloat

if TYPE_CHECKING:
    import torch


def kl_cov(
    log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, selected: torch.Tensor, penalty: float
) -> PolicyLoss:
    """Return ℓ = −ρ·A, plus penalty·|log ρ| for the selected tokens: those with the highest covariance.

    KL-Cov (https://arxiv.org/abs/2505.22617, eq. 14 and 15), with the authors' estimate of the divergence. `selected`
    is bool [N].
    """
    require_one_shape(log_prob=log_prob, old=old, advantage=advantage, selected=selected)
    log_ratio = log_prob - old
    ratio = ratio_of(log_ratio)
    return PolicyLoss.of(-ratio * advantage + (penalty * log_ratio.abs()).masked_fill(~selected, 0.0), ratio)


def highest_covariance(covariance: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """Return the selection key, float32 [N]: the covariance itself. The highest keys are selected; `draw` is unused."""
    require_one_shape(covariance=covariance, draw=draw)
    return covariance


SPEC = PolicyObjective(
    name="kl_cov",
    formula="−ρ·A, + penalty·|log ρ| for the covariance_share of the tokens with the highest cov(log π_old, A)",
    paper="KL-Cov, arXiv 2505.22617",
    loss=kl_cov,
    inputs=("selected",),
    parameters={"penalty": (PositiveFloat, 1.0)},
    selection=Selection(order=highest_covariance, share=2e-3),
)
