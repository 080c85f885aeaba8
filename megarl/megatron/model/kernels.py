"""Selects the trainer's kernels from the installed packages."""

from __future__ import annotations

import importlib.util

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.tensor_parallel import layers

from megarl.core import device
from megarl.megatron.model.layer_spec import uses_transformer_engine
from megarl.ops.products import add_product

TORCH_ADAM = "torch's fused AdamW"


def adam() -> str:
    """Return the AdamW class that Megatron uses: Transformer Engine's, else NVIDIA Apex's, else torch's."""
    origin = megatron_optimizer.Adam.__module__.partition(".")[0]
    return {"transformer_engine": "Transformer Engine's FusedAdam", "apex": "Apex's FusedAdam"}.get(origin, TORCH_ADAM)


def fuse_weight_gradients() -> None:
    """Let Megatron's own layers accumulate weight gradients in the matrix product without Apex's kernel, as Transformer
    Engine's layers do. Megatron's output layer requires the kernel, but our head replaces that layer and does not use
    it."""
    layers._grad_accum_fusion_available = True
    if not device.on_cuda() or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        layers.fused_weight_gradient_mlp_cuda = TorchWeightGradient


class TorchWeightGradient:
    """Implements in torch the functions from Apex's fused_weight_gradient_mlp_cuda that Megatron calls."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
        """Add gradientᵀ · inputs to main_grad, float32 [out, in]. `gradient` is [T, out], and `inputs` are [T, in]."""
        add_product(main_grad, gradient.t(), inputs)


def describe() -> str:
    """Return a one-line description of the kernels, for the log and the run summary."""
    maker = "Transformer Engine" if uses_transformer_engine() else "torch"
    return f"{maker} layers, {adam()}"
