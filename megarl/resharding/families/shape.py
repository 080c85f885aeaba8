"""The numbers of a model's architecture that decide the shapes of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.resharding.families.classifier import score_head_of
from megarl.resharding.families.registry import family_of


@dataclass(frozen=True, slots=True)
class ModelShape:
    """heads, kv_heads: of queries, and of keys and values; tied: the head's weight is the embedding's."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool

    @property
    def query(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def active_intermediate(self) -> int:
        """Rows of the MLP that a token goes through."""
        return self.intermediate

    @property
    def key(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> ModelShape:
        """From a Hugging Face config.json. Raises ValueError for an unknown family or a missing key."""
        family = family_of(hf_config)
        hidden, heads = _number(hf_config, "hidden_size"), _number(hf_config, "num_attention_heads")
        return cls(
            num_layers=_number(hf_config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            # Absent or null: one per query head, and the hidden size divided among the heads.
            kv_heads=hf_config.get("num_key_value_heads") or heads,
            head_dim=hf_config.get("head_dim") or hidden // heads,
            intermediate=_number(hf_config, "intermediate_size"),
            vocab=_number(hf_config, "vocab_size"),
            # A classifier's config may say so too, but there is no language head to tie.
            tied=bool(hf_config.get("tie_word_embeddings", False)) and score_head_of(hf_config) is None,
            qkv_bias="self_attn.q_proj.bias" in family.tensors,
        )


def _number(hf_config: Mapping[str, Any], key: str) -> int:
    value = hf_config.get(key)
    if not isinstance(value, int):
        raise ValueError(f"config.json: {key} must be an integer, found {value!r}")
    return value
