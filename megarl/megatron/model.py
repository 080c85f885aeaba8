"""From a Hugging Face config to a GPTModel, wrapped for data parallelism."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl import device
from megarl.config.huggingface import completed, rope_parameters
from megarl.config.schema import Layout, Trained
from megarl.megatron import parallel
from megarl.megatron.architecture import architecture
from megarl.megatron.head import replace_output_layer
from megarl.megatron.layer_spec import PositionRotary, block_spec, uses_transformer_engine
from megarl.megatron.rope import inverse_frequencies
from megarl.resharding.families.shape import ModelShape

VOCABULARY_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this times tp, as Megatron does."""


def build_model(
    settings: Trained, hf_config: Mapping[str, Any], dtype: torch.dtype, temperature: float, context_length: int
) -> list[DistributedDataParallel]:
    """This rank's shard of the model, with weights still to be loaded: one chunk for every virtual pipeline stage."""
    config = transformer_config(settings, hf_config, dtype)
    chunks = [build_chunk(config, hf_config, stage, context_length) for stage in range(settings.layout.vpp)]
    for chunk in chunks:
        replace_output_layer(chunk, hf_config, temperature)
        chunk.to(device.device())
    overlap = settings.overlap_communication
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=overlap, overlap_param_gather=overlap
    )
    # What later chunks communicate overlaps with the computation of other chunks anyway.
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=stage > 0)
        for stage, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        config.no_sync_func = _only_or_all([chunk.no_sync for chunk in wrapped])
        config.grad_sync_func = _only_or_all([chunk.start_grad_sync for chunk in wrapped])
    return wrapped


def named_parameters(chunks: Sequence[DistributedDataParallel]) -> dict[str, torch.nn.Parameter]:
    """Every parameter of this rank, under the name that its holder gives it."""
    return {
        f"chunk{i}.{name}": parameter
        for i, chunk in enumerate(chunks)
        for name, parameter in chunk.module.named_parameters()
    }


def build_chunk(config: TransformerConfig, hf_config: Mapping[str, Any], stage: int, context_length: int) -> GPTModel:
    """This rank's layers of a virtual stage (0 where a pipeline stage has only one), with Megatron's output layer."""
    shape = ModelShape.of(hf_config)
    multiple = VOCABULARY_MULTIPLE * config.tensor_model_parallel_size
    virtual = stage if config.virtual_pipeline_model_parallel_size else None
    model = GPTModel(
        config,
        block_spec(config, shape, virtual),
        vocab_size=-(-shape.vocab // multiple) * multiple,
        max_sequence_length=context_length,
        pre_process=parallel.is_first_stage(virtual),
        post_process=parallel.is_last_stage(virtual),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        vp_stage=virtual,
    )
    model.rotary_pos_emb.inv_freq = inverse_frequencies(rope_parameters(completed(hf_config)), shape.head_dim)
    if not uses_transformer_engine():
        model.rotary_pos_emb.__class__ = PositionRotary
    return model


def _only_or_all(functions: list[Callable]) -> Callable | list[Callable]:
    """Megatron's schedules take one function per chunk, or where there is a single chunk the function itself."""
    return functions if len(functions) > 1 else functions[0]


def transformer_config(settings: Trained, hf_config: Mapping[str, Any], dtype: torch.dtype) -> TransformerConfig:
    """Architecture from the Hugging Face config, parallelism from the layout, the rest from megatron_extra."""
    fields = {
        **architecture(hf_config),
        **_parallelism(settings.layout),
        **_precision(dtype),
        **_kernels(),
    }
    return TransformerConfig(**{**fields, **_checked_extra(settings.megatron_extra, fields)})


def _parallelism(layout: Layout) -> dict[str, Any]:
    first = layout.first_stage_layers
    return dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        sequence_parallel=layout.sequence_parallel,
        num_layers_in_first_pipeline_stage=first,
        # Of two stages the second follows from the first; Megatron divides by the stages between two given ones.
        num_layers_in_last_pipeline_stage=layout.last_stage_layers if first is None or layout.pp > 2 else None,
        # Packs differ in length; megatron-core asks for this dispatcher then, of dense models too.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        deallocate_pipeline_outputs=True,
        # Batched point-to-point communication is silently wrong with virtual stages on a pipeline of two.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
    )


def _precision(dtype: torch.dtype) -> dict[str, Any]:
    return dict(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        attention_softmax_in_fp32=True,
    )


def _kernels() -> dict[str, Any]:
    """Fused kernels come with Transformer Engine; weights are loaded right after, so initialisation is free of cost."""
    fused = uses_transformer_engine()
    return dict(
        gradient_accumulation_fusion=False,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        masked_softmax_fusion=False,
        apply_rope_fusion=fused,
        use_cpu_initialization=not device.on_cuda(),
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
    )


def _checked_extra(extra: Mapping[str, Any], ours: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuses unknown fields of TransformerConfig, and those that follow from the model or the layout."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    fixed = set(ours) - set(_kernels())
    for name in extra:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"actor.megatron_extra.{name}: Megatron's TransformerConfig has no such field{hint}")
        if name in fixed:
            raise ValueError(
                f"actor.megatron_extra.{name}={extra[name]}: this follows from the model or from actor.layout; "
                "set it there"
            )
    return extra
