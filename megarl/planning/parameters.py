"""The sizes of a model's shards, each computed once however many layouts ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from megarl.config.schema import Layout
from megarl.planning.memory import RankParameters
from megarl.resharding.families import huggingface_holder, vllm_holder
from megarl.resharding.families.shape import ModelShape
from megarl.resharding.piece import Holder


class ModelParameters:
    """The shards of one model: what its trainer's ranks and its engine's hold. Ranks of a pipeline stage hold as many
    parameters each, and neither context nor data parallelism changes how many."""

    def __init__(self, hf_config: Mapping[str, Any]):
        self.hf_config = hf_config
        self.shape = ModelShape.of(hf_config)
        self.count = sum(_elements(huggingface_holder(hf_config)))
        self._stages: dict[tuple, RankParameters] = {}
        self._engines: dict[tuple, int] = {}

    def of_stage(self, layout: Layout, stage: int) -> RankParameters:
        """Returns what each rank of a pipeline stage holds. Raises UserError where the model does not divide."""
        key = (layout.tp, layout.pp, layout.vpp, layout.ep, layout.expert_tp, stage)
        key += (layout.first_stage_layers, layout.last_stage_layers)
        if key not in self._stages:
            rank = stage * layout.tp * layout.cp * layout.dp
            self._stages[key] = RankParameters.of(self.hf_config, layout, rank)
        return self._stages[key]

    def engine_bytes(self, tp: int, dtype: str, whole_experts: bool = False) -> int:
        """Returns the bytes of the weights of an engine's rank."""
        key = (tp, dtype, whole_experts)
        if key not in self._engines:
            self._engines[key] = vllm_holder(self.hf_config, tp, 0, 0, dtype, whole_experts).shard.num_bytes
        return self._engines[key]


def _elements(holder: Holder) -> list[int]:
    return [prod(shape) for shape in holder.shapes.values()]
