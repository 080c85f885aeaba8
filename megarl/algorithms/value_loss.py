"""The critic's objective, a loss per token from values and returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


class ValueLoss(NamedTuple):
    """The loss of each token, float32 [N], and where the clip cut the gradient off, bool [N]."""

    loss: torch.Tensor
    clipped: torch.Tensor


def explained_variance(
    return_mean: float, return_square_mean: float, residual_mean: float, residual_square_mean: float
) -> float | None:
    """Return 1 − Var[R − V] / Var[R], 1 for values that are the returns, 0 for constant ones and below 0 for worse.
    None where the returns are all the same. residual: R − V."""
    variance = return_square_mean - return_mean**2
    if variance <= 1e-9 * return_square_mean:  # less than rounding
        return None
    return 1 - (residual_square_mean - residual_mean**2) / variance


def squared_error(value: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None) -> ValueLoss:
    """Return ℓ = (V − R)², PPO's eq. 9 (https://arxiv.org/abs/1707.06347).

    With a clip c: ℓ = max((V − R)², (clamp(V, V_old − c, V_old + c) − R)²), as in PPO's published code: a value that
    has moved further than c from the old one gains nothing by moving on towards the return.

    value, old, returns   float32 [N]; gradients flow into value only
    """
    require_one_shape(value=value, old=old, returns=returns)
    loss = (value - returns).square()
    if clip is None:
        return ValueLoss(loss, loss.new_zeros(loss.shape, dtype=bool))
    moved = value.minimum(old + clip).maximum(old - clip)
    clipped_loss = (moved - returns).square()
    return ValueLoss(loss.maximum(clipped_loss), (clipped_loss > loss).detach())
