"""Advantage estimators: from rewards, and group statistics or a critic's values, to advantages."""

from __future__ import annotations

import math

import torch


def grpo(reward: torch.Tensor, group_mean: torch.Tensor, group_std: torch.Tensor, std_epsilon: float) -> torch.Tensor:
    """A_i = (r_i − mean(r)) / (std(r) + ε), the same for every token of sample i.

    GRPO, outcome supervision (https://arxiv.org/abs/2402.03300, section 4.1.2); Dr.GRPO's form has std = 1 and ε = 0.

    reward, group_mean, group_std   float32 [S]
    returns                         float32 [S]
    """
    if not reward.shape == group_mean.shape == group_std.shape or reward.dim() != 1:
        raise ValueError(
            f"reward, group_mean and group_std must share one shape [S], got {tuple(reward.shape)}, "
            f"{tuple(group_mean.shape)}, {tuple(group_std.shape)}"
        )
    return (reward - group_mean) / (group_std + std_epsilon)


def gae(
    reward: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    row_sample: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A_t = Σ_l (γλ)^l·δ_{t+l} with δ_t = r_t + γ·V(s_{t+1}) − V(s_t); the critic's target is A_t + V(s_t).

    Generalised advantage estimation (https://arxiv.org/abs/1506.02438, eq. 16), with TD(λ) returns. A sample's actions
    are its trained tokens: the state after one of them is that before the next, and after the last one worth 0.

    reward, value   float32 [N]; value[t] is that of the state in which token t was sampled
    mask            bool [N], the trained tokens; rewards and values of others are not read
    row_sample      int64 [N], not decreasing
    returns         advantage and return, float32 [N], 0 where the mask is False
    """
    if not reward.shape == value.shape == mask.shape == row_sample.shape or reward.dim() != 1:
        raise ValueError(
            f"reward, value, mask and row_sample must share one shape [N], got {tuple(reward.shape)}, "
            f"{tuple(value.shape)}, {tuple(mask.shape)}, {tuple(row_sample.shape)}"
        )
    sample, now = row_sample[mask], value[mask]
    following = torch.cat((now[1:], now.new_zeros(1)))[: len(now)]
    following = torch.where(_same_sample(sample, 1), following, 0.0)
    advantage = discounted_sum(reward[mask] + gamma * following - now, sample, gamma * gae_lambda)
    zeros = torch.zeros_like(value)
    return zeros.masked_scatter(mask, advantage), zeros.masked_scatter(mask, advantage + now)


def discounted_sum(x: torch.Tensor, row_sample: torch.Tensor, discount: float) -> torch.Tensor:
    """Σ_l discount^l · x_{t+l} over the rest of each row's sample. x: float32 [N]; row_sample: int64 [N], sorted.

    By doubling: the sum over 2n terms is that over n, and the discounted one over the n after it.
    """
    terms = 1
    while terms < len(x):
        later = torch.cat((x[terms:], x.new_zeros(terms)))
        x = x + torch.where(_same_sample(row_sample, terms), discount**terms * later, 0.0)
        terms *= 2
    return x


def at_last_token(reward: torch.Tensor, mask: torch.Tensor, row_sample: torch.Tensor) -> torch.Tensor:
    """Puts each sample's reward (float32 [S]) on its last trained token: float32 [N], 0 elsewhere."""
    rows = mask.nonzero()[:, 0]
    last = rows[~_same_sample(row_sample[rows], 1)]
    placed = reward.new_zeros(len(mask))
    placed[last] = reward[row_sample[last]]
    return placed


def mean_and_std(count: float, total: float, squares: float, std: str) -> tuple[float, float]:
    """Of `count` numbers with this sum and sum of squares. std: "sample" divides the squared deviations by n − 1,
    "population" by n; "none", and too few numbers, make it 1."""
    divisor = {"sample": count - 1, "population": count, "none": 0}[std]
    mean = total / max(count, 1)
    return mean, math.sqrt(max(squares - count * mean**2, 0.0) / divisor) if divisor > 0 else 1.0


def whiten(advantage: torch.Tensor, mask: torch.Tensor, mean: float, std: float, std_epsilon: float) -> torch.Tensor:
    """(A − mean) / (std + ε) where the mask is True, 0 elsewhere. Mean and std are of a whole update's trained tokens.

    advantage, mask   float32 and bool [N]
    """
    return torch.where(mask, (advantage - mean) / (std + std_epsilon), 0.0)


def _same_sample(row_sample: torch.Tensor, distance: int) -> torch.Tensor:
    """bool [N]: whether the row that is `distance` further on exists and belongs to the same sample."""
    same = torch.zeros_like(row_sample, dtype=torch.bool)
    same[:-distance] = row_sample[distance:] == row_sample[:-distance]
    return same
