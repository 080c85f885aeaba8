"""An adapter: two small matrices whose product is added to a linear layer's weight, without that product being made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch.distributed import ProcessGroup

Between = Callable[[torch.Tensor], torch.Tensor]
"""What tensor-parallel ranks do between an adapter's two products."""


class Factor(torch.nn.Module):
    """One of the two matrices, of [rows, columns], float32.

    It must be called, and its weight not read from outside: DDP waits for parameters that overlapped communication
    still fetches when their module is called.
    """

    def __init__(self, rows: int, columns: int, device: torch.device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, columns, dtype=torch.float32, device=device))
        self.partial_over: ProcessGroup | None = None
        """The ranks that have the factor whole, and each a part of its gradient: of an expert's that is cut."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.matrix().to(hidden.dtype))

    def matrix(self) -> torch.Tensor:
        """Return the matrix that inputs are multiplied with."""
        if self.partial_over is None:
            return self.weight
        return copy_to_tensor_model_parallel_region(self.weight, group=self.partial_over)


class OuterFactor(Factor):
    """B. Each of its rows belongs to a projection, and meets that projection's part of what A gives: so the matrix has
    a column for all of these, with zeros beside the row's own."""

    def __init__(self, rows: Sequence[tuple[int, int, int]], num_projections: int, rank: int, device: torch.device):
        """rows: number of the projection, start and stop, of all spans of rows in turn."""
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
    """Gives scale · B · A · hidden, which is added to a layer's output while the adapter is on."""

    def __init__(self, inner: Factor, outer: Factor, scale: float, between: Between, shared: str | None = None):
        """shared: which of both factors belongs to another module, lora_A or lora_B."""
        super().__init__()
        self.is_on = True
        self._scale, self._between = scale, between
        for name, factor in (("lora_A", inner), ("lora_B", outer)):
            if name == shared:
                object.__setattr__(self, name, factor)  # not one of this module's own
            else:
                setattr(self, name, factor)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lora_B(self._between(self.lora_A(hidden) * self._scale))

    @torch.no_grad()
    def merged(self, weight: torch.Tensor, out: torch.Tensor, chunk_rows: int) -> None:
        """Write the layer's weight with the product added to it, in float32 and then rounded, a few rows at a time."""
        inner, outer = self.lora_A.weight, self.lora_B.matrix()
        for rows in range(0, len(weight), chunk_rows):
            part = slice(rows, rows + chunk_rows)
            out[part].copy_(torch.addmm(weight[part].float(), outer[part], inner, alpha=self._scale))
