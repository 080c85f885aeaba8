"""Selected kernels, depending on the installed packages."""

from __future__ import annotations

import pytest

from megarl.core import device
from megarl.megatron.model import kernels

pytestmark = pytest.mark.newest


def test_kernels_are_torch_without_transformer_engine():
    assert kernels.describe() == "torch layers, torch's fused AdamW, weight gradients accumulated in the matrix product"


@pytest.mark.parametrize(
    ("transformer_engine", "apex", "fuses"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_weight_gradients_are_fused_if_a_kernel_exists(monkeypatch, transformer_engine, apex, fuses):
    monkeypatch.setattr(device, "on_cuda", lambda: True)
    monkeypatch.setattr(kernels, "uses_transformer_engine", lambda: transformer_engine)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: apex or None)
    assert kernels.fuses_weight_gradients() == fuses


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
