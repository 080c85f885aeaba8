"""Names and shapes that megatron_holder declares, against the GPTModel that a rank of such a world really builds.

torch's fake process group and the meta device stand in for the other ranks and for memory.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from megarl.resharding.piece import Holder
from tests.unit.resharding.cases import LATENT, config_of, layout_of

BASE = Path(__file__).parents[3] / "configs" / "base.yaml"
MIXTRAL = {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "num_experts": 4,
    "moe_intermediate_size": 6,
    "mlp_only_layers": [1],
}
DEEPSEEK = {
    **LATENT,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 6,
    "q_lora_rank": 4,
    "moe_intermediate_size": 6,
    "rms_norm_eps": 1e-6,
}
CASES = {
    "1 process": ({}, layout_of()),
    "1 process, tied": ({"tie_word_embeddings": True}, layout_of()),
    "TP3": ({}, layout_of(tp=3)),
    "TP3, tied, biases": ({"tie_word_embeddings": True, "model_type": "qwen2"}, layout_of(tp=3)),
    "TP3, norms of queries and keys": ({"model_type": "qwen3"}, layout_of(tp=3)),
    "TP3, all biases": ({"attention_bias": True, "mlp_bias": True}, layout_of(tp=3)),
    "TP3, attention biases": ({"attention_bias": True}, layout_of(tp=3)),
    "TP3, MLP biases": ({"mlp_bias": True}, layout_of(tp=3)),
    "experts, EP2, ETP2": (MIXTRAL, layout_of(tp=2, dp=4, ep=2)),
    "experts, EP4, ETP1": (MIXTRAL, layout_of(tp=2, dp=2, ep=4, etp=1)),
    "experts, EP2, CP2, PP2": (QWEN3_MOE, layout_of(tp=2, cp=2, pp=2, ep=2, etp=1)),
    "latent attention, TP2, EP2, ETP1, PP2": (DEEPSEEK, layout_of(tp=2, pp=2, ep=2, etp=1)),
    "latent attention, direct queries, TP2": (DEEPSEEK | {"q_lora_rank": None}, layout_of(tp=2)),
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


@dataclass(frozen=True)
class RealRank:
    """What megatron-core gives to a global rank.

    shapes           of its parameters
    layers, experts  prefix of a layer or an expert -> its number in the whole model, or in the whole layer
    """

    tp_rank: int
    expert_tp_rank: int
    shapes: dict[str, tuple[int, ...]]
    layers: dict[str, int]
    experts: dict[str, int]


def real_rank(config: dict, layout: Layout, rank: int) -> RealRank:
    cpu_support.install()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.expert_tp,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
        actor = load(BASE, ["model.path=x", "data.source=arithmetic"]).actor.model_copy(update={"layout": layout})
        hf_config = {"rms_norm_eps": 1e-5, **config}
        megatron_config = transformer_config(actor, hf_config, torch.float32)
        with torch.device("meta"):
            chunks = [build_chunk(megatron_config, hf_config, stage, 16) for stage in range(layout.vpp)]
        shapes, layers, experts = {}, {}, {}
        for i, chunk in enumerate(chunks):
            biases = [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias")]
            shapes |= {f"chunk{i}.{name}": tuple(p.shape) for name, p in [*chunk.named_parameters(), *biases]}
            # Megatron counts layers from 1.
            for j, layer in enumerate(chunk.decoder.layers):
                prefix = f"chunk{i}.decoder.layers.{j}."
                layers[prefix] = layer.layer_number - 1
                for k, number in enumerate(getattr(layer.mlp, "local_expert_indices", ())):
                    experts[f"{prefix}mlp.experts.local_experts.{k}."] = number
        return RealRank(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
            shapes,
            layers,
            experts,
        )
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
        real = real_rank(config, layout, rank)
        assert holder.shapes == real.shapes, f"rank {rank}"
        assert_columns(holder, real.layers, "self_attention.linear_proj.weight", "layers", real.tp_rank)
        assert_columns(holder, real.experts, "linear_fc2.weight", "experts", real.expert_tp_rank)


def assert_columns(holder: Holder, numbers: dict[str, int], name: str, kind: str, share: int) -> None:
    """Each of these parameters has its share of the columns of what has its number in the checkpoint."""
    pieces = {piece.local: piece for piece in holder.pieces}
    for prefix, number in numbers.items():
        piece = pieces[prefix + name]
        assert f"{kind}.{number}." in piece.canonical, f"{holder.name}: {prefix} has {piece.canonical}"
        columns = holder.shapes[piece.local][1]
        assert piece.canonical_rectangle[1] == (share * columns, (share + 1) * columns), f"{holder.name}: {prefix}"
