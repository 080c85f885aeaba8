"""Shard sizes of the trained models, cached across layouts, and the host memory that ranks need."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from megarl.cluster.memory.rank import RankMemory, RankParameters, item_bytes, stage_memory
from megarl.config.model_schema import Layout, Lora, Role
from megarl.config.schema import Config
from megarl.models.denoiser import shape_of
from megarl.models.vision import CANONICAL_PREFIX
from megarl.resharding.families import diffusers_holders, huggingface_holder, quantized_destinations, vllm_holder
from megarl.resharding.families.eagle import eagle_bytes
from megarl.resharding.families.megatron import chunk_layers
from megarl.resharding.piece import Holder

DRAFT = "engine: draft model"


class ModelParameters:
    """The sizes of one model's shards on trainer and engine ranks. All ranks in a pipeline stage hold the same number
    of parameters, regardless of context and data parallelism.

    Attributes:
        count: number of the model's parameters.
        tower_count: number of the vision tower's parameters. Every engine rank holds all of them.
    """

    def __init__(self, hf_config: Mapping[str, Any], lora: Lora | None = None, uses_muon: bool = False):
        """lora: the adapters that are trained instead of the model; None without adapters."""
        self._lora, self._uses_muon = lora, uses_muon
        self.hf_config = hf_config
        self.shape = shape_of(hf_config)
        shapes = huggingface_holder(hf_config).shapes
        self.count = sum(map(prod, shapes.values()))
        self.tower_count = sum(prod(shape) for name, shape in shapes.items() if name.startswith(CANONICAL_PREFIX))
        self._stages: dict[tuple, RankParameters] = {}
        self._layers: dict[tuple, list[list[range]]] = {}
        self._engines: dict[tuple, int] = {}

    def of_stage(self, layout: Layout, stage: int) -> RankParameters:
        """Return the parameter counts of a pipeline stage's ranks. Raise UserError for an uneven split of the model."""
        layers = [layer for chunk in self._chunks(layout) for layer in chunk[stage]]
        kinds = tuple(self.shape.kind(layer) for layer in layers)
        key = (layout.tp, layout.ep, layout.expert_tp, kinds, stage == 0, stage == layout.pp - 1)
        if key not in self._stages:
            rank = stage * layout.tp * layout.cp * layout.dp
            self._stages[key] = RankParameters.of(self.hf_config, layout, rank, self._lora, self._uses_muon)
        return self._stages[key]

    def _chunks(self, layout: Layout) -> list[list[range]]:
        key = (layout.pp, layout.vpp, layout.first_stage_layers, layout.last_stage_layers)
        if key not in self._layers:
            self._layers[key] = chunk_layers(self.shape.num_layers, layout)
        return self._layers[key]

    def engine_bytes(self, config: Config) -> int:
        """Return the size of an engine rank's weights in bytes."""
        key = (config.rollout.tp, config.model.dtype, config.rollout.has_whole_experts, config.rollout.quantization)
        if key not in self._engines:
            self._engines[key] = engine_holder(config, self.hf_config, 0).shard.num_bytes
        return self._engines[key]


def engine_holder(config: Config, hf_config: Mapping[str, Any], rank: int) -> Holder:
    """Return the holder of an engine rank: which weights the rank stores, in the engine's weight format."""
    rollout = config.rollout
    if config.samples_images:
        return diffusers_holders(hf_config, 1, config.model.dtype)[0]
    whole_experts, drafts = rollout.has_whole_experts, rollout.drafts_with_mtp
    holder = vllm_holder(hf_config, rollout.tp, rank, 0, config.model.dtype, whole_experts, drafts=drafts)
    return holder if rollout.quantization is None else quantized_destinations(hf_config, [holder])[0]


def draft_parts(config: Config, draft: Mapping[str, Any] | None) -> dict[str, int]:
    """Return {DRAFT: bytes of the draft model's weights on an engine rank}, or an empty dict without a draft model. The
    draft's KV cache is part of rollout.kv_cache_gib."""
    if draft is None:
        return {}
    tp, dtype = config.rollout.tp, config.model.dtype
    if config.rollout.drafts_with_eagle:
        return {DRAFT: eagle_bytes(draft, tp, dtype)}
    return {DRAFT: vllm_holder(draft, tp, 0, 0, dtype).shard.num_bytes}


@dataclass(frozen=True, slots=True)
class Models:
    """The trained models in a run, the reward model's config.json, the model that drafts tokens in the engines, and the
    teachers by name."""

    trained: Mapping[Role, ModelParameters]
    reward: Mapping[str, Any] | None = None
    draft: ModelParameters | None = None
    teachers: Mapping[str, ModelParameters] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        trained: Mapping[Role, Mapping[str, Any]],
        reward: Mapping[str, Any] | None = None,
        lora: Lora | None = None,
        draft: Mapping[str, Any] | None = None,
        teachers: Mapping[str, Mapping[str, Any]] | None = None,
        muon: Collection[Role] = (),
    ) -> Models:
        """Create the models from their config.json files, including heads. `lora`: the actor's adapters. `muon`: the
        roles that train with Muon."""
        return cls(
            {r: ModelParameters(c, lora if r == "actor" else None, r in muon) for r, c in trained.items()},
            reward,
            None if draft is None else ModelParameters(draft),
            {name: ModelParameters(hf_config) for name, hf_config in (teachers or {}).items()},
        )

    @property
    def actor(self) -> ModelParameters:
        return self.trained["actor"]


def min_host_bytes(config: Config, models: Models, policy: ModelParameters) -> dict[str, int]:
    """Return the host memory in bytes that models and engines always hold, by purpose.

    Activations, KV caches and the processes' own memory are not included, so a machine with less memory cannot run the
    config.

    Args:
        policy: the actor's model in the engines, without heads that only the trainer has.
    """
    num_bytes = item_bytes(config)
    parts: dict[str, int] = {}

    def stages_of(model: ModelParameters, layout: Layout) -> list[RankMemory]:
        return [
            stage_memory(model.shape, layout, stage, model.of_stage(layout, stage), num_bytes, 1, 1, 1)
            for stage in range(layout.pp)
        ]

    for role, model in models.trained.items():
        settings = config.placed(role)
        layout = settings.layout
        stages = stages_of(model, layout)
        ranks = layout.tp * layout.cp * layout.dp
        weights = ranks * sum(stage.weights for stage in stages)
        trained = 0 if settings.frozen else ranks * sum(stage.gradients + stage.optimizer for stage in stages)
        parts[f"{role}: weights, gradients, optimizer"] = weights + trained
        if role == "actor" and config.keeps_reference and settings.adapters is None:
            parts["reference: weights"] = weights
    for name, model in models.teachers.items():
        layout = config.teacher_section(name).layout
        weights = sum(stage.weights for stage in stages_of(model, layout))
        parts[f"teacher {name}: weights"] = layout.tp * layout.cp * layout.dp * weights
    rollout = config.rollout
    if not config.is_offline and rollout.quantization is not None:
        layout, actor = config.actor.layout, models.actor
        matrices = sum(actor.of_stage(layout, stage).matrices for stage in range(layout.pp))
        parts["actor: fp8 copy for the engines"] = layout.tp * layout.cp * layout.dp * matrices
    if not config.is_offline and rollout.vllm_overrides.get("quantization") is None:  # otherwise the size is unknown
        parts["engines: weights"] = rollout.replicas * rollout.tp * policy.engine_bytes(config)
    if not config.is_offline and models.draft is not None:
        [size] = draft_parts(config, models.draft.hf_config).values()
        parts["engines: draft models"] = rollout.replicas * rollout.tp * size
    return parts
