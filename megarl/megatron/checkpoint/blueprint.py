"""Blueprints: one rank's part of a model under any layout, built in a single process without allocating weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.transformer.module import MegatronModule

from megarl.config.model_schema import Layout
from megarl.megatron import parallel
from megarl.megatron.checkpoint.extents import extents_of
from megarl.megatron.model.architecture import architecture, config_class
from megarl.megatron.model.build import DISPATCHER, build_chunk, parallelism, tensors_of
from megarl.megatron.model.denoiser.build import build_chunks
from megarl.megatron.model.head import replace_output_layer
from megarl.megatron.overrides import build
from megarl.models.denoiser import is_denoiser
from megarl.resharding.checkpoint import Extent
from megarl.resharding.families import megatron_holder
from megarl.resharding.piece import Holder


@dataclass(frozen=True, slots=True)
class RankBlueprint:
    """The weights that a rank holds and the entries that it writes: tensor extents, and keys of empty objects."""

    holder: Holder
    extents: tuple[Extent, ...]
    objects: tuple[str, ...]


def blueprint(
    hf_config: Mapping[str, Any], layout: Layout, rank: int, format: Mapping[str, Any], dtype: str | None = None
) -> RankBlueprint:
    """Return one rank's blueprint. It is built from megarl's own layers, which have the same checkpoint keys as
    Transformer Engine's layers. Raise a UserError if the model cannot be split evenly under the layout.

    Args:
        format: metadata for Megatron's `sharded_state_dict`.
        dtype: dtype of the holder's weights; None means the dtype in config.json.
    """
    holder = megatron_holder(hf_config, layout, rank, dtype)
    with parallel.simulated_rank(layout, rank):
        chunks = _chunks(hf_config, layout)
        states = [chunk.sharded_state_dict(metadata=dict(format)) for chunk in chunks]
    names = {id(tensor): name for name, tensor in tensors_of(chunks).items()}
    entries = [entry for state in states for entry in nested_values(state) if is_main_replica(entry.replica_id)]
    objects = [entry for entry in entries if isinstance(entry, ShardedObject)]
    assert all(entry.data is None for entry in objects), "the model has non-tensor state"
    shards = [entry for entry in entries if not isinstance(entry, ShardedObject)]
    return RankBlueprint(
        holder,
        tuple(extent for shard in shards for extent in extents_of(shard, names[id(shard.data)])),
        tuple(entry.unique_key for entry in objects),
    )


def _chunks(hf_config: Mapping[str, Any], layout: Layout) -> list[MegatronModule]:
    unfused = dict.fromkeys(
        ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion"),
        False,
    )
    initialization = dict.fromkeys(("init_method", "output_layer_init_method"), torch.nn.init.zeros_)
    fields = parallelism(layout) | DISPATCHER | unfused | initialization
    fields |= dict(use_cpu_initialization=True, pipeline_dtype=torch.float32)
    form = architecture(hf_config)
    config = build("layout", config_class(form), form | fields)
    with torch.device("meta"):
        if is_denoiser(hf_config):
            return [*build_chunks(config, hf_config, layout.vpp)]
        chunks = [build_chunk(config, hf_config, stage, 1, fused=False) for stage in range(layout.vpp)]
        for chunk in chunks:
            replace_output_layer(chunk, hf_config, temperature=1.0)
    return [*chunks]
