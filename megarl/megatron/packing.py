"""Packing requirements that follow from a layout and numeric precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.model_schema import Placed, Trained
from megarl.data.packing import Packing
from megarl.megatron.model.layer_spec import can_share_prompts, splits_documents
from megarl.megatron.model.precision import token_multiple
from megarl.models.denoiser import shape_of
from megarl.models.token_cost import TokenCost
from megarl.resharding.selection import trains_tower


def packing_of(settings: Placed, hf_config: Mapping[str, Any]) -> Packing:
    layout, shape = settings.layout, shape_of(hf_config)
    is_recurrent = shape.linear is not None
    # Context parallelism gives each rank two chunks; sequence parallelism splits each rank's tokens into tp parts.
    chunks = 2 * layout.cp if layout.cp > 1 else 1
    is_tower_trained = isinstance(settings, Trained) and shape.vision is not None and trains_tower(settings, hf_config)
    return Packing(
        token_budget=settings.tokens_per_microbatch * layout.cp,
        num_ranks=layout.dp,
        # Multi-token prediction reads each token's successor, which at the end of a prompt depends on the sample.
        shares_prompts=can_share_prompts(layout.cp, is_recurrent) and not shape.trains_mtp,
        document_multiple=chunks if splits_documents(is_recurrent) else 1,
        pack_multiple=chunks * (layout.tp if layout.sequence_parallel else 1) * token_multiple(settings.fp8),
        # The interleaved schedule processes pp microbatches at a time and does not support a remainder.
        microbatch_multiple=layout.pp if layout.vpp > 1 else 1,
        cost=TokenCost.of_model(hf_config, is_tower_trained, num_ranks=layout.tp * layout.cp * layout.pp),
    )
