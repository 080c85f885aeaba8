"""Losses for reward models, on preference pairs (a better and a worse response to one prompt) and on labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


def margins(rewards: torch.Tensor) -> torch.Tensor:
    """Return better − worse for each pair, float32 [P]. `rewards` is float32 [2·P], the better first."""
    if rewards.ndim != 1 or len(rewards) % 2:
        raise ValueError(f"rewards must have shape [2·P], got {tuple(rewards.shape)}")
    better, worse = rewards.view(-1, 2).unbind(-1)
    return better - worse


def bradley_terry(margin: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Return ℓ = −(1 − ε)·log σ(m) − ε·log σ(−m): the cross-entropy of the preference if the better response wins with
    probability σ(m) and a fraction ε of the pairs is mislabeled. The margin m is float32 [P]."""
    from torch.nn.functional import logsigmoid

    require_pairs(margin)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def require_pairs(margin: torch.Tensor) -> None:
    """Raise a ValueError unless `margin` has shape [P]."""
    if margin.ndim != 1:
        raise ValueError(f"margin must have shape [P], got {tuple(margin.shape)}")


def binary_cross_entropy(score: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return ℓ = −y·log σ(s) − (1 − y)·log(1 − σ(s)), float32 [N]. The score s, float32 [N], is the log-odds that the
    label is 1. The label y, float32 [N], is 1 for correct, 0 for incorrect, or the probability of being correct."""
    from torch.nn.functional import binary_cross_entropy_with_logits

    require_one_shape(score=score, label=label)
    return binary_cross_entropy_with_logits(score, label, reduction="none")


def token_reward(log_prob: torch.Tensor, reference: torch.Tensor, beta: float) -> torch.Tensor:
    """Return r_t = β·(log π_φ(y_t) − log π_ref(y_t)), differentiable in log_prob. log_prob, reference: float32 [N].

    These are the token rewards of PRIME's implicit reward model (https://arxiv.org/abs/2502.01456, eq. 2). The model is
    trained with the binary cross-entropy of each sample's success. The log-odds of success are the sum of the sample's
    token rewards (eq. 3).
    """
    require_one_shape(log_prob=log_prob, reference=reference)
    return beta * (log_prob - reference)
