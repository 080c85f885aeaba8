"""Build the GPTModel of one rank of any layout in a single process.

torch's fake process group replaces the other ranks, and the meta device replaces memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config.load import load
from megarl.config.model_schema import Layout
from megarl.config.schema import Config
from megarl.megatron import cpu_support
from megarl.megatron.model.build import build_chunk, transformer_config
from megarl.megatron.model.head import replace_output_layer
from tests.paths import BASE


@dataclass(frozen=True)
class RealRank:
    """The model of a global rank as megatron-core builds it.

    Attributes:
        shapes: shapes of its parameters and persistent buffers.
        layers: prefix of a layer -> its index in the model.
        experts: prefix of an expert -> its index in the layer.
    """

    tp_rank: int
    expert_tp_rank: int
    shapes: dict[str, tuple[int, ...]]
    layers: dict[str, int]
    experts: dict[str, int]


@cache
def base_config() -> Config:
    return load(BASE, ["model.path=x", "data.source=arithmetic"])


def real_rank(config: dict, layout: Layout, rank: int) -> RealRank:
    """Build the rank's model with megarl's builder and head, then destroy the process group."""
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
        actor = base_config().actor.model_copy(update={"layout": layout})
        hf_config = {"rms_norm_eps": 1e-5, **config}
        megatron_config = transformer_config(actor, hf_config, torch.float32)
        with torch.device("meta"):
            chunks = [build_chunk(megatron_config, hf_config, stage, 16) for stage in range(layout.vpp)]
            for chunk in chunks:
                replace_output_layer(chunk, hf_config, temperature=1.0)
        shapes, layers, experts = {}, {}, {}
        for i, chunk in enumerate(chunks):
            # Parameters and persistent buffers, without the extra state of layers.
            weights = {name: w for name, w in chunk.state_dict().items() if not name.endswith("._extra_state")}
            shapes |= {f"chunk{i}.{name}": tuple(weight.shape) for name, weight in weights.items()}
            # Megatron numbers layers from 1.
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
