"""Attaches adapters to a model's linear layers before DDP wraps the model.

Tensor parallelism shards one adapter factor like the layer's weight; the other factor is replicated. Between the two
products the ranks exchange A's output, which has few columns:

    row shards        (query, key, value; gate, up): each rank has all inputs of a token and needs all of A's output
    column shards     (output and down projections): each rank has a part of the inputs, and the partial outputs of A
                      are summed
    an expert         tokens are exchanged before and after the layer; nothing is exchanged in between
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch.distributed import ProcessGroup

from megarl.config.model_schema import Lora
from megarl.core import device
from megarl.megatron.lora.adapter import Adapter, Communication, Factor, OuterFactor
from megarl.megatron.parallel import mark
from megarl.resharding.families.adapters import EXPERTS, A, AdaptedWeight, B, adapted_weights
from megarl.resharding.piece import Holder


def attach_adapters(models: Sequence[MegatronModule], holder: Holder, lora: Lora) -> dict[str, Adapter]:
    """Attach adapters with zero-initialized factors to this rank's chunks, and return adapted weight -> adapter.
    `holder` describes the models' weights on this rank."""
    adapters = {}
    for adapted in adapted_weights(holder, lora.share_experts):
        chunk, _, path = adapted.weight.partition(".")
        path, _, name = path.rpartition(".")
        model = models[int(chunk.removeprefix("chunk"))]
        layer = model.get_submodule(path)
        adapter = _adapter(model, layer, getattr(layer, name), adapted, lora)
        adapters[adapted.weight] = adapter
        if name == "weight":
            layer.adapter = adapter
            layer.register_forward_hook(partial(_add_output, adapter))
        else:  # the layer holds several experts' weights
            experts = getattr(layer, "adapter", None)
            if experts is None:
                layer.adapter = experts = torch.nn.ModuleList()
                layer.register_forward_hook(partial(_add_expert_outputs, experts))
            experts.append(adapter)
    return adapters


