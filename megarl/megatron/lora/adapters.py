"""The adapters on one rank: initialization, loading, saving and merged weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from megatron.core.transformer.module import MegatronModule

from megarl.config.model_schema import Lora
from megarl.core import device
from megarl.megatron import parallel
from megarl.megatron.checkpoint.extents import CanonicalShard
from megarl.megatron.lora.adapter import Adapter
from megarl.megatron.lora.attach import attach_adapters
from megarl.resharding.execute import execute
from megarl.resharding.families.adapters import EXPERTS, SHARED, A, adapter_holder, peft_holder
from megarl.resharding.families.canonical import canonical_of
from megarl.resharding.peft_folder import PeftFolder, export_format, save_adapters
from megarl.resharding.piece import Holder
from megarl.resharding.planning.plan import Plan
from megarl.resharding.transports.transport import Transport, view

CHUNK = 2**24
"""Number of elements merged at a time, with 4 bytes of temporary memory per element. More would not be faster."""


class Adapters:
    """The adapters for one rank's weights. `holder` describes this rank's factors, and `whole` the unsharded
    factors."""

    def __init__(self, lora: Lora, hf_config: Mapping[str, Any], weights: Holder):
        """`weights` describes the base model's weights on this rank."""
        assert lora.rank is not None, "actor.lora.rank is not set"
        self._lora, self._weights = lora, weights
        self.holder = adapter_holder(weights, lora.rank, lora.share_experts)
        self.whole = peft_holder(hf_config, lora.rank, lora.share_experts)
        experts = canonical_of(hf_config).model.experts
        self.num_experts = experts.count if experts else 0
        self._format = export_format(hf_config)
        self._by_weight: dict[str, Adapter] = {}

    @property
    def exports_factors(self) -> bool:
        """Whether exports write the factors instead of the merged weights."""
        return self._lora.export == "adapters"

    def attach(self, models: Sequence[MegatronModule]) -> None:
        """Attach the adapters to this rank's model chunks, with zero-initialized factors."""
        self._by_weight = attach_adapters(models, self._weights, self._lora)

    @torch.no_grad()
    def initialize(self, factors: Mapping[str, torch.Tensor], seed: int) -> None:
        """Initialize the factors as PEFT does: A uniformly in ±1/√columns, B with zeros, so that the adapters initially
        have no effect. Values depend only on the seed and the tensor's name, not on the layout."""
        for tensor, piece in self.holder.shard.canonical_pieces:
            if f".{A}." in tensor:
                rows, columns = self.whole.shapes[tensor]
                generator = torch.Generator().manual_seed(crc32(f"{seed} {tensor}".encode()))
                numbers = torch.rand(rows, columns, generator=generator).mul_(2).sub_(1).div_(columns**0.5)
                view(factors[piece.local], piece.local_rectangle).copy_(view(numbers, piece.canonical_rectangle))

    @torch.no_grad()
    def load(self, factors: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Load the factors that the folder contains; the remaining factors are unchanged."""
        with PeftFolder(folder, self._lora, self.whole, self.num_experts) as stored:
            for tensor, piece in self.holder.shard.canonical_pieces:
                values = stored.read(tensor, piece.canonical_rectangle)
                if values is not None:
                    view(factors[piece.local], piece.local_rectangle).copy_(values)

    def write(self, plan: Plan, transport: Transport, base: str, out: Path) -> None:
        """Write the factors from all ranks as a folder. `base` is the path to the base model."""
        tensors = {name: torch.empty(shape) for name, shape in self.whole.shapes.items()}
        execute(plan.into(self.whole.name), tensors, transport)
        save_adapters(tensors, self._lora, base, self.num_experts, out, self._format)

    def sharded(self, factors: Mapping[str, torch.Tensor]) -> dict[torch.Tensor, CanonicalShard]:
        """Return factor -> sharding description for a checkpoint, which stores PEFT's tensors."""
        pieces = self.holder.shard.by_parameter()
        return {
            factor: CanonicalShard(name, factor, _replica(name, factor), tuple(pieces[name]), self.whole.shapes)
            for name, factor in factors.items()
        }

    @cached_property
    def merged(self) -> dict[str, torch.Tensor]:
        """The adapted weights with the adapters' products added, valid from `merge` until the adapters change. They
        share one storage, so a receiving process needs only a single handle."""
        shapes = {name: self._weights.shapes[name] for name in self._by_weight}
        [dtype] = {getattr(torch, self._weights.dtypes[name]) for name in shapes} or {torch.float32}
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        memory = torch.empty(sum(sizes), dtype=dtype, device=device.device())
        parts = zip(shapes.items(), memory.split(sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}

    def merge(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Recompute the merged weights from the base weights, so that rounding errors do not accumulate."""
        for name, adapter in self._by_weight.items():
            weight = weights[name]
            adapter.merged(weight, self.merged[name], max(1, CHUNK // weight.shape[1]))


def _replica(name: str, factor: torch.Tensor) -> tuple[int, int, int]:
    """Return a factor's replica id. A factor that is not sharded has one replica on each tensor-parallel rank."""
    if getattr(factor, "tensor_model_parallel", False) and not getattr(factor, "shared", False):
        return (0, 0, 0)
    is_expert = EXPERTS in name and SHARED not in name
    return (0, parallel.tensor_group(is_expert).rank(), 0)
