"""Names and shapes that megatron_holder declares, against the GPTModel that a rank of such a world really builds.

torch's fake process group and the meta device stand in for the other ranks and for memory.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config.schema import Actor, Layout, Optimizer
from megarl.megatron import cpu_support
from megarl.megatron.layer_spec import block_spec, uses_transformer_engine
from megarl.megatron.model import VOCABULARY_MULTIPLE, transformer_config
from megarl.resharding.families import megatron_holder
from megarl.resharding.families.shape import ModelShape
from tests.unit.resharding.cases import config_of, layout_of

OPTIMIZER = Optimizer(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, clip_grad_norm=1.0)
CASES = {
    "1 process": ({}, layout_of()),
    "1 process, tied": ({"tie_word_embeddings": True}, layout_of()),
    "TP3": ({}, layout_of(tp=3)),
    "TP3, tied, biases": ({"tie_word_embeddings": True, "model_type": "qwen2"}, layout_of(tp=3)),
    "PP2, uneven": ({"num_hidden_layers": 5}, layout_of(pp=2, last=1)),
    "PP2, uneven, tied": ({"num_hidden_layers": 5, "tie_word_embeddings": True}, layout_of(pp=2, first=2)),
    "TP3, PP3, DP2, CP2": ({"num_hidden_layers": 5, "vocab_size": 999}, layout_of(3, 3, dp=2, cp=2, first=1, last=2)),
}


def real_parameters(config: dict, layout: Layout, rank: int) -> tuple[int, dict[str, tuple[int, ...]]]:
    """The tensor-parallel rank that megatron-core gives to this global rank, and its parameters' shapes."""
    cpu_support.install()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, context_parallel_size=layout.cp, create_gloo_process_groups=False
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
        actor = Actor(layout=layout, optimizer=OPTIMIZER, tokens_per_microbatch=1, threads=None, megatron_extra={})
        with torch.device("meta"):
            model = gpt_model(config, actor)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return parallel_state.get_tensor_model_parallel_rank(), shapes
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def gpt_model(config: dict, actor: Actor) -> GPTModel:
    shape = ModelShape.of(config)
    multiple = VOCABULARY_MULTIPLE * actor.layout.tp
    megatron_config = transformer_config(actor, {"rms_norm_eps": 1e-5, **config}, torch.float32)
    return GPTModel(
        megatron_config,
        block_spec(megatron_config),
        vocab_size=-(-shape.vocab // multiple) * multiple,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
    )


@pytest.mark.parametrize("case", CASES)
def test_holder_has_the_parameters_of_the_real_model(case):
    changes, layout = CASES[case]
    config = config_of(**changes)
    for rank in range(layout.world_size):
        holder = megatron_holder(
            config, layout, rank, fused_norms=uses_transformer_engine(), vocab_multiple=VOCABULARY_MULTIPLE
        )
        tp_rank, shapes = real_parameters(config, layout, rank)
        assert holder.shapes == shapes, f"rank {rank}"
        [out] = [
            piece for piece in holder.pieces if piece.local == "decoder.layers.0.self_attention.linear_proj.weight"
        ]
        columns = shapes[out.local][1]
        assert out.canonical_rectangle[1] == (tp_rank * columns, (tp_rank + 1) * columns), f"rank {rank}"
