"""Names and shapes that megatron_holder declares, against the GPTModel that a rank of such a world really builds.

torch's fake process group and the meta device stand in for the other ranks and for memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config.load import load
from megarl.config.schema import Layout
from megarl.megatron import cpu_support
from megarl.megatron.layer_spec import uses_transformer_engine
from megarl.megatron.model import VOCABULARY_MULTIPLE, build_chunk, transformer_config
from megarl.resharding.families import megatron_holder
from tests.unit.resharding.cases import config_of, layout_of

BASE = Path(__file__).parents[3] / "configs" / "base.yaml"
CASES = {
    "1 process": ({}, layout_of()),
    "1 process, tied": ({"tie_word_embeddings": True}, layout_of()),
    "TP3": ({}, layout_of(tp=3)),
    "TP3, tied, biases": ({"tie_word_embeddings": True, "model_type": "qwen2"}, layout_of(tp=3)),
    "TP3, norms of queries and keys": ({"model_type": "qwen3"}, layout_of(tp=3)),
    "TP3, all biases": ({"attention_bias": True, "mlp_bias": True}, layout_of(tp=3)),
    "TP3, attention biases": ({"attention_bias": True}, layout_of(tp=3)),
    "TP3, MLP biases": ({"mlp_bias": True}, layout_of(tp=3)),
    "PP2, uneven": ({"num_hidden_layers": 5}, layout_of(pp=2, last=1)),
    "PP2, uneven, tied": ({"num_hidden_layers": 5, "tie_word_embeddings": True}, layout_of(pp=2, first=2)),
    "PP2, VPP2": ({"num_hidden_layers": 8}, layout_of(pp=2, vpp=2)),
    "PP3, VPP2, uneven": ({"num_hidden_layers": 12, "vocab_size": 99}, layout_of(pp=3, vpp=2, first=2, last=6)),
    "PP2, VPP2, uneven, tied": (
        {"num_hidden_layers": 6, "tie_word_embeddings": True},
        layout_of(pp=2, vpp=2, first=4, last=2),
    ),
    "TP3, PP3, DP2, CP2": ({"num_hidden_layers": 5, "vocab_size": 999}, layout_of(3, 3, dp=2, cp=2, first=1, last=2)),
}


def real_parameters(config: dict, layout: Layout, rank: int) -> tuple[int, dict[str, tuple[int, ...]], dict[str, int]]:
    """What megatron-core gives to this global rank: its tensor-parallel rank, its parameters' shapes, and the number
    in the whole model of each of its layers."""
    cpu_support.install()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
        actor = load(BASE, ["model.path=x", "data.source=arithmetic"]).actor.model_copy(update={"layout": layout})
        hf_config = {"rms_norm_eps": 1e-5, **config}
        megatron_config = transformer_config(actor, hf_config, torch.float32)
        with torch.device("meta"):
            chunks = [build_chunk(megatron_config, hf_config, stage, 16) for stage in range(layout.vpp)]
        shapes, layers = {}, {}
        for i, chunk in enumerate(chunks):
            shapes |= {f"chunk{i}.{name}": tuple(parameter.shape) for name, parameter in chunk.named_parameters()}
            # Megatron counts layers from 1.
            numbers = {j: layer.layer_number - 1 for j, layer in enumerate(chunk.decoder.layers)}
            layers |= {f"chunk{i}.decoder.layers.{j}.": number for j, number in numbers.items()}
        return parallel_state.get_tensor_model_parallel_rank(), shapes, layers
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
def test_holder_has_the_parameters_of_the_real_model(case):
    changes, layout = CASES[case]
    config = config_of(**changes)
    for rank in range(layout.world_size):
        holder = megatron_holder(
            config, layout, rank, transformer_engine=uses_transformer_engine(), vocab_multiple=VOCABULARY_MULTIPLE
        )
        tp_rank, shapes, layers = real_parameters(config, layout, rank)
        assert holder.shapes == shapes, f"rank {rank}"
        outs = {p.local: p for p in holder.pieces if p.local.endswith("self_attention.linear_proj.weight")}
        assert len(outs) == len(layers)
        for prefix, number in layers.items():
            out = outs[f"{prefix}self_attention.linear_proj.weight"]
            assert out.canonical.startswith(f"model.layers.{number}."), f"rank {rank}"
            columns = shapes[out.local][1]
            assert out.canonical_rectangle[1] == (tp_rank * columns, (tp_rank + 1) * columns), f"rank {rank}"
