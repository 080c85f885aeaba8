"""Which of the installed kernels the trainer takes."""

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
    """Megatron takes Transformer Engine's, else NVIDIA Apex's, else torch's."""
    origin = megatron_optimizer.Adam.__module__.partition(".")[0]
    return {"transformer_engine": "Transformer Engine's FusedAdam", "apex": "Apex's FusedAdam"}.get(origin, TORCH_ADAM)


def fuses_weight_gradients() -> bool:
    """Whether the matrix product that gives a weight's gradient adds it to main_grad itself: Transformer Engine's
    layers do, Megatron's own with Apex's kernel, and on CPU with torch's product."""
    apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return not device.on_cuda() or apex or uses_transformer_engine()


def fuse_weight_gradients() -> None:
    """Megatron's output layer insists on Apex's kernel then. The head that stands in for it has no use for that."""
    layers._grad_accum_fusion_available = True
    if not device.on_cuda():
        layers.fused_weight_gradient_mlp_cuda = TorchWeightGradient


class TorchWeightGradient:
    """What Megatron calls of Apex's module fused_weight_gradient_mlp_cuda."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
        """Adds gradientᵀ · inputs, of [T, out] and [T, in], to main_grad, float32 [out, in]."""
        add_product(main_grad, gradient.t(), inputs)


def describe() -> str:
    """In one line, for the log and for the run's announcement."""
    by = "Transformer Engine" if uses_transformer_engine() else "torch"
    gradients = "fused into the products" if fuses_weight_gradients() else "added by torch"
    return f"layers of {by}, {adam()}, weight gradients {gradients}"
