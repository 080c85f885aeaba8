"""The size of a checkpoint on the disk, in closed form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

from megarl.config.model_schema import Layout, Role, Trained
from megarl.config.schema import Config
from megarl.resharding.families import huggingface_holder, megatron_holder
from megarl.resharding.families.adapters import adapter_holder
from megarl.resharding.families.megatron import VOCABULARY_MULTIPLE
from megarl.resharding.piece import Holder
from megarl.resharding.selection import ONE_PROCESS, select_tensors, whole_parameters

FLOAT32 = 4

ADAM_STATES = 3
"""The float32 copies of a trained parameter: its main weight and AdamW's two moments."""

ENTRY_BYTES = 1900
"""The bytes of a rank's part of a tensor beside its elements: names, shape and checksum, in the file and in the
index."""

CUTS = 3
"""The parts that a matrix is in more where the range of a rank ends in one of its rows: rows before, two parts of the
row, rows after."""

RANK_BYTES = 26 * 1024
"""The bytes of a rank's random states."""


def checkpoint_bytes(config: Config, hf_configs: Mapping[Role, Mapping[str, Any]]) -> int:
    """Returns the bytes of a checkpoint of all models that the run trains.

    hf_configs   config.json of each of these, with the head that it is trained with
    """
    return sum(_model_bytes(config, config.placed(role), hf_config) for role, hf_config in hf_configs.items())


def _model_bytes(config: Config, settings: Trained, hf_config: Mapping[str, Any]) -> int:
    """Returns the bytes of one model. Every element is saved once, by one of the ranks that have it: as one process
    would save it, in as many parts as tensor parallelism and the ranges of data-parallel ranks make of it."""
    layout = settings.layout
    if settings.adapters is not None:
        return _adapter_bytes(config, settings, hf_config)
    holder = _holder(config, layout, hf_config, tp=1, etp=1)
    elements, rank = _elements(holder), _elements(_holder(config, layout, hf_config, layout.tp, layout.expert_tp))
    copies = dict.fromkeys(elements, 1)
    num_bytes = holder.shard.num_bytes
    for name in _trained(settings, hf_config, holder):
        copies[name] += ADAM_STATES
        num_bytes += elements[name] * ADAM_STATES * FLOAT32
    if settings.section == "actor" and config.has_reference and config.algorithm.kl.renew_steps is not None:
        # A reference that takes up the whole policy is saved as the weights are, one that takes a share in float32.
        whole = config.algorithm.kl.renew_share == 1
        num_bytes += holder.shard.num_bytes if whole else sum(elements.values()) * FLOAT32
        copies = {name: number + 1 for name, number in copies.items()}
    # Gate and up projection, one parameter of a rank, are saved apart.
    parts = {name: elements[name] // rank[name] * (2 if ".linear_fc1.weight" in name else 1) for name in elements}
    ends = layout.world_size - layout.tp * layout.pp
    entries = sum(parts[name] * number for name, number in copies.items()) + ends * CUTS * (1 + ADAM_STATES)
    return num_bytes + entries * ENTRY_BYTES + layout.world_size * RANK_BYTES


def _adapter_bytes(config: Config, settings: Trained, hf_config: Mapping[str, Any]) -> int:
    """Returns the bytes of a model's adapters, which alone are saved beside it: in float32, each piece of a PEFT tensor
    by itself."""
    layout, lora = settings.layout, settings.adapters
    whole, rank = (
        adapter_holder(_holder(config, layout, hf_config, tp, etp), lora.rank, lora.share_experts)
        for tp, etp in ((1, 1), (layout.tp, layout.expert_tp))
    )
    elements, of_rank = _elements(whole), _elements(rank)
    parts = Counter(piece.local for piece in rank.pieces)
    copies = 1 + ADAM_STATES
    ends = layout.world_size - layout.tp * layout.pp
    entries = copies * (sum(parts[name] * elements[name] // of_rank[name] for name in parts) + ends * CUTS)
    return copies * sum(elements.values()) * FLOAT32 + entries * ENTRY_BYTES + layout.world_size * RANK_BYTES


def _holder(config: Config, layout: Layout, hf_config: Mapping[str, Any], tp: int, etp: int) -> Holder:
    """Returns the first of `tp` tensor-parallel ranks, with all layers and experts; the vocabulary padded as under the
    layout."""
    rank_layout = layout.model_copy(update=ONE_PROCESS | {"tp": tp, "etp": etp})
    multiple = VOCABULARY_MULTIPLE * layout.tp // tp
    return megatron_holder(hf_config, rank_layout, 0, dtype=config.model.dtype, vocab_multiple=multiple)


def _elements(holder: Holder) -> dict[str, int]:
    return {name: prod(shape) for name, shape in holder.shapes.items()}


def _trained(settings: Trained, hf_config: Mapping[str, Any], holder: Holder) -> list[str]:
    """Returns the parameters that an optimizer has states of: a router's bias follows no gradient."""
    key = f"{settings.section}.frozen"
    selected = select_tensors(key, settings.frozen_patterns, huggingface_holder(hf_config).shapes)
    frozen = set(whole_parameters(key, selected, holder))
    return [name for name in holder.shapes if name not in frozen and not name.endswith(".router.expert_bias")]
