"""Conversion of vision-language models to Megatron checkpoints, to other layouts, and back: bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.core.errors import UserError
from megarl.megatron.checkpoint.conversion import huggingface_to_megatron, megatron_to_huggingface, reshape
from megarl.models.folder import read_config
from megarl.models.vision import add_vision, vision_of
from megarl.models.weight_files import SINGLE
from tests import tiny_vision
from tests.marks import exhaustive_but
from tests.tiny_vision import Kind
from tests.unit.resharding.cases import layout_of
from tests.unit.resharding.test_vision import their_tensors

LAYOUTS = {
    "qwen2_5_vl": (layout_of(tp=2, pp=2), layout_of(pp=2, vpp=2)),
    "qwen3_vl": (layout_of(tp=2), layout_of(pp=2, first=3)),
    "qwen3_vl_moe": (layout_of(tp=2, dp=2, ep=2), layout_of(pp=2, ep=2, etp=1, tp=2)),
    "qwen3_5": (layout_of(pp=2), layout_of(tp=2)),
    "qwen3_5_moe": (layout_of(dp=2, ep=2), layout_of(pp=2, tp=2)),
}


@pytest.mark.parametrize("kind", exhaustive_but(LAYOUTS, "qwen2_5_vl", "qwen3_vl_moe"))
def test_vision_language_models_convert_bit_exactly(kind: Kind, tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "hf", kind)
    first, second = LAYOUTS[kind]
    huggingface_to_megatron(folder, tmp_path / "first", first)
    reshape(tmp_path / "first", tmp_path / "second", second)
    megatron_to_huggingface(tmp_path / "second", tmp_path / "back")
    written, expected = (their_tensors(path) for path in (tmp_path / "back", folder))
    assert written.keys() == expected.keys()
    assert not [name for name, tensor in written.items() if not torch.equal(tensor, expected[name])]
    shape = vision_of(add_vision(read_config(tmp_path / "back")))
    assert shape is not None and shape == vision_of(add_vision(read_config(folder)))
    theirs = json.loads((folder / "preprocessor_config.json").read_text())
    assert json.loads((tmp_path / "back" / "preprocessor_config.json").read_text()) == theirs


def test_text_model_without_its_tower_converts(tmp_path: Path) -> None:
    """A folder of Qwen3.5 with an incomplete tower has only its text model."""
    folder = tiny_vision.build(tmp_path / "hf", "qwen3_5")
    tensors = load_file(folder / SINGLE)
    del tensors["model.visual.merger.norm.bias"]
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    huggingface_to_megatron(folder, tmp_path / "out", layout_of())
    megatron_to_huggingface(tmp_path / "out", tmp_path / "back")
    text = {name: tensor for name, tensor in tensors.items() if ".visual." not in name}
    written = load_file(tmp_path / "back" / SINGLE)
    assert written.keys() == {name.replace("model.language_model.", "model.") for name in text}
    assert read_config(tmp_path / "back")["architectures"] == ["Qwen3_5ForCausalLM"]
    other = tiny_vision.build(tmp_path / "other", "qwen3_vl")
    with pytest.raises(UserError, match="has no vision tower, but vLLM requires one to run models of type qwen3_vl"):
        megatron_to_huggingface(tmp_path / "out", tmp_path / "refused", huggingface=other)


def test_incomplete_tower_that_engines_need_is_refused(tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "hf", "qwen3_vl")
    tensors = load_file(folder / SINGLE)
    del tensors["model.visual.merger.norm.bias"]
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    with pytest.raises(UserError, match=r"has no tensor model\.visual\.merger\.norm\.bias\. Fix: use a complete"):
        huggingface_to_megatron(folder, tmp_path / "out", layout_of())
