"""The requirements of layout and number format on packs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.model_schema import Trained
from megarl.data.packing import Packing
from megarl.megatron.model.layer_spec import can_share_prompts, uses_transformer_engine
from megarl.megatron.model.precision import token_multiple
from megarl.models.token_cost import TokenCost


def packing_of(settings: Trained, hf_config: Mapping[str, Any]) -> Packing:
    layout = settings.layout
    # Context parallelism gives each rank two runs of tokens, sequence parallelism cuts what a rank has into tp parts.
    chunks = 2 * layout.cp if layout.cp > 1 else 1
    return Packing(
        token_budget=settings.tokens_per_microbatch * layout.cp,
        num_ranks=layout.dp,
        shares_prompts=can_share_prompts(layout.cp),
        # Transformer Engine shares out every document by itself, we the pack.
        document_multiple=chunks if uses_transformer_engine() else 1,
        pack_multiple=chunks * (layout.tp if layout.sequence_parallel else 1) * token_multiple(settings.fp8),
        # Interleaved stages take microbatches in groups of pp, and a last group must not be smaller.
        microbatch_multiple=layout.pp if layout.vpp > 1 else 1,
        cost=TokenCost.of_model(hf_config),
    )
