"""Tile kernels for divergences in plain torch, for CPU. Each function takes a tile of both models' logits.

`megarl/ops/divergence_tile_triton.py` implements the same functions as CUDA kernels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from megarl.ops.head_tile import add_at, blocks, pick, prepared, raise_maximum, rescale


def fold(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor | None,
    sums: torch.Tensor,
) -> None:
    """Accumulate a tile into the running sums for its rows, in place. Overwrites the logits.

    Args:
        logits, teacher_logits: float32 [n, v], the student's and the teacher's logits of the same tokens.
        targets: int64 [n], target columns; a column outside the tile belongs to a different tile.
        scale: float32 [n], factor for both models' logits in each row; None means 1.
        sums: float32 [8, n], where d = z − m are logits relative to their running maximum, and ' marks the teacher:
            m; m'; Σ exp d; Σ d · exp d; Σ (d − d') · exp d; Σ exp d'; Σ (d − d') · exp d'; and the target's student
            logit, valid once the target's tile has been processed.
    """
    for rows in blocks(logits):
        z, teacher_z = (prepared(x[rows], scale, None, rows) for x in (logits, teacher_logits))
        maximum, teacher_maximum, *totals, target_z = sums[:, rows]
        target_z += pick(z, targets[rows, None])[:, 0]
        rebase(raise_maximum(maximum, z), raise_maximum(teacher_maximum, teacher_z), *totals)
        total, total_d, total_gap, teacher_total, teacher_total_gap = totals
        p, q = z.exp(), teacher_z.exp()
        gap = torch.sub(z, teacher_z, out=teacher_z)
        total += p.sum(1)
        total_d += z.mul_(p).sum(1)
        total_gap += p.mul_(gap).sum(1)
        teacher_total += q.sum(1)
        teacher_total_gap += q.mul_(gap).sum(1)


def rebase(
    rise: torch.Tensor,
    teacher_rise: torch.Tensor,
    total: torch.Tensor,
    total_d: torch.Tensor,
    total_gap: torch.Tensor,
    teacher_total: torch.Tensor,
    teacher_total_gap: torch.Tensor,
) -> None:
    """Rescale the sums of `fold` to the raised maxima, in place."""
    gap_decrease = rise - teacher_rise
    rescale(rise, total, (total_d, rise), (total_gap, gap_decrease))
    rescale(teacher_rise, teacher_total, (teacher_total_gap, gap_decrease))


def fold_mixture(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    scale: torch.Tensor | None,
    normalizers: torch.Tensor,
    beta: float,
    sums: torch.Tensor,
) -> None:
    """Add a tile's part of KL(student ‖ m) and KL(teacher ‖ m) for the mixture m = β · teacher + (1 − β) · student.

    Args:
        logits, teacher_logits, scale: as in `fold`; the logits are overwritten.
        normalizers: float32 [4, n]: the student's and the teacher's maximum m, and the logarithm of each Σ exp(z − m).
            Subtracting them one after the other preserves the precision of z − m for large logits.
        sums: float32 [2, n].
    """
    for rows in blocks(logits):
        log_p, log_q = _log_probs(logits, teacher_logits, scale, normalizers, rows)
        gap = log_p - log_q
        sums[0, rows] += log_p.exp_().mul_(log_to_mixture(gap, 1 - beta, beta)).sum(1)
        sums[1, rows] += log_q.exp_().mul_(log_to_mixture(-gap, beta, 1 - beta)).sum(1)


def to_gradient(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor | None,
    normalizers: torch.Tensor,
    coefficients: torch.Tensor,
    beta: float | None,
    gradient: torch.Tensor,
) -> None:
    """Write p · (a + b · log p + d · log(p / r)) + e · q + c · 1[target] to `gradient`, where p and q are the student's
    and the teacher's probabilities.

    Args:
        logits, teacher_logits, targets, scale: as in `fold`; the logits are overwritten.
        normalizers: as in `fold_mixture`.
        coefficients: float32 [5, n]: a, b, c, d, e.
        beta: r is the mixture β · q + (1 − β) · p; None means r = q.
        gradient: [n, v], any dtype; may be the same tensor as `logits`.
    """
    for rows in blocks(logits):
        a, b, c, d, e = coefficients[:, rows, None]
        log_p, log_q = _log_probs(logits, teacher_logits, scale, normalizers, rows)
        p, q = log_p.exp(), log_q.exp()
        gap = torch.sub(log_p, log_q, out=log_q)
        ratio = gap if beta is None else log_to_mixture(gap, 1 - beta, beta)
        part = torch.addcmul(a, b, log_p, out=log_p).add_(ratio.mul_(d)).mul_(p).add_(q.mul_(e))
        add_at(part, targets[rows, None], c)
        gradient[rows] = part


def log_to_mixture(gap: torch.Tensor, own: float, other: float) -> torch.Tensor:
    """Return log(p / m) for the mixture m = own · p + other · q, given gap = log p − log q.

    Computes −log(own + other · q / p), which stays accurate if p and q differ by many orders of magnitude.
    """
    return F.softplus(math.log(other / own) - gap).add_(math.log(own)).neg_()


def _log_probs(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    scale: torch.Tensor | None,
    normalizers: torch.Tensor,
    rows: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    maximum, teacher_maximum, log_total, teacher_log_total = normalizers[:, rows, None]
    log_p = prepared(logits[rows], scale, None, rows).sub_(maximum).sub_(log_total)
    log_q = prepared(teacher_logits[rows], scale, None, rows).sub_(teacher_maximum).sub_(teacher_log_total)
    return log_p, log_q
