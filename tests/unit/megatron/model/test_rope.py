"""Rotary angle tables for packs of varying length, compared with Megatron's table for each length, and angles of
three-dimensional positions, compared with transformers."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from megarl.megatron import parallel
from megarl.megatron.model.rope import DocumentRotary, DocumentYarn, axes_of_channels
from tests.unit.resharding.cases import layout_of

LENGTHS = (9, 5, 16, 200, 33, 129)
"""Length of the longest document of each pack."""


@pytest.mark.parametrize(
    ("megatron_class", "megarl_class"), [(RotaryEmbedding, DocumentRotary), (YarnRotaryEmbedding, DocumentYarn)]
)
def test_single_table_serves_all_lengths(megatron_class, megarl_class):
    with parallel.simulated_rank(layout_of(), 0):
        fresh, kept = (megatron_class(16, rotary_percent=1.0, use_cpu_initialization=True) for _ in range(2))
        kept.__class__ = megarl_class
        for length in LENGTHS:
            torch.testing.assert_close(kept(length, packed_seq=True), fresh(length, packed_seq=True), rtol=0, atol=0)
            rows = kept(length) if megarl_class is DocumentRotary else kept(length)[0]
            assert rows.data_ptr() == kept.table.data_ptr()
        table = kept.table
        for length in LENGTHS:
            kept(length)
        assert kept.table is table and len(table) == 256


SECTIONS = {"qwen2_5_vl": (2, 3, 3), "qwen3_vl": (4, 2, 2), "qwen3_5": (3, 3, 2)}


@pytest.mark.parametrize("family", SECTIONS)
def test_angles_of_image_tokens_match_transformers(family):
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=list(SECTIONS[family]), partial_rotary_factor=1.0)
    config = AutoConfig.for_model(f"{family}_text", hidden_size=32, num_attention_heads=2, rope_parameters=rope)
    config.head_dim = 16
    rotary_class = {
        "qwen2_5_vl": Qwen2_5_VLRotaryEmbedding,
        "qwen3_vl": Qwen3VLTextRotaryEmbedding,
        "qwen3_5": Qwen3_5TextRotaryEmbedding,
    }[family]
    positions = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))
    cos, _ = rotary_class(config)(torch.zeros(1), positions[:, None])
    with parallel.simulated_rank(layout_of(), 0):
        rotary = RotaryEmbedding(16, rotary_percent=1.0, use_cpu_initialization=True)
        rotary.__class__ = DocumentRotary
        rotary.axes = axes_of_channels(SECTIONS[family], is_interleaved=family != "qwen2_5_vl")
        rotary.positions = positions
        torch.testing.assert_close(rotary(50)[:, 0, 0].cos(), cos[0])
        rotary.positions = positions[0]
        text = rotary(50)
        rotary.positions = positions[:1].expand(3, -1)
        torch.testing.assert_close(rotary(50), text, rtol=0, atol=0)
