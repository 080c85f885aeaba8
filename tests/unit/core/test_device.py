"""Host memory for a GPU's copies, with a stand-in for CUDA's runtime: what is locked, and for how long."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from megarl.core import device

SIZES = (1, 1000, 5 * 2**20 + 3)
"""Numbers of elements: one, and two that are no power of two."""


class Cudart:
    """Locks pages."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        """Address -> bytes."""
        self.error = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert not self._pages(address, size) & {page for item in self.locked.items() for page in self._pages(*item)}
        if not self.error:
            self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        """Unlocks memory, which must still be there."""
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        assert any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)
        del self.locked[address]
        return 0

    def _pages(self, address: int, size: int) -> set[int]:
        return set(range(address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE + 1))


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    fake = Cudart()
    monkeypatch.setattr(device, "on_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_as_much_is_locked_as_is_asked_for(cudart: Cudart, dtype: torch.dtype) -> None:
    sources = [torch.arange(size).to(dtype).view(1, -1) for size in SIZES]
    hosts = [device.host_empty_like(source).copy_(source) for source in sources]
    assert cudart.locked == {host.data_ptr(): source.nbytes for host, source in zip(hosts, sources, strict=True)}
    for host, source in zip(hosts, sources, strict=True):
        assert torch.equal(host, source)


def test_it_is_locked_as_long_as_it_lives(cudart: Cudart) -> None:
    first, second = (device.host_empty_like(torch.zeros(1000)) for _ in range(2))
    part = first[10:].fill_(7)
    del first
    assert list(cudart.locked) == [second.data_ptr()]
    assert part.sum() == 7 * 990, "a view of it stays as it is"


def test_nothing_is_locked_of_nothing_or_without_a_gpu(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.host_empty_like(torch.zeros(0, 3)).shape == (0, 3)
    monkeypatch.setattr(device, "on_cuda", lambda: False)
    assert device.host_empty_like(torch.zeros(2, 3)).shape == (2, 3)
    assert not cudart.locked


def test_memory_that_cannot_be_locked_is_said_so(cudart: Cudart) -> None:
    cudart.error = 2
    with pytest.raises(RuntimeError, match=r"^CUDA does not lock 0.50 GiB of host memory: its error 2$"):
        device.host_empty_like(torch.empty(2**29, dtype=torch.uint8, device="meta"))
