"""A delta of two states makes the one of the other, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.resharding.transports import delta

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
NEGATIVE_ZERO, NAN, OTHER_NAN, INFINITY = -(2**15), 0x7FC0, 0x7FC5, 0x7F80
"""The bits of some numbers in bfloat16."""


def changed_into(old: torch.Tensor, new: torch.Tensor, target: torch.Tensor) -> int:
    """Applies the delta to the old state in the target's memory; returns how many elements it has."""
    encoded, num_changed = delta.encode(new.flatten(), old.flatten())
    assert len(encoded) == delta.encoded_bytes(num_changed, new)
    target.copy_(old)
    delta.apply(encoded, num_changed, target)
    return num_changed


@given(
    st.sampled_from(list(BITS)),
    st.lists(st.tuples(st.integers(-(2**15), 2**15 - 1), st.integers(-(2**15), 2**15 - 1)), min_size=1, max_size=40),
    st.integers(1, 4),
)
def test_any_bits_become_any_others(dtype, pairs, width):
    bits = BITS[dtype]
    rows = -(-len(pairs) // width)
    padded = (pairs * width)[: rows * width]
    old, new = (torch.tensor(side, dtype=bits).view(dtype).view(rows, width) for side in zip(*padded, strict=True))
    target = torch.zeros(rows, 2 * width, dtype=dtype)[:, width:]  # as a parameter's columns lie
    num_changed = changed_into(old, new, target)
    assert torch.equal(target.contiguous().view(bits), new.view(bits))
    assert num_changed == sum(a != b for a, b in padded)


@pytest.mark.parametrize("num_elements", [1, delta.BLOCK - 1, delta.BLOCK, 2 * delta.BLOCK + 3])
def test_blocks_of_any_number(num_elements):
    old = torch.arange(num_elements).to(torch.int16).view(torch.bfloat16)
    new = old.clone()
    new[[0, num_elements // 2, -1]] = 77.0
    target = torch.empty_like(old)
    assert changed_into(old, new, target) == len({0, num_elements // 2, num_elements - 1})
    assert torch.equal(target.view(torch.int16), new.view(torch.int16))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (0, NEGATIVE_ZERO, 1),
        (NAN, NAN, 0),
        (NAN, OTHER_NAN, 1),
        (INFINITY, NAN, 1),
    ],
    ids=["sign-of-zero", "same-NaN", "other-NaN", "infinity"],
)
def test_what_floats_hide_is_seen(old, new, expected):
    old, new = (torch.full((5,), bits, dtype=torch.int16).view(torch.bfloat16) for bits in (old, new))
    target = torch.empty_like(old)
    assert changed_into(old, new, target) == 5 * expected
    assert torch.equal(target.view(torch.int16), new.view(torch.int16))