@contextmanager
def adapters_off(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Return a context manager that disables the models' adapters while entered."""
    adapters = [module for model in models for module in model.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


def _add_output(adapter: Adapter, layer: torch.nn.Module, inputs: tuple, outputs: tuple) -> tuple | None:
    """Forward hook that adds the adapter's output to the layer's output."""
    if not adapter.is_on:
        return None
    hidden, *others = outputs
    return (hidden + adapter(_normed(layer, inputs[0])), *others)


def _add_expert_outputs(
    adapters: torch.nn.ModuleList, layer: torch.nn.Module, inputs: tuple, outputs: tuple
) -> tuple | None:
    """Forward hook that adds the adapters' outputs to the output of a layer with experts. Each expert's tokens are
    consecutive."""
    if not all(adapter.is_on for adapter in adapters):
        return None
    tokens, counts = inputs
    parts = tokens.split([int(count) for count in counts])
    added = [adapter(part) for adapter, part in zip(adapters, parts, strict=True)]
    hidden, *others = outputs
    return (hidden + torch.cat(added), *others)


def _normed(layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return the input to the layer's matrix product. Transformer Engine's layers may include the preceding norm."""
    weight, eps = getattr(layer, "layer_norm_weight", None), getattr(layer, "eps", None)
    if weight is None:
        return hidden
    scale = weight.float() + 1.0 if layer.zero_centered_gamma else weight.float()
    return F.rms_norm(hidden.float(), hidden.shape[-1:], scale, eps).to(hidden.dtype)


def _adapter(
    model: MegatronModule, layer: torch.nn.Module, weight: torch.nn.Parameter, adapted: AdaptedWeight, lora: Lora
) -> Adapter:
    assert lora.rank is not None, "actor.lora.rank is not set"
    count, cut = len(adapted.projections), _cut(layer)
    process_group, in_sequence = _process_group(layer), model.config.sequence_parallel
    is_expert = EXPERTS in adapted.weight
    factors = {
        A: Factor(count * lora.rank, weight.shape[1], device.device()),
        B: OuterFactor(adapted.rows, count, lora.rank, device.device()),
    }
    for name, factor in factors.items():
        is_cut = cut == ("columns" if name == A else "rows")
        if is_expert:
            assert process_group is not None, "experts are replicated"
            reduced_with_dense = weight.allreduce  # pyright: ignore[reportAttributeAccessIssue]  # a mark that Megatron sets
            _mark_expert_factor(factor, is_cut, process_group, reduced_with_dense)
        else:
            # Under sequence parallelism, each rank sees only some of the tokens, so its gradient is partial.
            mark(factor.weight, tensor_model_parallel=is_cut, sequence_parallel=not is_cut and in_sequence)
    if adapted.shared is not None:
        factors[adapted.shared] = _shared_by_experts(model, adapted, adapted.shared, factors[adapted.shared])
    communicate = _communication(None if is_expert else cut, in_sequence, process_group)
    return Adapter(factors[A], factors[B], lora.scale, communicate, adapted.shared)


def _cut(layer: torch.nn.Module) -> str | None:
    """Return how tensor parallelism shards a layer's weight, by "rows" or "columns"; None if it is replicated."""
    names = " ".join(base.__name__ for base in type(layer).__mro__)  # Transformer Engine is optional
    if "ColumnParallel" in names:
        return "rows"
    return "columns" if "RowParallel" in names else None


def _process_group(layer: torch.nn.Module) -> ProcessGroup | None:
    """Return the process group whose ranks shard a layer's weight; None if the weight is replicated."""
    return None if _cut(layer) is None else getattr(layer, "_tp_group" if hasattr(layer, "_tp_group") else "tp_group")


def _communication(cut: str | None, in_sequence: bool, process_group: ProcessGroup | None) -> Communication:
    """Return the communication between an adapter's products. `in_sequence` means sequence parallelism."""
    if cut is None or process_group is None or process_group.size() == 1:
        return lambda hidden: hidden
    exchanges = {
        ("rows", False): copy_to_tensor_model_parallel_region,
        ("rows", True): gather_from_sequence_parallel_region,
        ("columns", False): reduce_from_tensor_model_parallel_region,
        ("columns", True): reduce_scatter_to_sequence_parallel_region,
    }
    return partial(exchanges[cut, in_sequence], group=process_group)


def _mark_expert_factor(factor: Factor, is_cut: bool, process_group: ProcessGroup, reduced_with_dense: bool) -> None:
    """Mark which ranks reduce the gradient of an expert's factor, and which replica counts in the gradient norm."""
    counts = is_cut or process_group.rank() == 0
    mark(factor.weight, allreduce=reduced_with_dense, tensor_model_parallel=counts, shared=not counts)
    if not is_cut and process_group.size() > 1:
        factor.partial_over = process_group


def _shared_by_experts(model: MegatronModule, adapted: AdaptedWeight, shared: str, new: Factor) -> Factor:
    """Return the factor shared by all experts in the layer: the existing factor, or `new` for the first expert.

    All ranks in a pipeline stage replicate the factor, and each computes the part of the gradient that comes from its
    own experts and tokens. The parts are summed over data-parallel and tensor-parallel ranks, as for all replicated
    parameters.
    """
    path, _, name = adapted.factors[shared].removesuffix(".weight").partition(".")[2].rpartition(".")
    experts = model.get_submodule(path.removesuffix(".shared_factors"))
    factors = getattr(experts, "shared_factors", None)
    if factors is None:
        experts.shared_factors = factors = torch.nn.ModuleDict()
    if name not in factors:
        in_sequence = model.config.sequence_parallel
        mark(new.weight, allreduce=True, shared=False, tensor_model_parallel=False, sequence_parallel=in_sequence)
        new.partial_over = None
        factors[name] = new
    return factors[name]  # pyright: ignore[reportReturnType]  # ModuleDict is not generic
