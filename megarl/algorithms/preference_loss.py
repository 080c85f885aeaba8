"""Losses of pairs of responses to the same prompt, the better one and the worse one: one number per pair.

margin is float32 [P]: by how much the model is for the better response. Gradients flow into it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def margins(of_samples: torch.Tensor) -> torch.Tensor:
    """float32 [2·P], pair after pair, the better response first -> [P]: better − worse."""
    if of_samples.ndim != 1 or len(of_samples) % 2:
        raise ValueError(f"of_samples must have shape [2·P], got {tuple(of_samples.shape)}")
    better, worse = of_samples.view(-1, 2).unbind(-1)
    return better - worse


def bradley_terry(margin: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """ℓ = −(1 − ε)·log σ(m) − ε·log σ(−m), for a share ε of pairs whose labels are the wrong way round.

    With scores s, m = s_w − s_l and ε = 0: a reward model's (InstructGPT, https://arxiv.org/abs/2203.02155, eq. 1).
    With h, the log-ratio of the better response less that of the worse one, and m = β·h: DPO
    (https://arxiv.org/abs/2305.18290, eq. 7); with ε > 0 conservative DPO (Mitchell, 2023).
    """
    _require_pairs(margin)
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def ipo(margin: torch.Tensor, beta: float) -> torch.Tensor:
    """ℓ = (h − 1 / (2·β))² with the margin h of log-ratios: IPO (https://arxiv.org/abs/2310.12036, eq. 17), whose τ is
    β here."""
    _require_pairs(margin)
    return (margin - 1 / (2 * beta)).square()


def _require_pairs(margin: torch.Tensor) -> None:
    if margin.ndim != 1:
        raise ValueError(f"margin must have shape [P], got {tuple(margin.shape)}")
