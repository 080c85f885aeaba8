"""Megatron's distributed AdamW, from our config."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    get_megatron_optimizer,
)

from megarl import device
from megarl.config.schema import Optimizer

WITHOUT_DECAY = ParamKey(name="*.bias", predicate=ParamPredicate("one axis", lambda p: p.dim() == 1))
"""Biases and norms: weight decay would pull them to 0, where a norm lets nothing through."""


def build_optimizer(
    config: Optimizer, chunks: Sequence[DistributedDataParallel], dtype: torch.dtype
) -> MegatronOptimizer:
    """State in float32, sharded over the data-parallel ranks. Build it after the weights are loaded: under bfloat16
    it takes its float32 main weights from them."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.schedule.min_lr,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad_norm,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
        ),
        list(chunks),
        config_overrides={WITHOUT_DECAY: {"wd_mult": 0.0}},
    )
    if not device.on_cuda():
        _use_fused_kernel(optimizer)
    return optimizer


def set_rates(optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> None:
    """Of the next update. Both are set anew for each: a loaded optimizer brings those that it was saved with."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay * group["wd_mult"]


def _use_fused_kernel(optimizer: MegatronOptimizer) -> None:
    """torch's AdamW, which Megatron takes without Transformer Engine and Apex, has a fused kernel for CPU as well: one
    pass over memory, and no temporary copies of the largest parameter."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            group["fused"] = True
