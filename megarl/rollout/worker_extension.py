"""What megarl adds to vLLM's workers: weights that stay writable, and a refit that writes them in place.

vLLM imports this module in every worker before it loads the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import vllm.model_executor.layers.utils as linear_layers
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megarl import stacks
from megarl.resharding.compact import CompactPlan
from megarl.resharding.execute import Assembly, execute
from megarl.resharding.piece import Holder
from megarl.resharding.transports.transport import Channel, dtype_name
from megarl.resharding.verification import Checksum, Region, check_weights
from megarl.rollout.engine import Refitted

# This may be a process of vLLM's own, of several tensor-parallel ranks.
stacks.write_on_request()


def _keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


# vLLM's CPU build packs every linear layer for oneDNN and frees the weight: nothing would be left to write into.
linear_layers.dispatch_cpu_unquantized_gemm = _keep_weight

_rotate = RotaryEmbedding.forward_cpu


def _rotate_heads(
    self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    rotated, rotated_key = _rotate(self, positions, query.flatten(1), None if key is None else key.flatten(1))
    return rotated.view(query.shape), None if key is None else rotated_key.view(key.shape)


# The CPU kernel takes [tokens, heads, channels], which latent attention gives it, for one head and the first heads for
# tokens. It is right for [tokens, heads * channels].
RotaryEmbedding.forward_cpu = _rotate_heads


DERIVED = ("W_UV", "W_UK_T")
"""Parameters that latent attention computes from its kv_b_proj."""


def _prepare(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """What vLLM does with weights after it has loaded them, and must do again with new ones. Returns whether it has
    rewritten some."""
    rewritten = False
    for module in model.modules():
        if isinstance(module, MLAAttention):
            module.process_weights_after_loading(dtype)
        elif isinstance(module, RoutedExperts):
            rewritten |= _pack_experts(module)
    return rewritten


def _pack_experts(layer: RoutedExperts) -> bool:
    """On CPU, for its kernel. On GPU the engine is started with the one backend that takes weights as they are. Returns
    whether it has packed."""
    kernel = layer.quant_method.moe_kernel.fused_experts
    packs = isinstance(kernel, CPUUnquantizedExperts)
    if packs:
        for weight in (layer.w13_weight, layer.w2_weight):
            weight.data.copy_(cpu_prepack_moe_weight(weight.data, kernel.isa))
    return packs


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer of a worker that could not do what was asked."""

    error: Exception


def _answer(function: Callable[..., Any], *args: Any) -> Any:
    """What it returns, or Failed: at the first error that a worker raises, vLLM no longer reads the answers of the
    others, and takes them for answers to its next call."""
    try:
        return function(*args)
    except Exception as error:
        return Failed(error)


class RefitExtension:
    """Mixed into vLLM's worker; its methods are called by LLM.collective_rpc."""

    def connect(self, plan: CompactPlan, channel: Channel, holders: Sequence[Holder], by_loader: bool) -> Failed | None:
        """See Engine.connect."""
        return _answer(self._connect, plan, channel, holders, by_loader)

    def refit(self, expected: Mapping[Region, Checksum] | None) -> Refitted | Failed:
        """Writes this worker's parameters from the trainer's."""
        return _answer(self._load if self._by_loader else self._refit, expected)

    def _connect(self, plan: CompactPlan, channel: Channel, holders: Sequence[Holder], by_loader: bool) -> None:
        self._by_loader = by_loader
        self._holder = holders[self.rank]
        own = plan.part([self._holder.name])
        self._writes = own.into(self._holder.name)
        self._transport = channel.open(self._holder.name, self._parameters(), own, in_place=not by_loader)

    def _refit(self, expected: Mapping[Region, Checksum] | None) -> Refitted:
        num_bytes = execute(self._writes, self._parameters(), self._transport)
        if expected is not None:
            check_weights(self._holder, self._parameters(), expected)
        if _prepare(self.model_runner.get_model(), self.model_runner.model_config.dtype):
            self._transport.forget()
        return Refitted(num_bytes, self._transport.staging_bytes)

    def _load(self, expected: Mapping[Region, Checksum] | None) -> Refitted:
        """By vLLM's loader, layer by layer into memory of the loader's own, and from there, processed, into place."""
        model, config = self.model_runner.get_model(), self.model_runner.model_config
        assembly = Assembly(self._writes, self._transport, next(model.parameters()).device)
        initialize_layerwise_reload(model)
        names = {name for name, _ in model.named_parameters()}
        try:
            loaded = model.load_weights(self._checked(assembly, expected))
        finally:
            finalize_layerwise_reload(model, config)  # else layers would take the next refit for the rest of this one
        # What quantisation adds to a layer is not loaded, but made.
        if config.quantization is None and (left := sorted(names.difference(loaded))):
            raise RuntimeError(f"vLLM's loader has left {', '.join(left)} as they were")
        return Refitted(self._holder.shard.num_bytes, self._transport.staging_bytes + assembly.staging_bytes)

    def _checked(
        self, assembly: Assembly, expected: Mapping[Region, Checksum] | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in assembly.parameters():
            if expected is not None:
                check_weights(self._holder, {name: tensor}, expected)
            yield name, tensor

    def parameters(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> shape and dtype."""
        return {name: (tuple(p.shape), dtype_name(p.dtype)) for name, p in self._parameters().items()}

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each parameter's bytes."""
        return {
            name: hashlib.sha256(parameter.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, parameter in self._parameters().items()
        }

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Stacks of experts, [experts, rows, columns], as their holder describes them: with two axes."""
        weights = {name: p.data for name, p in self.model_runner.get_model().named_parameters()}
        return {
            name: weight.view(-1, weight.shape[-1]) if weight.dim() == 3 else weight
            for name, weight in weights.items()
            if not name.endswith(DERIVED)
        }
