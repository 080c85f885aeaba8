"""Patches that let megatron-core run on CPU with gloo.

Megatron-core assumes CUDA in three ways: it queries torch.cuda for the current device, it calls torch.cuda functions
that raise without a GPU, and it has device literals in function bodies. Each patch below handles one of these.
`install` is a no-op where CUDA is available, so the trainer always calls it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from megarl.ops.gated_delta import gated_delta_rule, normalized, packed_convolution


def import_uncompiled() -> None:
    """Import megatron.core for the first time, without torch's compiler. No-op where CUDA is available.

    Megatron decorates many functions for torch.compile, and importing the compiler takes as long as all other imports
    on a rank combined. On CPU, compilation gains nothing: the few functions that run are small, and compiling them
    would require a C++ compiler and leave files behind.
    """
    if torch.cuda.is_available():
        return
    compiler = torch.compile
    torch.compile = lambda function: function
    try:
        from megatron.core import jit
    finally:
        torch.compile = compiler
    jit.disable_jit_fuser()  # affects Megatron modules that are imported later


# Functions, as module:function, whose code contains "cuda" or "torch.cuda.FloatTensor" as a constant.
DEVICE_LITERALS = (
    "pipeline_parallel.schedules:forward_backward_no_pipelining",
    "pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
    "pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
    "optimizer.clip_grads:get_grad_norm_fp32",
    "optimizer.clip_grads:clip_grad_by_total_norm_fp32",
    "utils:local_multi_tensor_l2_norm",
    "optimizer.grad_scaler:MegatronGradScaler.__init__",
    "optimizer.grad_scaler:DynamicGradScaler.__init__",
    "optimizer.optimizer:FP32Optimizer.__init__",
    "optimizer.optimizer:MegatronOptimizer.has_grad_norm_group",
    "optimizer.optimizer:MixedPrecisionOptimizer.__init__",
    "optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
    "optimizer.distrib_optimizer:DistributedOptimizer.__init__",
    "optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
    "dist_checkpointing.exchange_utils:_get_empty_tensor_for_exchange",
)

_installed = False


def install() -> None:
    """Apply every patch, once per process, before a model is built. No-op where CUDA is available."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    for patch in (
        device_queries,
        random_state,
        device_literals,
        uneven_collectives,
        lone_ranks,
        expert_dispatch,
        rotary_shares,
        gated_delta_net,
    ):
        patch()
    _installed = True


def device_queries() -> None:
    """Replace CUDA device queries. Megatron allocates buffers on torch.cuda.current_device(), and pipeline
    communication synchronizes with the device. Gradient reduction requests a stream, which only CUDA graphs use. Under
    pipeline parallelism, Megatron calls cuda() on the weight of tied embeddings."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def random_state() -> None:
    """Make the tensor-parallel RNG tracker swap the CPU generator's state instead of CUDA's: on CPU, dropout draws from
    the CPU generator."""
    from megatron.core.tensor_parallel import random

    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


def device_literals() -> None:
    """Replace device literals in function constants in place. This also affects modules that imported the functions by
    name.

    The assertion catches obsolete entries.
    """
    for entry in DEVICE_LITERALS:
        function = _resolve(entry)
        constants = tuple(_on_cpu(constant) for constant in function.__code__.co_consts)
        assert constants != function.__code__.co_consts, (
            f"{entry} has no CUDA device literal. Fix: remove it from DEVICE_LITERALS"
        )
        function.__code__ = function.__code__.replace(co_consts=constants)


def uneven_collectives() -> None:
    """Emulate uneven collectives. Sharded experts gather and scatter a different number of tokens per rank, but gloo
    requires equal sizes. Gathering pads all parts to one size; scattering sums whole tensors and keeps one part."""
    from megatron.core.tensor_parallel import mappings

    even_gather, even_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, None, use_global_buffer)
        longest = max(output_split_sizes)
        padded = input_.new_zeros(longest, *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = even_gather(padded, group).split(longest)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def reduce_scatter(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(input_, group, None, use_global_buffer)
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce_scatter


def lone_ranks() -> None:
    """Skip collectives over a single rank. A rank whose optimizer is not sharded already has all gradients and
    parameters in its buffers. Unlike NCCL, gloo would copy whole buffers to new memory and back."""
    from megatron.core.distributed import param_and_grad_buffer

    def unless_alone(collective: Callable) -> Callable:
        def collect(output, input_, group, **options):
            return collective(output, input_, group=group, **options) if group.size() > 1 else None

        return collect

    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(param_and_grad_buffer, name, unless_alone(getattr(param_and_grad_buffer, name)))


def rotary_shares() -> None:
    """Replace the function that selects a context-parallel rank's rotary angles, because it uses an index in pinned
    memory."""
    from megatron.core.models.common.embeddings import rope_utils

    def share(pos_emb, seq_dim, cp_group):
        size, rank = cp_group.size(), cp_group.rank()
        chunks = pos_emb.chunk(2 * size, dim=seq_dim)
        return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=seq_dim)

    rope_utils.get_pos_emb_on_this_cp_rank.__code__ = share.__code__  # several modules import the function by name


def expert_dispatch() -> None:
    """Replace the device-to-host copies of the all-to-all dispatcher, which copies token counts on a CUDA stream. On
    CPU, only the conversion to numpy remains."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def on_host(self, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if torch.is_tensor(sizes := getattr(self, name)):
                setattr(self, name, sizes.numpy())
        return tokens_per_expert

    replacements = {"cuda_dtoh_stream": object(), "_maybe_dtoh_and_synchronize": on_host}
    for name, replacement in replacements.items():
        setattr(MoEAlltoAllTokenDispatcher, name, replacement)


def gated_delta_net() -> None:
    """Replace the kernels of flash-linear-attention, which need a GPU, in gated delta net layers. Megatron refuses to
    build these layers without the package."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    def convolve(x, weight, cu_seqlens, **_):
        return packed_convolution(x[0], weight, cu_seqlens)[None], None

    def rule(q, k, v, g, beta, cu_seqlens, **_):
        out, _ = gated_delta_rule(q[0], k[0], v[0], g[0], beta[0], cu_seqlens)
        return out[None], None

    common.HAVE_FLA, common.l2norm = True, normalized
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = convolve, rule


def _resolve(entry: str) -> Callable[..., Any]:
    module, path = entry.split(":")
    target: Any = importlib.import_module(f"megatron.core.{module}")
    for name in path.split("."):
        target = getattr(target, name)
    target = getattr(target, "__func__", target)
    while hasattr(target, "__wrapped__"):
        target = target.__wrapped__
    return target


def _on_cpu(constant: Any) -> Any:
    if isinstance(constant, tuple):
        return tuple(_on_cpu(item) for item in constant)
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=tuple(_on_cpu(item) for item in constant.co_consts))
    if constant == "cuda":
        return "cpu"
    if isinstance(constant, str) and constant.startswith("torch.cuda."):
        return constant.replace("torch.cuda.", "torch.")
    return constant
