"""A LoRA adapter: two small matrices whose product is added to a linear layer's weight without being materialized."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch.distributed import ProcessGroup

Communication = Callable[[torch.Tensor], torch.Tensor]
"""Communication between tensor-parallel ranks, applied to A's output before the product with B."""


class Factor(torch.nn.Module):
    """One of an adapter's two matrices, float32 [rows, columns].

    Always call the module instead of reading its weight from outside: with overlapped communication, DDP waits for a
    parameter's all-gather when its module is called.
    """

    def __init__(self, rows: int, columns: int, device: torch.device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, columns, dtype=torch.float32, device=device))
        self.partial_over: ProcessGroup | None = None
        """Ranks that each hold this factor but compute only part of its gradient, as with sharded experts."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.matrix().to(hidden.dtype))

    def matrix(self) -> torch.Tensor:
        """Return the matrix that multiplies the inputs."""
        if self.partial_over is None:
            return self.weight
        return copy_to_tensor_model_parallel_region(self.weight, group=self.partial_over)


class OuterFactor(Factor):
    """The matrix B. Each row belongs to one projection and multiplies that projection's part of A's output. The full
    matrix therefore has columns for all projections, and each row is zero outside its own projection's columns."""

    def __init__(self, rows: Sequence[tuple[int, int, int]], num_projections: int, rank: int, device: torch.device):
        """`rows` lists (projection number, start, stop) for all row spans, in order."""
        super().__init__(max(stop for _, _, stop in rows), rank, device)
        self._places: torch.Tensor | None = None
        if num_projections > 1:
            self._places = torch.zeros(len(self.weight), num_projections, 1, device=device)
            for number, start, stop in rows:
                self._places[start:stop, number] = 1

    def matrix(self) -> torch.Tensor:
        narrow = super().matrix()
        return narrow if self._places is None else (narrow[:, None] * self._places).flatten(1)


class Adapter(torch.nn.Module):
    """Computes scale · B · A · hidden, which is added to a layer's output while the adapter is enabled."""

    lora_A: Factor
    lora_B: Factor

    def __init__(
        self, inner: Factor, outer: Factor, scale: float, communicate: Communication, shared: str | None = None
    ):
        """`shared` names the factor, lora_A or lora_B, that belongs to a different module, if any."""
        super().__init__()
        self.is_on = True
        self._scale, self._communicate = scale, communicate
        for name, factor in (("lora_A", inner), ("lora_B", outer)):
            if name == shared:
                object.__setattr__(self, name, factor)  # registered in the other module only
            else:
                setattr(self, name, factor)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lora_B(self._communicate(self.lora_A(hidden) * self._scale))

    @torch.no_grad()
    def merged(self, weight: torch.Tensor, out: torch.Tensor, chunk_rows: int) -> None:
        """Write the layer's weight plus the adapter's product to `out`. The sum is computed in float32, `chunk_rows`
        rows at a time, and then rounded."""
        inner, outer = self.lora_A.weight, self.lora_B.matrix()
        for rows in range(0, len(weight), chunk_rows):
            part = slice(rows, rows + chunk_rows)
            out[part].copy_(torch.addmm(weight[part].float(), outer[part], inner, alpha=self._scale))
