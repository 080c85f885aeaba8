"""Checksums of bytes, computed where the elements are, say whether these are the same."""

from __future__ import annotations

import pytest
import torch

from megarl.resharding.transports import checksum
from megarl.resharding.transports.checksum import word_sum

FACTORS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x2545F4914F6CDD1D
"""Factors of a word's place, of its weight and of a chunk, in 64 bits without a sign."""


def by_hand(elements: bytes, chunk_words: int) -> int:
    """Returns the sum in integers of any size, of words that are read one by one."""
    value, size = 0, 4 * chunk_words
    for start in range(0, len(elements), size):
        value *= FACTORS[2]
        for i in range(start, min(start + size, len(elements)), 4):
            word = int.from_bytes(elements[i : i + 4].ljust(4, b"\0"), "little", signed=True)
            value += word * weight((i - start) // 4)
        value = signed(value)
    return value % 2**63


def weight(place: int) -> int:
    mixed = signed((place + 1) * -(2**64 - FACTORS[0]))
    mixed = signed((mixed ^ (mixed >> 29)) * -(2**64 - FACTORS[1]))
    return (mixed ^ (mixed >> 32)) | 1


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(checksum, "CHUNK", 8)
    checksum._weights.cache_clear()
    yield
    checksum._weights.cache_clear()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("num_bytes", [1, 3, 4, 31, 32, 33, 100])
def test_it_is_the_weighted_sum_of_words(num_bytes):
    elements = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))
    assert word_sum(elements) == by_hand(bytes(elements.tolist()), 8)


@pytest.mark.usefixtures("small_chunks")
def test_it_depends_on_nothing_but_the_bytes_in_order():
    rows = torch.randn(7, 10, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    column, odd = rows[:, 3:6], rows.view(-1)[1:22]
    for view in (column, odd):
        assert word_sum(view) == word_sum(view.clone(memory_format=torch.contiguous_format))
    assert word_sum(odd) == word_sum(odd.clone().view(torch.uint8)) != word_sum(odd.flip(0))


def test_no_change_of_a_few_bits_is_missed():
    """Neither one bit, nor the signs of two elements, nor two words that change places."""
    old = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    expected, bits = word_sum(old), old.view(torch.int16)
    for i in range(64):
        for bit in range(16):
            new = bits.clone()
            new[i] ^= 1 << bit if bit < 15 else -(2**15)
            assert word_sum(new) != expected
    words = old.view(torch.int32)
    for i in range(32):
        for j in range(i):
            negated, swapped = words.clone(), words.clone()
            negated[[i, j]] ^= -(2**31)
            swapped[[i, j]] = words[[j, i]]
            assert expected not in (word_sum(negated), word_sum(swapped))
