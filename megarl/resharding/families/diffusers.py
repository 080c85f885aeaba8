"""Describe the weights in an engine that runs diffusers' own class. Its parameters are the canonical tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.resharding.families.huggingface import huggingface_holder
from megarl.resharding.piece import Holder


def diffusers_holders(config: Mapping[str, Any], replicas: int, dtype: str | None = None) -> list[Holder]:
    """Return the holders of all engines, named "diffusers:{replica}". Every engine holds the complete transformer.

    Args:
        config: the config.json of the transformer.
        dtype: dtype of the weights, such as "bfloat16". None: the checkpoint's dtype.
    """
    shard = huggingface_holder(config, dtype).shard
    return [Holder(f"diffusers:{replica}", shard) for replica in range(replicas)]
