"""Supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.specs import ImitationObjective

if TYPE_CHECKING:
    import torch


def sft(log_prob: torch.Tensor) -> torch.Tensor:
    """Return ℓ = −log π for each assistant token, float32 [N]."""
    return -log_prob


SPEC = ImitationObjective(
    name="sft", formula="−log π", paper="supervised fine-tuning: −log-prob of the assistant's tokens", loss=sft
)
