"""The vision towers of multimodal models in checkpoints, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from megarl.models.folder import read_config
from megarl.models.vision import add_vision, vision_of
from megarl.models.weight_files import SINGLE
from megarl.resharding.families import huggingface_holder
from megarl.resharding.folder import write_folder
from megarl.resharding.piece import whole
from megarl.resharding.planning.check import check_plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.safetensors import SafetensorsFolder
from tests import tiny_vision
from tests.tiny_vision import Kind, canonical

KINDS: tuple[Kind, ...] = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
Tensors = dict[str, torch.Tensor]


def their_tensors(folder: Path) -> Tensors:
    """Return the tensors of transformers' model."""
    return dict(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).named_parameters())


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tuple(tensor.shape) for file in files for name, tensor in load_file(file).items()}


def rewrite(folder: Path, kind: Kind) -> None:
    """Rewrite Qwen2.5-VL as its published folders, which have older names and a flat config. Rewrite the experts of
    Qwen3-VL as transformers writes them ([experts, rows, columns])."""
    tensors = load_file(folder / SINGLE)
    if kind == "qwen2_5_vl":
        names = {name: name.replace("model.language_model.", "model.") for name in tensors}
        tensors = {names[name].replace("model.visual.", "visual."): tensor for name, tensor in tensors.items()}
        config = json.loads((folder / "config.json").read_text())
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        legacy = {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        }
        (folder / "config.json").write_text(json.dumps(text | legacy | config))
    if kind == "qwen3_vl_moe":
        stacked = {
            name: t.mT.contiguous() for name, t in tensors.items() if name.rpartition(".")[0].endswith("experts")
        }
        assert len(stacked) == 8
        tensors |= stacked
    save_file(tensors, folder / SINGLE, {"format": "pt"})


def read_all(folder: Path) -> Tensors:
    with SafetensorsFolder(folder) as files:
        holder = files.with_file_dtypes(huggingface_holder(add_vision(read_config(folder))))
        assert files.unexpected(holder) == []
        return {name: files.read("", name, whole(shape)).clone() for name, shape in holder.shapes.items()}


def assert_equal(tensors: Tensors, expected: Tensors) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_published_and_other_folders_are_read(kind: Kind, tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path, kind)
    expected = canonical(their_tensors(folder))
    assert_equal(read_all(folder), expected)
    rewrite(folder, kind)
    assert_equal(canonical(their_tensors(folder)), expected)
    assert_equal(read_all(folder), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_exported_folder_is_loaded_by_transformers(kind: Kind, tmp_path: Path) -> None:
    """vLLM requires the published names and shapes. The folder also has the nested config and the processor's files."""
    folder = tiny_vision.build(tmp_path / "in", kind)
    expected, published = their_tensors(folder), stored_shapes(folder)
    rewrite(folder, kind)
    hf_config = add_vision(read_config(folder))
    source, destination = huggingface_holder(hf_config, "float32"), huggingface_holder(hf_config, "float32")
    plan = make_plan([source], [destination])
    check_plan(plan, [source], [destination])
    with SafetensorsFolder(folder) as files:
        write_folder(plan, files, hf_config, folder, tmp_path / "out", shard_bytes=200_000)
    assert_equal(their_tensors(tmp_path / "out"), expected)
    # Published folders of Qwen2.5-VL use older tensor names; exported ones use transformers' current names.
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert stored_shapes(tmp_path / "out") == (shapes if kind == "qwen2_5_vl" else published)
    assert vision_of(add_vision(read_config(tmp_path / "out"))) == vision_of(hf_config)
    for name in ("preprocessor_config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
