"""Builds GPTModels from a Hugging Face config and wraps them for data parallelism."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.model_schema import Layout, Placed
from megarl.core import device
from megarl.core.errors import UserError
from megarl.megatron import parallel
from megarl.megatron.model import kernels
from megarl.megatron.model.architecture import FORM, YarnConfig, architecture, config_class
from megarl.megatron.model.head import replace_output_layer
from megarl.megatron.model.layer_spec import (
    block_spec,
    replace_activations,
    unmark_expert_biases,
    uses_transformer_engine,
)
from megarl.megatron.model.mtp import MtpBlock
from megarl.megatron.model.precision import precision
from megarl.megatron.model.rope import fuse_rotation, set_rotary
from megarl.megatron.model.vision import add_vision_tower
from megarl.megatron.overrides import build, checked, describe_settings
from megarl.megatron.routes import install_routers
from megarl.models.denoiser import shape_of
from megarl.models.families import completed
from megarl.models.huggingface import rope_parameters
from megarl.models.shape import ModelShape
from megarl.models.vision import vision_of
from megarl.ops.swiglu import clamped_swiglu, swiglu
from megarl.resharding.families.adapters import is_factor
from megarl.resharding.families.megatron import VOCABULARY_MULTIPLE

MODEL_DEFAULTS = (
    *("calculate_per_token_loss", "defer_embedding_wgrad_compute", "fp16", "fp4", "fp4_param", "fp8_param"),
    *("init_model_with_meta_device", "microbatch_group_size_per_vp_stage", "mtp_num_layers"),
    *("overlap_moe_expert_parallel_comm", "use_mup"),
    # These fields change the names of parameters or the order of their rows.
    *("mla_down_proj_fusion", "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"),
    *("moe_single_grouped_bias", "moe_single_grouped_weight", "use_grouped_gemm_for_dense_mlp"),
    *("use_grouped_gemm_for_shared_expert", "use_transformer_engine_op_fuser"),
    # Without perform_initialization, unmarked sharded parameters would be missing from the gradient norm. With
    # overlap_p2p_comm_warmup_flush, stages would deadlock.
    *("perform_initialization", "overlap_p2p_comm_warmup_flush"),
)
DDP_DEFAULTS = (
    *("num_distributed_optimizer_instances", "use_custom_fsdp", "use_megatron_fsdp"),
    # These checks terminate a rank with a non-finite gradient, and its peers would then wait for it.
    *("check_for_nan_in_grad", "check_for_large_grads"),
)
"""Fields of TransformerConfig and DistributedDataParallelConfig whose defaults the loss, head and weights require."""

PLACEMENT = (
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("hierarchical_context_parallel_sizes", "hybrid_context_parallel", "pipeline_model_parallel_layout"),
    *("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
    *("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"),
)
"""TransformerConfig fields that would give a rank other layers, weights or tokens than its section's layout does."""

ROUTING = dict(moe_router_bias_update_rate=0.0)
"""Router biases are not updated, because balancing expert load would change the policy without a gradient."""

DISPATCHER = dict(moe_token_dispatcher_type="alltoall")
"""megarl's default for the token dispatcher: one all-to-all in each direction, over NCCL or gloo. Megatron rejects the
option allgather, because packs differ in length."""

RECOMPUTE = {"none": None, "selective": "selective", "full": "full"}


