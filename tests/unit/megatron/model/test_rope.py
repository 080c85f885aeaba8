"""Rotary angle tables for packs of varying length, compared with Megatron's table for each length."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from megarl.megatron import parallel
from megarl.megatron.model.rope import DocumentRotary, DocumentYarn
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
