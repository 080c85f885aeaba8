"""Pairs of a better and a worse response to one prompt, reduced to one number per pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def margins(rewards: torch.Tensor) -> torch.Tensor:
    """Return better − worse for each pair, float32 [P]. `rewards`, float32 [2·P], holds one pair after another, the
    better response first."""
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
