"""Closed-form estimate of a checkpoint's size on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil, prod
from typing import Any

from megarl.cluster.object_store import num_ahead, sample_bytes
from megarl.config.model_schema import Layout, Lora, Role, Trained
from megarl.config.schema import Config
from megarl.models.families import completed
from megarl.models.huggingface import experts
from megarl.resharding.families import megatron_holder
from megarl.resharding.families.adapters import adapter_holder
from megarl.resharding.families.megatron import VOCABULARY_MULTIPLE
from megarl.resharding.piece import Holder
from megarl.resharding.selection import ONE_PROCESS, frozen_parameters, layer_matrices

FLOAT32 = 4

ADAM_STATES, MUON_STATES = 3, 2
"""Number of float32 values per trained parameter: the main weight, and AdamW's two moments or Muon's momentum."""

ENTRY_BYTES = 1900
"""Bytes of metadata per saved part of a tensor: names, shape and checksum, in the file and in the index."""

CUTS = 3
"""Number of additional parts of a matrix in which a rank's range ends within a row. The matrix is saved in four parts
instead of one: the rows before that row, its two parts, and the rows after it."""

SAVED_APART = {".linear_fc1.weight": 2, ".in_proj.weight": 6, ".conv1d.weight": 3}
"""Suffix of a Megatron parameter that fuses several matrices -> the number of these matrices, which are saved
separately."""

LOGGED_BYTES = 15
"""Bytes per response token in a rollout log: its text and its log-prob."""

RANK_BYTES = 26 * 1024
"""Size of one rank's RNG state in bytes."""


def checkpoint_bytes(config: Config, hf_configs: Mapping[Role, Mapping[str, Any]]) -> int:
    """Return the size of a checkpoint in bytes. `hf_configs` contains the trained models' configs, including their
    heads."""
    return sum(_model_bytes(config, config.placed(role), hf_config) for role, hf_config in hf_configs.items())


def saved_bytes(config: Config, hf_configs: Mapping[Role, Mapping[str, Any]]) -> int:
    """Return the size of a checkpoint in bytes, including samples of maximum length that wait for a later step."""
    size = checkpoint_bytes(config, hf_configs)
    if config.is_offline or not config.prompts_ahead:
        return size
    if config.samples_images:
        return size + ceil(num_ahead(config) * sample_bytes(config, None))
    # The file stores each mask with one byte per token.
    sample = sample_bytes(config, experts(completed(hf_configs["actor"]))) + config.rollout.context_length
    return size + ceil(num_ahead(config) * sample)


def log_bytes(config: Config) -> int:
    """Return the size in bytes of the rollout logs of all steps, with responses of maximum length."""
    if config.is_offline:
        return 0
    batch, tokens = config.batch, min(config.rollout.max_new_tokens, config.rollout.context_length)
    samples = batch.prompts_per_step * (batch.samples_per_prompt + config.samples_greedily)
    return config.run.steps * samples * (tokens * LOGGED_BYTES + config.rollout.context_length)


def _model_bytes(config: Config, settings: Trained, hf_config: Mapping[str, Any]) -> int:
    """Return the number of bytes that one model takes in a checkpoint. Each element is saved once, by a rank that holds
    it. The number of saved parts depends on tensor parallelism and on the ranges that data-parallel ranks save."""
    layout = settings.layout
    if settings.adapters is not None:
        return _adapter_bytes(config, settings.layout, settings.adapters, hf_config)
    holder = _holder(config, layout, hf_config, tp=1, etp=1)
    elements, rank = _elements(holder), _elements(_holder(config, layout, hf_config, layout.tp, layout.expert_tp))
    copies = dict.fromkeys(elements, 1)
    num_bytes = holder.shard.num_bytes
    matrices = set(layer_matrices(holder) if settings.optimizer.name == "muon" else ())
    for name in _trained(settings, hf_config, holder):
        states = MUON_STATES if name in matrices else ADAM_STATES
        copies[name] += states
        num_bytes += elements[name] * states * FLOAT32
    if settings.section == "actor" and config.keeps_reference and config.algorithm.kl.renew_steps is not None:
        # A reference that is a copy of the policy has the weights' dtype; a moving average is float32.
        whole = config.algorithm.kl.renew_share == 1
        num_bytes += holder.shard.num_bytes if whole else sum(elements.values()) * FLOAT32
        copies = {name: number + 1 for name, number in copies.items()}
    parts = {name: elements[name] // rank[name] * _num_matrices(name) for name in elements}
    ends = layout.world_size - layout.tp * layout.pp
    entries = sum(parts[name] * number for name, number in copies.items()) + ends * CUTS * (1 + ADAM_STATES)
    return num_bytes + entries * ENTRY_BYTES + layout.world_size * RANK_BYTES


def _num_matrices(parameter: str) -> int:
    return next((number for suffix, number in SAVED_APART.items() if suffix in parameter), 1)


def _adapter_bytes(config: Config, layout: Layout, lora: Lora, hf_config: Mapping[str, Any]) -> int:
    """Return the number of bytes that a model's adapters take in a checkpoint. Adapters are saved in float32 without
    the frozen weights. Each piece of a PEFT tensor is saved separately."""
    assert lora.rank is not None, "actor.lora.rank is not set"
    full_adapters, rank_adapters = (
        adapter_holder(_holder(config, layout, hf_config, tp, etp), lora.rank, lora.share_experts)
        for tp, etp in ((1, 1), (layout.tp, layout.expert_tp))
    )
    elements, rank_elements = _elements(full_adapters), _elements(rank_adapters)
    parts = Counter(piece.local for piece in rank_adapters.pieces)
    copies = 1 + ADAM_STATES
    ends = layout.world_size - layout.tp * layout.pp
    entries = copies * (sum(parts[name] * elements[name] // rank_elements[name] for name in parts) + ends * CUTS)
    return copies * sum(elements.values()) * FLOAT32 + entries * ENTRY_BYTES + layout.world_size * RANK_BYTES


def _holder(config: Config, layout: Layout, hf_config: Mapping[str, Any], tp: int, etp: int) -> Holder:
    """Return the first rank's weights in a layout with only tensor parallelism, `tp` and `etp`. The vocabulary is
    padded as in `layout`."""
    rank_layout = layout.model_copy(update=ONE_PROCESS | {"tp": tp, "etp": etp})
    multiple = VOCABULARY_MULTIPLE * layout.tp // tp
    return megatron_holder(hf_config, rank_layout, 0, dtype=config.model.dtype, vocab_multiple=multiple)


def _elements(holder: Holder) -> dict[str, int]:
    return {name: prod(shape) for name, shape in holder.shapes.items()}


def _trained(settings: Trained, hf_config: Mapping[str, Any], holder: Holder) -> list[str]:
    """Return the names of the parameters with optimizer states. Router biases receive no gradients."""
    frozen = set(frozen_parameters(settings, hf_config, holder))
    return [name for name in holder.shapes if name not in frozen and not name.endswith(".router.expert_bias")]
