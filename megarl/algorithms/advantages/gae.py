"""Generalised advantages, from a critic's values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.returns import discounted_sum, same_sample
from megarl.algorithms.shapes import require_one_shape
from megarl.algorithms.specs import TokenAdvantages, TokenEstimator

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
    """Return A_t = Σ_l (γλ)^l·δ_{t+l} with δ_t = r_t + γ·V(s_{t+1}) − V(s_t), and the critic's target A_t + V(s_t).

    Generalised advantage estimation (https://arxiv.org/abs/1506.02438, eq. 16), with TD(λ) returns. A sample's actions
    are its trained tokens: the state after one of them is that before the next, and after the last one worth 0.

    reward, value   float32 [N]; value[t] is that of the state in which token t was sampled
    mask            bool [N], the trained tokens; rewards and values of others are not read
    row_sample      int64 [N], not decreasing
    critic_lambda   the critic's target has this λ, and not the policy's: decoupled GAE of VC-PPO
                    (https://arxiv.org/abs/2503.01491), where it is 1
    length_alpha    the policy's λ is `length_adaptive_lambda` of each sample, and gae_lambda the critic's
    """
    require_one_shape(reward=reward, value=value, mask=mask, row_sample=row_sample)
    sample, now = row_sample[mask], value[mask]
    following = now.roll(-1).where(same_sample(sample, 1), 0.0)
    delta = reward[mask] + gamma * following - now
    policy_lambda = gae_lambda if length_alpha is None else length_adaptive_lambda(mask, row_sample, length_alpha)[mask]
    advantage = discounted_sum(delta, sample, gamma * policy_lambda)
    if critic_lambda is None and length_alpha is None:
        target = advantage
    else:
        target = discounted_sum(delta, sample, gamma * (gae_lambda if critic_lambda is None else critic_lambda))
    zeros = value.new_zeros(value.shape)
    return TokenAdvantages(zeros.masked_scatter(mask, advantage), zeros.masked_scatter(mask, target + now))


def length_adaptive_lambda(mask: torch.Tensor, row_sample: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return λ_i = 1 − 1/(α·l_i), l_i the trained tokens of sample i, so that Σ_t λ^t ≈ α·l_i; 0 where it is negative.

    VAPO (https://arxiv.org/abs/2504.05118, section 4.2).

    mask         bool [N]
    row_sample   int64 [N]
    returns      float64 [N]: λ is close to 1, and float32 would lose the digits of 1 − λ
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
    arguments={"gamma": 1.0, "gae_lambda": 0.95, "critic_lambda": None, "length_alpha": None},
    whitens=True,
)
