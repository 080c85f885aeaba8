"""Tile kernels for the linear head in plain torch, for CPU. Rows are processed in blocks that fit into the CPU cache.

`megarl/ops/head_tile_triton.py` implements the same functions as CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

NEVER = -1e30
"""The logit of a token with probability 0. It is finite so that 0 · logit is 0."""

BLOCK = 2**18
"""Number of tile elements processed at a time: 1 MiB in float32."""


def fold(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor | None,
    kept: torch.Tensor | None,
    sums: torch.Tensor,
) -> None:
    """Accumulate a tile of logits into the running sums for its rows, in place. Overwrites the logits.

    Args:
        logits: float32 [n, v].
        targets: int64 [n], target columns; a column outside the tile belongs to a different tile.
        scale: float32 [n], factor for the logits in each row; None means 1.
        kept: bool [n, v], false for columns with probability 0; None keeps all columns.
        sums: float32 [4, n]: the running maximum m; Σ exp(z − m); Σ (z − m) · exp(z − m); and the target's logit, valid
            once the target's tile has been processed.
    """
    for rows in blocks(logits):
        z = prepared(logits[rows], scale, kept, rows)
        maximum, total, total_d, target_z = sums[:, rows]
        target_z += pick(z, targets[rows, None])[:, 0]
        rise = raise_maximum(maximum, z)
        rescale(rise, total, (total_d, rise))
        p = z.exp()
        total_d += z.mul_(p).sum(1)
        total += p.sum(1)


def to_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor | None,
    kept: torch.Tensor | None,
    log_sum_exp: torch.Tensor,
    coefficients: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Write p · (a + b · log p) + c · 1[target] to `gradient`, where p = exp(z − log_sum_exp).

    Args:
        logits: as in `fold`; overwritten.
        log_sum_exp: float32 [n].
        coefficients: float32 [3, n]: a, b, c.
        gradient: [n, v], any dtype; may be the same tensor as `logits`.
    """
    for rows in blocks(logits):
        a, b, c = coefficients[:, rows]
        log_p = prepared(logits[rows], scale, kept, rows).sub_(log_sum_exp[rows, None])
        p = log_p.exp()
        part = torch.addcmul(a[:, None], b[:, None], log_p, out=log_p).mul_(p)
        add_at(part, targets[rows, None], c[:, None])
        gradient[rows] = part


def raise_maximum(maximum: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Raise each row's running maximum to its largest z, and subtract it from z, in place. Return the rise, [n]."""
    raised = torch.maximum(maximum, z.amax(1))
    rise = raised - maximum
    z.sub_(raised[:, None])
    maximum.copy_(raised)
    return rise


def rescale(rise: torch.Tensor, total: torch.Tensor, *weighted: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Rescale running sums to a raised maximum m, in place.

    Args:
        rise: [n].
        total: Σ exp(z − m), [n].
        weighted: pairs of Σ x · exp(z − m), [n], and the amount by which x decreases.
    """
    shrunk = torch.exp(-rise)
    for total_x, decrease in weighted:
        total_x.sub_(decrease * total).mul_(shrunk)
    total.mul_(shrunk)


def blocks(logits: torch.Tensor) -> Iterator[slice]:
    num_rows = max(BLOCK // logits.shape[1], 1)
    return (slice(start, start + num_rows) for start in range(0, logits.shape[0], num_rows))


def prepared(logits: torch.Tensor, scale: torch.Tensor | None, kept: torch.Tensor | None, rows: slice) -> torch.Tensor:
    if scale is not None:
        logits *= scale[rows, None]
    if kept is not None:
        logits.masked_fill_(~kept[rows], NEVER)
    return logits


def _inside(columns: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask of columns inside the tile, and the columns clamped to it."""
    return (columns >= 0) & (columns < width), columns.clamp(0, width - 1)


def pick(z: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return z[i, columns[i, j]], or 0 if that column is not in this tile, [n, m]."""
    inside, columns = _inside(columns, z.shape[1])
    return z.gather(1, columns).where(inside, 0)


def add_at(gradient: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """Add values[i, j] to gradient[i, columns[i, j]] if that column is in this tile. Both inputs are [n, m]."""
    inside, columns = _inside(columns, gradient.shape[1])
    gradient.scatter_add_(1, columns, values * inside)
