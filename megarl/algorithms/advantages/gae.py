"""Generalised advantages, from a critic's values."""

from __future__ import annotations

import torch

from megarl.algorithms.advantages.returns import discounted_sum, same_sample
from megarl.algorithms.shapes import require_one_shape


def gae(
    reward: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    row_sample: torch.Tensor,
    gamma: float,
    gae_lambda: float | torch.Tensor,
    critic_lambda: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A_t = Σ_l (γλ)^l·δ_{t+l} with δ_t = r_t + γ·V(s_{t+1}) − V(s_t); the critic's target is A_t + V(s_t).

    Generalised advantage estimation (arXiv 1506.02438, eq. 16), with TD(λ) returns. A sample's actions are its trained
    tokens: the state after one of them is that before the next, and after the last one worth 0. With a critic_lambda
    the target is that of another λ than the policy's: decoupled GAE of VC-PPO (arXiv 2503.01491), where it is 1.

    reward, value   float32 [N]; value[t] is that of the state in which token t was sampled
    mask            bool [N], the trained tokens; rewards and values of others are not read
    row_sample      int64 [N], not decreasing
    gae_lambda      a number, or float64 [N], equal for all rows of a sample
    returns         advantage and return, float32 [N], 0 where the mask is False
    """
    given = {"gae_lambda": gae_lambda} if isinstance(gae_lambda, torch.Tensor) else {}
    require_one_shape(reward=reward, value=value, mask=mask, row_sample=row_sample, **given)
    sample, now = row_sample[mask], value[mask]
    following = torch.cat((now[1:], now.new_zeros(1)))[: len(now)]
    following = torch.where(same_sample(sample, 1), following, 0.0)
    delta = reward[mask] + gamma * following - now
    of_policy = gae_lambda[mask] if isinstance(gae_lambda, torch.Tensor) else gae_lambda
    advantage = discounted_sum(delta, sample, gamma * of_policy)
    of_critic = advantage if critic_lambda is None else discounted_sum(delta, sample, gamma * critic_lambda)
    zeros = torch.zeros_like(value)
    return zeros.masked_scatter(mask, advantage), zeros.masked_scatter(mask, of_critic + now)


def length_adaptive_lambda(mask: torch.Tensor, row_sample: torch.Tensor, alpha: float) -> torch.Tensor:
    """λ_i = 1 − 1/(α·l_i), l_i the trained tokens of sample i, so that Σ_t λ^t ≈ α·l_i; 0 where that is negative.

    VAPO (arXiv 2504.05118, section 4.2).

    mask         bool [N]
    row_sample   int64 [N]
    returns      float64 [N]: close to 1, float32 would lose what is left to it
    """
    require_one_shape(mask=mask, row_sample=row_sample)
    samples = int(row_sample[-1]) + 1 if len(row_sample) else 0
    lengths = torch.zeros(samples, dtype=torch.float64, device=mask.device).index_add(0, row_sample, mask.double())
    return (1 - 1 / (alpha * lengths.clamp(min=1))).clamp(min=0)[row_sample]
