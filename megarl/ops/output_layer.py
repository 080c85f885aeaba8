"""Tiles of an output layer's logits, and the gradients accumulated from them. The layer's weight is sharded over the
vocabulary. linear_head.py and divergence.py compute one tile at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
import torch.distributed as dist

from megarl.core import device
from megarl.ops.products import add_product, put_product
from megarl.ops.tile import TILE

CPU_TILE = (1024, 4096)
"""Size of a tile on CPU, (tokens, vocabulary entries). CPU caches favor smaller tiles than GPU matrix products do."""


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Hidden states and the output layer that maps them to logits.

    Attributes:
        hidden: [N, h], identical on all tensor-parallel ranks.
        weight: [V / tp, h], this rank's rows.
        bias: [V / tp], this rank's part of the bias; None if the layer has none.
        logits_dtype: float32, or a narrower dtype that logits are rounded to before the temperature is applied, as if
            the matrix product returned that dtype. Gradients ignore the rounding.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    logits_dtype: torch.dtype = torch.float32

    def part(self, tokens: slice, num_rows: int) -> OutputLayer:
        """Return the layer for some of the tokens, with its first rows only."""
        return replace(self, hidden=self.hidden[tokens], weight=self.weight[:num_rows])

    def tiles(self, num_columns: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each tile's first row index and its logits, float32 [N, v], not divided by the temperature.

        All tiles share one buffer. With logits_dtype=bfloat16, representable values near 20 are 0.125 apart.
        """
        num_elements = len(self.hidden) * min(num_columns, len(self.weight))
        buffer = self.hidden.new_empty(num_elements, dtype=torch.float32)
        for start in range(0, len(self.weight), num_columns):
            rows = self.weight[start : start + num_columns]
            logits = buffer[: len(self.hidden) * len(rows)].view(-1, len(rows))
            put_product(logits, self.hidden, rows.t())
            if self.bias is not None:
                logits += self.bias[start : start + len(rows)]
            if self.logits_dtype is not logits.dtype:
                logits.copy_(logits.to(self.logits_dtype))
            yield start, logits


class Gradients:
    """Gradients of an output layer, summed in float32 over tiles.

    If the weight has a `main_grad` buffer (Megatron's gradient accumulation), its gradient is added to that buffer and
    `grad_added_to_main_grad` is set.
    """

    def __init__(self, layer: OutputLayer, needed: Sequence[bool]):
        """`needed`: whether the hidden states, the weight and the bias need a gradient."""
        self._layer = layer
        main_grad = getattr(layer.weight, "main_grad", None)
        self._into_main_grad = main_grad is not None
        needs_hidden, needs_weight, needs_bias = needed
        self._hidden = torch.zeros_like(layer.hidden, dtype=torch.float32) if needs_hidden else None
        self._weight = self._bias = None
        if needs_weight:
            self._weight = torch.zeros_like(layer.weight, dtype=torch.float32) if main_grad is None else main_grad
        if needs_bias and layer.bias is not None:
            self._bias = torch.zeros_like(layer.bias, dtype=torch.float32)

    def buffer(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a tensor for the gradient of a tile's logits, in the weight's dtype for the matrix products. If that
        is the dtype of the logits, the gradient overwrites them."""
        dtype = self._layer.weight.dtype
        return logits if dtype is logits.dtype else torch.empty_like(logits, dtype=dtype)

    def add(self, tokens: slice, start: int, gradient: torch.Tensor) -> None:
        """Add a tile's contribution, given its tokens, its first row and the gradient of its logits, [n, v]."""
        rows = slice(start, start + gradient.shape[1])
        if self._hidden is not None:
            add_product(self._hidden[tokens], gradient, self._layer.weight[rows])
        if self._weight is not None:
            add_product(self._weight[rows], gradient.t(), self._layer.hidden[tokens])
        if self._bias is not None:
            self._bias[rows] += gradient.sum(0, dtype=torch.float32)

    def results(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of the hidden states, the weight and the bias for autograd, in the inputs' dtypes."""
        layer = self._layer
        is_in_main_grad = self._weight is not None and self._into_main_grad
        weight = _autograd_dummy(layer.weight) if is_in_main_grad else _cast_like(layer.weight, self._weight)
        return _cast_like(layer.hidden, self._hidden), weight, _cast_like(layer.bias, self._bias)


def tile() -> tuple[int, int]:
    return TILE if device.on_cuda() else CPU_TILE


def is_sharded(process_group: dist.ProcessGroup | None) -> TypeGuard[dist.ProcessGroup]:
    return process_group is not None and dist.get_world_size(process_group) > 1


def held_tokens(weight: torch.Tensor, vocab_size: int, process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the token id of this rank's first row, and the number of its rows that are not padding."""
    first = dist.get_rank(process_group) * weight.shape[0] if is_sharded(process_group) else 0
    return first, max(0, min(weight.shape[0], vocab_size - first))


def scale_of(temperature: float | torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
    """Return the factor of each token's logits, float32 [N]; None if it is 1 for all tokens."""
    if not isinstance(temperature, torch.Tensor) and temperature == 1:
        return None
    return 1 / torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(len(hidden))


def raise_over_ranks(maxima: torch.Tensor, process_group: dist.ProcessGroup) -> torch.Tensor:
    """Replace each maximum with the largest over all ranks, in place. Return the increases."""
    raised = maxima.clone()
    dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=process_group)
    rises = raised - maxima
    maxima.copy_(raised)
    return rises


def _cast_like(parameter: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gradient in the parameter's dtype; None if there is none."""
    return None if parameter is None or gradient is None else gradient.to(parameter.dtype)


def _autograd_dummy(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the weight gradient for autograd when the actual gradient is already in main_grad: a tensor that triggers
    DDP's hook, which ignores the tensor's values.

    Returns None under zero_out_wgrad. In that case the weight is tied to the embedding, whose gradient triggers the
    hook, and the values of the dummy would be read.
    """
    weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]  # DDP's hook reads it
    return None if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