def build_model(
    settings: Placed,
    hf_config: Mapping[str, Any],
    dtype: torch.dtype,
    temperature: float,
    context_length: int,
    frozen: Collection[str] = (),
    attach: Callable[[Sequence[GPTModel]], object] = lambda chunks: None,
    logits_dtype: torch.dtype = torch.float32,
) -> list[DistributedDataParallel]:
    """Build this rank's shard of the model, one chunk per virtual pipeline stage. Weights are loaded later.

    Args:
        frozen: names of untrained parameters, as in `named_parameters`. They must be excluded before DDP wraps the
            model, because DDP waits for the gradients of all trained parameters.
        attach: function that adds modules to the chunks before DDP wraps them.
        logits_dtype: logits dtype in a language model's head, as in log_prob_and_entropy.
    """
    check_delta_net_kernels(settings.section, ModelShape.of(hf_config))
    config = transformer_config(settings, hf_config, dtype)
    chunks = [build_chunk(config, hf_config, stage, context_length) for stage in range(settings.layout.vpp)]
    for chunk in chunks:
        replace_output_layer(chunk, hf_config, temperature, logits_dtype)
        install_routers(chunk, ModelShape.of(hf_config))
        chunk.to(device.device())
    for name, parameter in parameters_of(chunks).items():
        parameter.requires_grad_(name not in frozen)
    attach(chunks)
    if settings.recompute != "none" and chunks[0].pre_process:
        # Recomputed layers get gradients only if their input requires a gradient, but a frozen embedding's output does
        # not.
        chunks[0].embedding.register_forward_hook(lambda _, __, hidden: hidden.requires_grad_(torch.is_grad_enabled()))
    return wrap(chunks, config, settings)


def wrap(
    chunks: Sequence[MegatronModule], config: TransformerConfig, settings: Placed
) -> list[DistributedDataParallel]:
    """Wrap the chunks for data parallelism, and set the functions that Megatron's schedules call to reduce
    gradients."""
    ddp_config = data_parallel_config(settings)
    # Later chunks need no buckets: their communication overlaps with the computation in earlier chunks.
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=stage > 0)
        for stage, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if settings.overlap_communication:
        # Megatron's annotations omit that its schedules accept a list with one function per chunk.
        config.no_sync_func = _only_or_all(  # pyright: ignore[reportAttributeAccessIssue]
            [chunk.no_sync for chunk in wrapped]
        )
        config.grad_sync_func = _only_or_all(  # pyright: ignore[reportAttributeAccessIssue]
            [chunk.start_grad_sync for chunk in wrapped]
        )
    return wrapped


def named_parameters(chunks: Sequence[DistributedDataParallel]) -> dict[str, torch.nn.Parameter]:
    """Return name -> parameter for the model's parameters on this rank. Names are as in the rank's holder."""
    return parameters_of([chunk.module for chunk in chunks])


def named_tensors(chunks: Sequence[DistributedDataParallel]) -> dict[str, torch.Tensor]:
    """Return name -> tensor for the parameters and the router biases, which are checkpointed but have no gradient."""
    return tensors_of([chunk.module for chunk in chunks])


def named_weights(chunks: Sequence[DistributedDataParallel]) -> dict[str, torch.Tensor]:
    """Return `named_tensors`, detached."""
    return {name: tensor.data for name, tensor in named_tensors(chunks).items()}


def adapter_parameters(chunks: Sequence[DistributedDataParallel]) -> dict[str, torch.nn.Parameter]:
    """Return name -> factor for this rank's adapters."""
    return {name: p for name, p in _all_parameters([chunk.module for chunk in chunks]).items() if is_factor(name)}


def parameters_of(models: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in _all_parameters(models).items() if not is_factor(name)}


