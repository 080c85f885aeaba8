"""Supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.specs import ImitationObjective
from megarl.core.ranges import NonNegativeFloat

if TYPE_CHECKING:
    import torch


def sft(log_prob: torch.Tensor, nll_coefficient: float) -> torch.Tensor:
    """Return ℓ = −nll_coefficient·log π for each assistant token, float32 [N].

    With a coefficient of 0, the only loss is the divergence from the teachers: GKD with λ = 0
    (https://arxiv.org/abs/2306.13649).
    """
    return -nll_coefficient * log_prob


SPEC = ImitationObjective(
    name="sft",
    formula="−nll_coefficient·log π",
    paper="supervised fine-tuning: −log-prob of the assistant's tokens; nll_coefficient=0 with teachers: GKD with λ=0, "
    "arXiv 2306.13649",
    loss=sft,
    parameters={"nll_coefficient": (NonNegativeFloat, 1.0)},
)
