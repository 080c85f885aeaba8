"""Scale and shift the tokens in a pack by per-document vectors, without saving expanded vectors for backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def modulate(
    tokens: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None
) -> torch.Tensor:
    """Return tokens · scale + shift, in the shape and dtype of `tokens`.

    Args:
        tokens: [T, 1, h].
        numbers: int64 [T], the number of each token's document, from 0 to D − 1.
        scale, shift: [D, h], a vector for each document; no shift if None.
    """
    return _Modulate.apply(tokens, numbers, scale, shift)


class _Modulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, numbers, scale, shift):
        ctx.save_for_backward(tokens, numbers, scale)
        ctx.has_shift = shift is not None
        output = tokens * _expanded(scale, numbers)
        return output if shift is None else output.add_(_expanded(shift, numbers))

    @staticmethod
    def backward(ctx, *grad_outputs):
        [gradient], (tokens, numbers, scale) = grad_outputs, ctx.saved_tensors
        # Use a matrix product, because index_add is nondeterministic on GPU.
        documents = F.one_hot(numbers, len(scale)).T.to(gradient.dtype)
        scale_grad = documents @ (gradient * tokens)[:, 0]
        shift_grad = documents @ gradient[:, 0] if ctx.has_shift else None
        return gradient * _expanded(scale, numbers), None, scale_grad, shift_grad


def _expanded(vectors: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return vectors.index_select(0, numbers)[:, None]