def _all_parameters(models: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    return {f"chunk{i}.{name}": p for i, model in enumerate(models) for name, p in model.named_parameters()}


def tensors_of(models: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    buffers = {f"chunk{i}.{name}": b for i, model in enumerate(models) for name, b in model.named_buffers()}
    biases = {name: buffer for name, buffer in buffers.items() if name.endswith(".router.expert_bias")}
    return parameters_of(models) | biases


def build_chunk(
    config: TransformerConfig, hf_config: Mapping[str, Any], stage: int, context_length: int, fused: bool | None = None
) -> GPTModel:
    """Build this rank's layers for one virtual stage (0 if the pipeline stage is not divided), with Megatron's output
    layer. `fused` selects Transformer Engine's layers; None uses them if Transformer Engine is installed."""
    kernels.fuse_weight_gradients()
    shape = ModelShape.of(hf_config)
    multiple = VOCABULARY_MULTIPLE * config.tensor_model_parallel_size
    virtual = stage if config.virtual_pipeline_model_parallel_size else None
    fused = uses_transformer_engine() if fused is None else fused
    spec: Any = block_spec(config, shape, virtual, fused)
    has_vision = vision_of(hf_config) is not None
    model = GPTModel(
        config,
        spec,  # Megatron's annotation omits specs of whole blocks
        vocab_size=-(-shape.vocab // multiple) * multiple,
        max_sequence_length=context_length,
        pre_process=parallel.is_first_stage(virtual),
        post_process=parallel.is_last_stage(virtual),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="yarn" if isinstance(config, YarnConfig) else "rope",
        rotary_percent=1.0 if shape.latent else shape.rotary_dim / shape.head_dim,
        rotary_base=rope_parameters(completed(hf_config))["rope_theta"],
        scatter_embedding_sequence_parallel=not has_vision,  # features replace embeddings before tokens are split
        vp_stage=virtual,
    )
    if has_vision and model.pre_process:
        add_vision_tower(model, hf_config, config)
    if shape.mtp_layers and model.post_process:
        model.mtp = MtpBlock(config, shape, fused)  # pyright: ignore[reportAttributeAccessIssue]  # megarl's class
    set_rotary(model, hf_config)
    fuse_rotation()
    is_interleaved = shape.experts is not None and shape.experts.is_interleaved
    if config.use_te_activation_func:
        replace_activations(model, clamped_swiglu if is_interleaved else swiglu)
    unmark_expert_biases(model)
    return model


def _only_or_all(functions: list[Callable]) -> Callable | list[Callable]:
    """Return the functions in the form that Megatron's schedules expect: a list with one function per chunk, or the
    function itself for a single chunk."""
    return functions if len(functions) > 1 else functions[0]


def transformer_config(settings: Placed, hf_config: Mapping[str, Any], dtype: torch.dtype) -> TransformerConfig:
    """Build the TransformerConfig: the architecture comes from the model's config.json, the parallelism from the
    layout, and all remaining fields from megatron_overrides."""
    shape, section = shape_of(hf_config), settings.section
    form = architecture(hf_config)
    target = config_class(form)
    sections = {
        "the model's config.json": form,
        f"{section}.layout": parallelism(settings.layout),
        f"model.dtype and {section}.fp8": precision(dtype, settings),
        f"{section}.recompute": dict(recompute_granularity=RECOMPUTE[settings.recompute]),
    }
    reserved = dict.fromkeys(MODEL_DEFAULTS) | dict.fromkeys(FORM, "the model's config.json")
    reserved |= dict.fromkeys(PLACEMENT, f"{section}.layout") | dict.fromkeys(("fp8", "fp8_recipe"), f"{section}.fp8")
    reserved |= {name: home for home, fields in sections.items() for name in fields}
    key = f"{section}.megatron_overrides.model"
    extra = checked(key, settings.megatron_overrides.model, target, reserved)
    fields = {name: value for section_fields in sections.values() for name, value in section_fields.items()}
    defaults = _kernels(shape, target is YarnConfig) | _recomputed_layers(settings, shape) | ROUTING | DISPATCHER
    fields |= defaults | extra
    check_dispatcher(key, fields, settings.layout)
    return build(describe_settings(section, key, extra), target, fields)


def check_dispatcher(key: str, fields: dict[str, Any], layout: Layout) -> None:
    """Raise a UserError if Megatron's flexible dispatcher is selected but cannot work. It communicates with DeepEP
    (https://github.com/deepseek-ai/DeepEP), whose kernels use NVLink and InfiniBand. `key` is the config key of the
    TransformerConfig fields."""
    if fields["moe_token_dispatcher_type"] != "flex":
        return
    wrong = None
    if not device.on_cuda():
        wrong = "requires a GPU, but this trainer has none"
    elif importlib.util.find_spec("deep_ep") is None:
        wrong = "requires the package deep_ep, which is not installed"
    elif layout.ep * layout.expert_tp == 1:
        wrong = "each rank in the layout has all experts (ep=1, etp=1), so there are no tokens to dispatch"
    if wrong is not None:
        raise UserError(f"{key}.moe_token_dispatcher_type=flex: {wrong}. Fix: remove the key to use alltoall")


def check_delta_net_kernels(section: str, shape: ModelShape) -> None:
    """Raise a UserError if the model has gated delta nets and this GPU's environment lacks their kernels."""
    if shape.linear is not None and device.on_cuda() and importlib.util.find_spec("fla") is None:
        raise UserError(
            f"{section}: the model's gated delta net layers require the package flash-linear-attention on a GPU. Fix: "
            "run pip install 'flash-linear-attention>=0.5,<0.6'"
        )


def data_parallel_config(settings: Placed) -> DistributedDataParallelConfig:
    """Build DDP's config. Gradients are accumulated and reduced in float32, even for bfloat16 parameters."""
    section, overlap = settings.section, settings.overlap_communication
    overlapped = dict(overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    fixed = dict(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    homes = dict.fromkeys((*DDP_DEFAULTS, *fixed)) | dict.fromkeys(overlapped, f"{section}.overlap_communication")
    key = f"{section}.megatron_overrides.ddp"
    extra = checked(key, settings.megatron_overrides.ddp, DistributedDataParallelConfig, homes)
    return build(describe_settings(section, key, extra), DistributedDataParallelConfig, fixed | overlapped | extra)


def parallelism(layout: Layout) -> dict[str, Any]:
    first = layout.first_stage_layers
    return dict(
        **parallel.sizes(layout),
        sequence_parallel=layout.sequence_parallel,
        num_layers_in_first_pipeline_stage=first,
        # With two stages, the first determines the second. Megatron would divide by the number of stages in between,
        # which is 0.
        num_layers_in_last_pipeline_stage=layout.last_stage_layers if first is None or layout.pp > 2 else None,
        variable_seq_lengths=True,  # packs differ in length
        # The interleaved schedule frees outputs before their sends complete, so the next stage would read garbage.
        deallocate_pipeline_outputs=layout.vpp == 1,
        # Batched point-to-point communication silently transfers wrong data with virtual stages and pp=2.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
    )


def _recomputed_layers(settings: Placed, shape: ModelShape) -> dict[str, Any]:
    """Return the fields that select which activations are recomputed.

    full: recompute each layer separately and keep only its input. selective: recompute the MLPs, which hold most
    activations; attention holds few, since no kernel stores attention scores. megatron_overrides can select different
    modules.
    """
    if settings.recompute == "full":
        return dict(recompute_method="uniform", recompute_num_layers=1)
    return dict(recompute_modules=["mlp"] if shape.experts is None else ["mlp", "moe"])


def _kernels(shape: ModelShape, has_yarn: bool) -> dict[str, Any]:
    """Return the fields that select kernels. Most fused kernels require Transformer Engine. Weights are initialized to
    zeros because they are loaded immediately afterwards."""
    fused = uses_transformer_engine()
    has_own_activation = shape.experts is not None and shape.experts.is_interleaved
    return dict(
        gradient_accumulation_fusion=True,
        bias_activation_fusion=fused and not has_own_activation,
        # Use megarl's activation, which has Transformer Engine's interface (see replace_activations).
        use_te_activation_func=not fused or has_own_activation,
        bias_dropout_fusion=fused and not has_own_activation,  # Megatron's grouped experts with biases reject it
        masked_softmax_fusion=False,
        # The fused kernel for latent attention requires YaRN. The other fused kernel does not support YaRN's factor.
        apply_rope_fusion=fused and shape.latent is None and not has_yarn,
        moe_grouped_gemm=fused,
        moe_permute_fusion=fused,
        use_cpu_initialization=not device.on_cuda(),
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
    )
