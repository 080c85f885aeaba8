"""Metrics of microbatches are read with one transfer and keep their values."""

from __future__ import annotations

import torch

from megarl.core.metrics import Metric
from megarl.megatron.metric_sums import read


def test_values_and_weights_are_read_exactly(monkeypatch):
    transfers = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: transfers.append(1) or tolist(tensor))
    third = torch.tensor(1.0) / 3
    sums = {
        "a": (third, None, "sum"),
        "b": (third.double(), torch.tensor(2**40 + 1), "mean"),
        "c": (torch.tensor(True), torch.tensor(0.1), "max"),
    }
    assert read(sums) == {
        "a": Metric(third.item(), 1.0, "sum"),
        "b": Metric(third.double().item(), 2.0**40 + 1, "mean"),
        "c": Metric(1.0, torch.tensor(0.1).item(), "max"),
    }
    assert transfers == [1]
    assert read({}) == {}
