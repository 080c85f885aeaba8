"""Dispatchers of a mixture of experts: the default, and the cases in which DeepEP's is rejected."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.load import load
from megarl.core import device
from megarl.megatron.model import build
from tests.paths import BASE
from tests.tiny_model import write_tiny_experts

Fields = Callable[..., TransformerConfig]
FLEX = "actor.megatron_overrides.model={moe_token_dispatcher_type: flex}"


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    folder = write_tiny_experts(tmp_path_factory.mktemp("models") / "experts")
    hf_config = json.loads((folder / "config.json").read_text())
    common = [
        f"model.path={folder}",
        "data.source=arithmetic",
        "rollout.context_length=64",
        "rollout.max_new_tokens=16",
    ]

    def build_fields(*keys: str) -> TransformerConfig:
        settings = load(BASE, [*common, "actor.layout={ep: 2, dp: 2}", *keys]).actor
        return build.transformer_config(settings, hf_config, torch.float32)

    return build_fields


@pytest.fixture
def machine_with_deepep(fields: Fields, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that GPUs and DeepEP are available; nothing runs on them."""
    real = importlib.util.find_spec
    monkeypatch.setattr(device, "on_cuda", lambda: True)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace() if name == "deep_ep" else real(name)
    )


def test_default_is_all_to_all(fields: Fields) -> None:
    assert fields().moe_token_dispatcher_type == "alltoall"


def test_flex_is_passed_to_megatron(fields: Fields, machine_with_deepep: None) -> None:
    config = fields(FLEX)
    assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == ("flex", "deepep")
    with pytest.raises(ValueError, match="dispatcher_type=flex: each rank in the layout has all experts"):
        fields(FLEX, "actor.layout.ep=1")


def test_flex_is_rejected_without_deepep(
    fields: Fields, machine_with_deepep: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deep_ep" else real(name))
    with pytest.raises(ValueError, match="dispatcher_type=flex: requires the package deep_ep, which is not installed"):
        fields(FLEX)


def test_flex_is_rejected_without_gpus(fields: Fields) -> None:
    key = "actor.megatron_overrides.model.moe_token_dispatcher_type=flex"
    with pytest.raises(ValueError, match=f"^{key}: requires a GPU, but this trainer has none. Fix: remove the key"):
        fields(FLEX)


def test_allgather_is_rejected_by_megatron(fields: Fields) -> None:
    with pytest.raises(ValueError, match="does not support variable sequence length"):
        fields(FLEX.replace("flex", "allgather"))
