"""Generalized advantage estimation (GAE) from a critic's values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.returns import discounted_sum, same_sample, temporal_differences
from megarl.algorithms.shapes import require_one_shape
from megarl.algorithms.specs import TokenAdvantages, TokenEstimator
from megarl.core.ranges import PositiveFloat, Share

if TYPE_CHECKING:
    import torch


def gae(
    reward: torch.Tensor,
    mask: torch.Tensor,
    row_sample: torch.Tensor,
    value: torch.Tensor,
    gamma: float,
    gae_lambda: float,
    critic_lambda: float | None = None,
    length_alpha: float | None = None,
) -> TokenAdvantages:
    """Return A_t = Σ_l (γλ)^l·δ_{t+l}, where δ_t = r_t + γ·V(s_{t+1}) − V(s_t), and the critic's target A_t + V(s_t).

    GAE (https://arxiv.org/abs/1506.02438, eq. 16) with TD(λ) returns. The actions in a sample are its trained tokens.
    The state after one trained token is the state before the next; the state after the last trained token has value 0.

    Args:
        reward: float32 [N]. Rewards of untrained tokens are ignored.
        mask: bool [N], true for trained tokens.
        row_sample: int64 [N], index of each row's sample, non-decreasing.
        value: float32 [N]; value[t] belongs to the state in which token t was sampled. Values of untrained tokens
            are ignored.
        critic_lambda: λ for the critic's target if it differs from the policy's, as in the decoupled GAE of VC-PPO
            (https://arxiv.org/abs/2503.01491), which sets it to 1.
        length_alpha: if given, `length_adaptive_lambda` computes the policy's λ for each sample, and gae_lambda applies
            to the critic only.
    """
    require_one_shape(reward=reward, value=value, mask=mask, row_sample=row_sample)
    sample, now = row_sample[mask], value[mask]
    delta = temporal_differences(reward[mask], now, same_sample(sample, 1), gamma)
    policy_lambda = gae_lambda if length_alpha is None else length_adaptive_lambda(mask, row_sample, length_alpha)[mask]
    advantage = discounted_sum(delta, sample, gamma * policy_lambda)
    if critic_lambda is None and length_alpha is None:
        target = advantage
    else:
        target = discounted_sum(delta, sample, gamma * (gae_lambda if critic_lambda is None else critic_lambda))
    zeros = value.new_zeros(value.shape)
    return TokenAdvantages(zeros.masked_scatter(mask, advantage), zeros.masked_scatter(mask, target + now))


def length_adaptive_lambda(mask: torch.Tensor, row_sample: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return λ_i = max(0, 1 − 1/(α·l_i)), float64 [N], where l_i is the number of trained tokens of sample i.

    With this λ, Σ_t λ^t ≈ α·l_i: VAPO (https://arxiv.org/abs/2504.05118, section 4.2). float64 because λ is close to 1
    and float32 would lose the digits of 1 − λ. mask and row_sample are as in `gae`.
    """
    require_one_shape(mask=mask, row_sample=row_sample)
    trained = mask.double()
    samples = int(row_sample[-1]) + 1 if len(row_sample) else 0
    lengths = trained.new_zeros(samples).index_add(0, row_sample, trained)
    return (1 - 1 / (alpha * lengths.clamp(min=1))).clamp(min=0)[row_sample]


SPEC = TokenEstimator(
    name="gae",
    formula="Σ_l (γλ)^l·δ_{t+l}, δ_t = r_t + γ·V_{t+1} − V_t, whitened over the update",
    paper="GAE, arXiv 1506.02438",
    comparison="values",
    estimate=gae,
    parameters={
        "gamma": (Share, 1.0),
        "gae_lambda": (Share, 0.95),
        "critic_lambda": (Share | None, None),
        "length_alpha": (PositiveFloat | None, None),
    },
    whitens=True,
)
