"""Adds what vLLM's CPU build lacks for weights that are written in place, for latent attention, and for fp8 blocks. On
GPU it changes nothing."""

from __future__ import annotations

import torch
import vllm.model_executor.kernels.linear as linear_kernels
import vllm.model_executor.layers.utils as linear_layers
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import PlatformEnum

_rotate = RotaryEmbedding.forward_cpu


def install() -> None:
    """Changes vLLM's functions, in a process of vLLM's before it loads a model."""
    linear_layers.dispatch_cpu_unquantized_gemm = _keep_weight
    RotaryEmbedding.forward_cpu = _rotate_heads
    linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [DequantisingKernel]


class DequantisingKernel(Fp8BlockScaledMMLinearKernel):
    """A linear layer of fp8 blocks that makes its weight whole for each product. vLLM's own kernels for CPUs need AMX,
    and pack the weight, which could not be written in place; as in these, activations stay as they are."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leaves the weight and its scales as the checkpoint has them."""

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: object
    ) -> torch.Tensor:
        weight, scales = layer.weight, layer.weight_scale_inv
        for axis, size in enumerate(self.weight_group_shape):
            scales = scales.repeat_interleave(size, axis)[: weight.shape[0], : weight.shape[1]]
        return torch.nn.functional.linear(x, (weight.float() * scales).to(x.dtype), bias)

    def apply_block_scaled_mm(self, *args: torch.Tensor) -> torch.Tensor:
        raise AssertionError("apply_weights does the whole")


def _keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Leaves a linear layer's weight in its place: vLLM would pack it for oneDNN and free it, and nothing would be left
    to write into."""
    layer.cpu_linear = torch.nn.functional.linear


def _rotate_heads(
    self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotates query and key by vLLM's kernel, in the shape for which it is right, [tokens, heads * channels]. It would
    take [tokens, heads, channels], which latent attention gives it, for one head and the first heads for tokens."""
    rotated, rotated_key = _rotate(self, positions, query.flatten(1), None if key is None else key.flatten(1))
    return rotated.view(query.shape), None if key is None else rotated_key.view(key.shape)


def pack_experts(layer: RoutedExperts) -> bool:
    """Packs a layer's expert weights for vLLM's kernel, as vLLM does after it has loaded them. Returns whether it has
    packed: on GPU the engine is started with the one backend that takes weights as they are."""
    kernel = layer.quant_method.moe_kernel.fused_experts
    packs = isinstance(kernel, CPUUnquantizedExperts)
    if packs:
        for weight in (layer.w13_weight, layer.w2_weight):
            weight.data.copy_(cpu_prepack_moe_weight(weight.data, kernel.isa))
    return packs
