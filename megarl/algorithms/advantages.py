"""Advantage estimators: from rewards and group statistics to one advantage per sample."""

from __future__ import annotations

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
