"""Patch vLLM's CPU build to support in-place refits, latent attention, gated delta nets, fp8 blocks and speculative
decoding. The patches have no effect on GPU."""

from __future__ import annotations

import torch
import vllm.model_executor.kernels.linear as linear_kernels
import vllm.model_executor.layers.utils as linear_layers
import vllm.v1.sample.ops.topk_topp_sampler as topk_topp_sampler
import vllm.v1.sample.rejection_sampler as rejection_sampler
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import PlatformEnum, current_platform

from megarl.rollout.vllm import gated_delta

_rotate = RotaryEmbedding.forward_cpu
_truncate = topk_topp_sampler.apply_top_k_top_p


def install() -> None:
    """Patch vLLM in this worker process, before it loads a model."""
    linear_layers.dispatch_cpu_unquantized_gemm = _keep_weight
    RotaryEmbedding.forward_cpu = _rotate_heads
    linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [DequantizingKernel]
    gated_delta.install()
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = _expand_to_tokens
        rejection_sampler.apply_top_k_top_p = _truncate_drafts  # pyright: ignore[reportPrivateImportUsage]


class DequantizingKernel(Fp8BlockScaledMMLinearKernel):
    """A linear kernel for fp8 blocks that dequantizes the weight for each matrix multiplication and does not quantize
    activations. vLLM's own CPU kernels require AMX and pack the weight, which prevents in-place writes."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the weight and its scales in the checkpoint's layout."""

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: object
    ) -> torch.Tensor:
        weight, scales = (layer.get_parameter(name) for name in ("weight", "weight_scale_inv"))
        for axis, size in enumerate(self.weight_group_shape):
            scales = scales.repeat_interleave(size, axis)[: weight.shape[0], : weight.shape[1]]
        return torch.nn.functional.linear(x, (weight.float() * scales).to(x.dtype), bias)

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        raise AssertionError("apply_weights computes the whole product")


def _expand_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's sampling parameter, [requests], for its draft tokens, as vLLM's function should. vLLM's CPU
    kernel writes into a copy of the output, so temperature, top-k and top-p of draft tokens would be uninitialized."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)


def _truncate_drafts(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Apply top-k and top-p to the logits of draft tokens, [tokens, vocabulary]. vLLM's function fails in a step
    without draft tokens, for example if each request has one token left."""
    return _truncate(logits, k, p) if len(logits) else logits


def _keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Keep the weight of a linear layer or a convolution. Otherwise, vLLM would pack it for its kernels, which
    prevents in-place writes."""
    layer.cpu_linear = torch.nn.functional.linear  # pyright: ignore[reportArgumentType]  # vLLM stores functions here


def _rotate_heads(
    self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply vLLM's rotary kernel to query and key, flattened to [tokens, heads * channels]. Latent attention passes
    [tokens, heads, channels], which the kernel would misinterpret."""
    rotated, rotated_key = _rotate(self, positions, query.flatten(1), None if key is None else key.flatten(1))
    return rotated.view(query.shape), None if key is None or rotated_key is None else rotated_key.view(key.shape)


def pack_experts(layer: RoutedExperts) -> bool:
    """Pack a layer's expert weights for vLLM's CPU kernel, as vLLM does after loading. Return whether that was needed.
    On GPU, it is not: engines use the only MoE backend that reads unpacked weights."""
    kernel = layer.quant_method.moe_kernel
    if kernel is None or not isinstance(kernel.fused_experts, CPUUnquantizedExperts):
        return False
    for name in ("w13_weight", "w2_weight"):
        weight = layer.get_parameter(name).data
        weight.copy_(cpu_prepack_moe_weight(weight, kernel.fused_experts.isa))
    return True
