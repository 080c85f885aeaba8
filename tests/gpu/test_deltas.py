"""Deltas of states that are on a GPU, and their checksums, are those of the CPU, bit by bit."""

from __future__ import annotations

import pytest
import torch

from megarl.core import device
from megarl.resharding.transports import delta
from megarl.resharding.transports.checksum import word_sum
from tests.gpu.gpus import needs_gpus

pytestmark = needs_gpus(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_delta_and_its_checksum_are_those_of_the_cpu(dtype):
    """The last state lies in host memory that the GPU reads."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(3 * 2**18 + 1, generator=generator).to(dtype)
    new = torch.where(torch.rand(old.shape, generator=generator) < 0.1, torch.nan, old)
    new[:1000] *= -1
    last = device.host_empty_like(new).copy_(old)
    expected, num_changed = delta.encode(new, old)
    there = new.to(device.device())
    encoded, found = delta.encode(there, last.to(there.device, non_blocking=True))
    assert found == num_changed and torch.equal(encoded.cpu(), expected)
    target = old.to(there.device, copy=True)
    delta.apply(encoded, found, target)
    assert torch.equal(target.cpu().view(torch.uint8), new.view(torch.uint8))
    assert word_sum(target) == word_sum(new) != word_sum(old)
