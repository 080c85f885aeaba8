"""Implicit reward model: token rewards are a language model's log-probs minus those of its reference.

PRIME (https://arxiv.org/abs/2502.01456, eq. 2 and 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.labels import binary_cross_entropy
from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def token_reward(log_prob: torch.Tensor, reference: torch.Tensor, beta: float) -> torch.Tensor:
    """Return r_t = β·(log π_φ(y_t) − log π_ref(y_t)), differentiable in log_prob. log_prob, reference: float32 [N]."""
    require_one_shape(log_prob=log_prob, reference=reference)
    return beta * (log_prob - reference)


def outcome_cross_entropy(reward: torch.Tensor, success: torch.Tensor) -> torch.Tensor:
    """Return ℓ_i = −o_i·log σ(r_i) − (1 − o_i)·log(1 − σ(r_i)) for each sample, float32 [S]. The reward r_i, float32
    [S], is the sum of each sample's token rewards; the success o_i is 1 for a successful sample, else 0."""
    return binary_cross_entropy(reward, success)
