"""A model with gpt-oss's attention and Llama's dense MLPs, in transformers and as a family of megarl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from megarl.models import families, huggingface, unsupported
from tests.tiny_model import write_tiny_model

NAME = "dense_gpt_oss"
VOCAB = 500
"""Megatron pads it to 512 rows, so that each rank of TP2 and TP4 has tokens."""
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    num_hidden_layers=4,
    intermediate_size=72,
    max_position_embeddings=64,
    mlp_bias=False,
    sliding_window=5,
    rope_parameters=dict(rope_type="default", rope_theta=1e3),
)


class DenseConfig(GptOssConfig):
    model_type = NAME
    mlp_bias: bool = False


class DenseMLP(LlamaMLP):
    def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]  # gpt-oss's MLP also returns scores
        return super().forward(x), None


class DenseGptOss(GptOssForCausalLM):
    config_class = DenseConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = DenseMLP(config)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the family known to transformers and, until the patches are undone, to megarl."""
    AutoConfig.register(NAME, DenseConfig, exist_ok=True)
    AutoModelForCausalLM.register(DenseConfig, DenseGptOss, exist_ok=True)
    defaults = {"attention_bias": True, "layer_types": None, "sliding_window": 128}
    monkeypatch.setitem(families.FAMILIES, NAME, {**families.FAMILIES["llama"], **defaults})
    monkeypatch.setitem(unsupported._BIASES, NAME, ("attention_bias",))
    for feature in ("_WINDOWS", "_SINKS"):
        monkeypatch.setattr(huggingface, feature, (*getattr(huggingface, feature), NAME))


def write(folder: Path, **changes: Any) -> Path:
    return write_tiny_model(folder, NAME, **SIZES | changes)
