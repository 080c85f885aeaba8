"""Megatron's distributed AdamW, built from our config. See muon.py for Muon."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    clip_grads,
    get_megatron_optimizer,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megarl.config.model_schema import Trained
from megarl.core import device
from megarl.megatron import loss_scale, parallel
from megarl.megatron.model import kernels
from megarl.megatron.overrides import build, checked, describe_settings

WITHOUT_DECAY = ParamKey(
    name="*.bias", attr="without_decay", predicate=ParamPredicate("one axis", lambda p: p.dim() == 1)
)
"""Matches parameters without weight decay: explicitly marked parameters, biases and norm weights. Decay would pull norm
weights toward 0, and with them the outputs of the norms."""

DEFAULTS = (
    *("apply_wd_to_qk_layernorm", "decoupled_lr", "decoupled_min_lr", "fp16", "loss_scale", "timers"),
    *("grad_norm_skip_threshold", "optimizer_cpu_offload", "overlap_param_gather_with_optimizer_step"),
    "use_layer_wise_distributed_optimizer",
)
"""OptimizerConfig fields whose defaults megarl's learning rates, loss, offload and checkpoints require. megarl itself
skips updates with a non-finite gradient."""


def build_optimizer(
    settings: Trained,
    chunks: Sequence[DistributedDataParallel],
    dtype: torch.dtype,
    without_decay: Collection[torch.nn.Parameter] = (),
) -> MegatronOptimizer:
    """Build the optimizer. Its float32 state is sharded over the data-parallel ranks. For 16-bit parameters, the main
    weights start as copies of the parameters; see main_weights.py. Loss scaling is separate; see loss_scale.py. The
    parameters in `without_decay`, biases and norms have no weight decay."""
    for parameter in without_decay:
        parallel.mark(parameter, without_decay=True)
    optimizer = get_megatron_optimizer(
        optimizer_config(settings, dtype),
        list(chunks),
        config_overrides={WITHOUT_DECAY: {"wd_mult": 0.0}},  # pyright: ignore[reportArgumentType]  # a partial override
        use_gloo_process_groups=False,
    )
    for part in parts_of(optimizer):
        _number_main_weights(part)
    if kernels.adam() == kernels.TORCH_ADAM:
        _use_fused_kernel(optimizer)
        if device.on_cuda():
            clip_grads.l2_norm_impl = l2_norm
    return optimizer


def optimizer_config(settings: Trained, dtype: torch.dtype) -> OptimizerConfig:
    config = settings.optimizer
    settings_fields = dict(
        lr=config.lr,
        min_lr=config.schedule.min_lr,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad_norm,
    )
    fixed = dict(
        optimizer="adam",
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp8_recipe=settings.fp8,
        use_distributed_optimizer=True,
        overlap_param_gather=settings.overlap_communication,
    )
    homes = dict.fromkeys((*fixed, *DEFAULTS)) | dict.fromkeys(settings_fields, f"{settings.section}.optimizer")
    key, extra = f"{settings.section}.megatron_overrides.optimizer", settings.megatron_overrides.optimizer
    extra = checked(key, extra, OptimizerConfig, homes)
    return build(
        describe_settings(settings.section, key, extra),
        OptimizerConfig,
        settings_fields | fixed | loss_scale.DEFAULTS | extra,
    )


def parts_of(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """Return the optimizer parts that hold parameters. Under some layouts, a model with experts has a second part for
    the experts. Parts without parameters are omitted."""
    parts = optimizer.chained_optimizers  # pyright: ignore[reportAttributeAccessIssue]  # it is a ChainedOptimizer
    return [part for part in parts if part.optimizer is not None]


def _number_main_weights(part: DistributedOptimizer) -> None:
    """Correct the indices that map parameters to their main weights and state in a model with parameters of two dtypes.
    Megatron numbers the main weights of a parameter group buffer by buffer, but lists float32 parameters first."""
    for index, group in enumerate(part.opt_group_ranges):
        listed = sorted(group["params"], key=lambda parameter: parameter.dtype is not torch.float32)
        part.model_param_group_index_map |= {parameter: (index, place) for place, parameter in enumerate(listed)}


def set_rates(optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> None:
    """Set the learning rate and weight decay for the next update. Both are set before every update, because a loaded
    optimizer contains the saved values."""
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
        param_group["weight_decay"] = weight_decay * param_group["wd_mult"]


def l2_norm(_chunk: int, _overflow: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *_: object):
    """Return the norm of all tensors in the first list, [1], and None. It has the interface of Apex's
    multi_tensor_l2norm. Megatron's own replacement fetches the norm of every tensor from the GPU separately."""
    return torch.nn.utils.get_total_norm(tensor_lists[0]).view(1), None


def _use_fused_kernel(optimizer: MegatronOptimizer) -> None:
    """Make torch's AdamW use its fused kernel, which is available on CPU and CUDA. It makes a single pass over memory,
    without temporary copies of the largest parameter."""
    for param_group in optimizer.param_groups:
        param_group["fused"] = True
