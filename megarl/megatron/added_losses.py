"""Additional losses, each computed from the last columns of the head's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megarl.algorithms import kl
from megarl.core.token_batch import TokenBatch
from megarl.megatron.losses import Terms


class MtpTerms(NamedTuple):
    """The sum of an objective's loss and the MTP loss: the objective's terms, and Σ w·(−log p) over the MTP layer's
    targets, where p is the layer's distribution."""

    loss: torch.Tensor
    others: Terms
    mtp: torch.Tensor


def mtp_loss(batch: TokenBatch, scored: torch.Tensor, *, others: Callable, coefficient: float) -> MtpTerms:
    """Add the MTP loss to a loss.

    Args:
        scored: the head's output, whose last column is w·(−log p).
        others: computes the other loss from the batch and the preceding columns.
        coefficient: factor of the MTP loss.
    """
    terms, mtp = others(batch, scored[:, :-1]), scored[:, -1].sum()
    return MtpTerms(terms.loss + coefficient * mtp, terms, mtp)


class DistillationTerms(NamedTuple):
    """The sum of an objective's loss and the teacher divergence that the head computes.

    Attributes:
        others: the objective's terms.
        distillation: Σ w·D.
        divergences: float32 [N, K], the divergence from each teacher, or UNSCORED in rows that the teacher does not
            score.
    """

    loss: torch.Tensor
    others: Terms
    distillation: torch.Tensor
    divergences: torch.Tensor


def distillation_loss(
    batch: TokenBatch, scored: torch.Tensor, *, others: Callable, weights: Sequence[float]
) -> DistillationTerms:
    """Add Σ w·D with D = Σ_k w_k·D_k to a loss. Tokens excluded by the other loss do not contribute.

    Args:
        scored: the head's output, whose last K columns are the divergences D_k.
        others: computes the other loss from the batch and the preceding columns.
        weights: w_k of each teacher.
    """
    terms, divergences = others(batch, scored[:, : -len(weights)]), scored[:, -len(weights) :]
    counts = batch.mask if (excluded := getattr(terms, "excluded", None)) is None else batch.mask & ~excluded
    counted = divergences.where(counts[:, None] & (divergences != kl.UNSCORED), 0.0)
    distillation = (batch.weight * (counted @ counted.new_tensor(weights))).sum()
    return DistillationTerms(terms.loss + distillation, terms, distillation, divergences)
