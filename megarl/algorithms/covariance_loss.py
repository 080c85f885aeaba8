"""Policy objectives that treat the few tokens apart whose log-prob and advantage vary together most: they are what
entropy is lost to (https://arxiv.org/abs/2505.22617, eq. 10).

A token's covariance is taken, as the tokens are chosen, before the first microbatch of an update, from log-probs of the
old policy: the paper's are of the current one, which is the same in the first update of a step.
"""

from __future__ import annotations

import torch

from megarl.algorithms.policy_loss import PolicyLoss, clip
from megarl.algorithms.ratio import ratio_of
from megarl.algorithms.shapes import require_one_shape


def covariance(old: torch.Tensor, advantage: torch.Tensor, mean_old: float, mean_advantage: float) -> torch.Tensor:
    """(log π_old − mean)·(A − mean), the means over all trained tokens of the update. float32 [N]."""
    require_one_shape(old=old, advantage=advantage)
    return (old - mean_old) * (advantage - mean_advantage)


def clip_cov_order(
    of_tokens: torch.Tensor, draw: torch.Tensor, covariance_low: float, covariance_high: float
) -> torch.Tensor:
    """What Clip-Cov's choice is highest in: a random draw, −∞ where the covariance is outside of its bounds.

    of_tokens, draw   float32 [N]; draw is of [0, 1)
    """
    require_one_shape(of_tokens=of_tokens, draw=draw)
    inside = (of_tokens >= covariance_low) & (of_tokens <= covariance_high)
    return torch.where(inside, draw, -torch.inf)


def clip_cov(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    selected: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's clip, and no loss for the selected tokens: some of those between the covariance's bounds, at random.

    Clip-Cov (https://arxiv.org/abs/2505.22617, eq. 11 to 13). The paper leaves out tokens that the clip holds; here
    the choice is made before the ratio is known. selected: bool [N].
    """
    require_one_shape(log_prob=log_prob, selected=selected)
    clipped = clip(log_prob, old, advantage, clip_low, clip_high)
    return clipped._replace(loss=torch.where(selected, 0.0, clipped.loss))


def kl_cov(
    log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, selected: torch.Tensor, penalty: float
) -> PolicyLoss:
    """ℓ = −ρ·A, + penalty·|log ρ| for the selected tokens: those of highest covariance.

    KL-Cov (https://arxiv.org/abs/2505.22617, eq. 14 and 15), with its authors' estimate of the divergence.
    selected: bool [N].
    """
    require_one_shape(log_prob=log_prob, old=old, advantage=advantage, selected=selected)
    log_ratio = log_prob - old
    ratio = ratio_of(log_ratio)
    return PolicyLoss.of(-ratio * advantage + torch.where(selected, penalty * log_ratio.abs(), 0.0), ratio)
