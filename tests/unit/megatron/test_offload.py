"""Offloading reuses the same host memory if it is pinned for a GPU."""

from __future__ import annotations

import pytest
import torch

from megarl.core import device
from megarl.megatron.offload import Offload


@pytest.mark.parametrize("on_cuda", [False, True])
def test_pinned_host_memory_is_allocated_once(monkeypatch: pytest.MonkeyPatch, on_cuda: bool) -> None:
    allocated: list[int] = []

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        allocated.append(tensor.nbytes)
        return torch.empty_like(tensor)

    monkeypatch.setattr(device, "on_cuda", lambda: on_cuda)
    monkeypatch.setattr(device, "host_empty_like", allocate)
    monkeypatch.setattr(device, "synchronize", lambda: None)
    monkeypatch.setattr(device, "release_cache", lambda: None)
    model = torch.nn.Linear(5, 3)
    offload = Offload([model])
    for _ in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        assert offload.move_out("parameters") == 4 * (15 + 3)
        offload.move_in("parameters")
        assert all(map(torch.equal, model.parameters(), before))
        with torch.no_grad():
            model.weight.add_(1)
    assert allocated == [60, 12] * (1 if on_cuda else 3)
    grown = torch.ones(7, 5)
    model.weight.data = grown
    offload.move_out("parameters")
    offload.move_in("parameters")
    assert torch.equal(model.weight, torch.ones(7, 5))
