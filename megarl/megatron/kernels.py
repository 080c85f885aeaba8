"""Which of the installed kernels the trainer takes."""

from __future__ import annotations

import importlib.util

import megatron.core.optimizer as megatron_optimizer
from megatron.core.tensor_parallel import layers

from megarl import device
from megarl.megatron.layer_spec import uses_transformer_engine

TORCH_ADAM = "torch's fused AdamW"


def adam() -> str:
    """Megatron takes Transformer Engine's, else NVIDIA Apex's, else torch's."""
    origin = megatron_optimizer.Adam.__module__.partition(".")[0]
    return {"transformer_engine": "Transformer Engine's FusedAdam", "apex": "Apex's FusedAdam"}.get(origin, TORCH_ADAM)


def fuses_weight_gradients() -> bool:
    """Whether the matrix product that gives a weight's gradient adds it to main_grad itself: Transformer Engine's
    layers do, Megatron's own with Apex's kernel."""
    apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return device.on_cuda() and (apex or uses_transformer_engine())


def fuse_weight_gradients() -> None:
    """Megatron's output layer insists on Apex's kernel then. The head that stands in for it has no use for that."""
    layers._grad_accum_fusion_available = True


def describe() -> str:
    """In one line, for the log and for the run's announcement."""
    by = "Transformer Engine" if uses_transformer_engine() else "torch"
    gradients = "fused into the products" if fuses_weight_gradients() else "added by torch"
    return f"layers of {by}, {adam()}, weight gradients {gradients}"
