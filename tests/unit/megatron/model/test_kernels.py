"""Selected kernels, depending on the installed packages."""

from __future__ import annotations

import pytest

from megarl.megatron.model import kernels


def test_kernels_are_torch_without_transformer_engine():
    assert kernels.describe() == "torch layers, torch's fused AdamW"


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("transformer_engine", "Transformer Engine's FusedAdam"),
        ("apex", "Apex's FusedAdam"),
        ("torch", "torch's fused"),
    ],
)
def test_adam_is_named_by_its_package(monkeypatch, package, name):
    fused_adam = type("FusedAdam", (), {"__module__": f"{package}.optimizers"})
    monkeypatch.setattr(kernels.megatron_optimizer, "Adam", fused_adam)
    assert kernels.adam().startswith(name)
