"""The critic's objective: a loss per token from values and returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


class ValueLoss(NamedTuple):
    """Per-token loss, float32 [N], and a mask, bool [N], of the tokens whose gradient the clip removed."""

    loss: torch.Tensor
    clipped: torch.Tensor


def explained_variance(
    return_mean: float, return_square_mean: float, residual_mean: float, residual_square_mean: float
) -> float | None:
    """Return 1 − Var[R − V] / Var[R]: 1 for a perfect critic, 0 for a constant one, negative for a worse one. None if
    all returns are equal. The residual is R − V."""
    variance = return_square_mean - return_mean**2
    if variance <= 1e-9 * return_square_mean:  # zero up to rounding errors
        return None
    return 1 - (residual_square_mean - residual_mean**2) / variance


def squared_error(value: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None) -> ValueLoss:
    """Return ℓ = (V − R)², PPO's eq. 9 (https://arxiv.org/abs/1707.06347).

    With a clip c, ℓ = max((V − R)², (clamp(V, V_old − c, V_old + c) − R)²), as in PPO's published code: once a value is
    more than c away from the old value, moving it further towards the return does not reduce the loss.

    Args:
        value: float32 [N]; the only differentiable argument.
        old: float32 [N], V_old.
        returns: float32 [N], R.
        clip: c; None disables clipping.
    """
    require_one_shape(value=value, old=old, returns=returns)
    loss = (value - returns).square()
    if clip is None:
        return ValueLoss(loss, loss.new_zeros(loss.shape).bool())
    moved = value.minimum(old + clip).maximum(old - clip)
    clipped_loss = (moved - returns).square()
    return ValueLoss(loss.maximum(clipped_loss), (clipped_loss > loss).detach())
