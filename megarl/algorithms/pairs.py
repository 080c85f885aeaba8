"""Pairs of responses to the same prompt, the better one and the worse one: one number per pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def margins(rewards: torch.Tensor) -> torch.Tensor:
    """Return better − worse of each pair, float32 [P]. rewards: float32 [2·P], pair after pair, the better response
    first."""
    if rewards.ndim != 1 or len(rewards) % 2:
        raise ValueError(f"rewards must have shape [2·P], got {tuple(rewards.shape)}")
    better, worse = rewards.view(-1, 2).unbind(-1)
    return better - worse


def bradley_terry(margin: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """ℓ = −(1 − ε)·log σ(m) − ε·log σ(−m), for a share ε of pairs whose labels are the wrong way round: the
    cross-entropy of who wins, if the better response does so with the probability σ(m). margin: float32 [P]."""
    from torch.nn.functional import logsigmoid

    require_pairs(margin)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def require_pairs(margin: torch.Tensor) -> None:
    """Raise ValueError unless there is one margin for each pair."""
    if margin.ndim != 1:
        raise ValueError(f"margin must have shape [P], got {tuple(margin.shape)}")
