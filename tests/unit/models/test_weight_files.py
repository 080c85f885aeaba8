"""Damaged weights, such as those from an incomplete download, are named before a run starts."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megarl.core.errors import UserError
from megarl.models.folder import read_config
from megarl.models.weight_files import INDEX, SINGLE, Header, read_headers, require_tensors
from megarl.resharding.families import huggingface_holder
from megarl.resharding.piece import whole
from megarl.resharding.transports.safetensors import SafetensorsFolder
from tests.tiny_model import write_tiny_llama

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 538090408\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)


def without_lm_head(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / SINGLE)


def convert(folder: Path, dtype: torch.dtype) -> None:
    save_file({name: tensor.to(dtype) for name, tensor in load_file(folder / SINGLE).items()}, folder / SINGLE)


def index(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / INDEX).write_text(text) and None


def shard(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "model-00001-of-00002.safetensors")


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda folder: (folder / SINGLE).write_text(POINTER),
        "is a Git LFS pointer, not the file itself. Fix:",
    ),
    (lambda folder: os.truncate(folder / SINGLE, 5000), "is not a complete safetensors file"),
    (lambda folder: os.truncate(folder / SINGLE, 3), "is not a complete safetensors file"),
    (lambda folder: os.truncate(folder / SINGLE, 0), "is not a complete safetensors file"),
    (lambda folder: (folder / SINGLE).rename(folder / "pytorch_model.bin"), "Fix: save the weights as safetensors"),
    (lambda folder: convert(folder, torch.float8_e4m3fn), "has the unsupported dtype F8_E4M3. Supported dtypes: F64,"),
    (lambda folder: convert(folder, torch.int8), "has the unsupported dtype I8. Supported dtypes: F64,"),
    (shard, f"contains neither {SINGLE} nor {INDEX}. Fix: download the index"),
    (without_lm_head, "the checkpoint has no tensor lm_head.weight. Fix: use a complete checkpoint"),
    (index('{"weight_map": {"lm_head.weight": "a.safetensors"}}'), "lists a.safetensors, but the file does not exist"),
    (index("half of an ind"), "is not an index of safetensors files. Fix: download it again"),
    (index("[" * 100_000), "is not an index of safetensors files. Fix: download it again"),
    (index("{}"), "is not an index of safetensors files. Fix: download it again"),
    (index('{"weight_map": {"lm_head.weight": "../../other/a.safetensors"}}'), "is not an index of safetensors files"),
    (index(json.dumps({"weight_map": {"absent": SINGLE}})), "the checkpoint has no tensor absent"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=lambda value: value if isinstance(value, str) else "")
def test_damaged_weights_are_named(model: Path, tmp_path: Path, damage, message: str) -> None:
    folder = shutil.copytree(model, tmp_path / "copy")
    damage(folder)
    with pytest.raises(UserError, match=f"^{re.escape(str(folder))}.*{re.escape(message)}"):
        require_tensors(folder, read_headers(folder), huggingface_holder(read_config(folder)).shapes)


def test_headers_match_the_safetensors_library(model: Path) -> None:
    headers = read_headers(model)
    require_tensors(model, headers, huggingface_holder(read_config(model)).shapes)
    with safe_open(model / SINGLE, framework="pt") as file:
        assert headers.keys() == set(file.keys())
        assert all(headers[name].shape == tuple(file.get_tensor(name).shape) for name in headers)


def test_bfloat16_needs_no_torch(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / SINGLE)
    assert read_headers(tmp_path) == {"w": Header("BF16", (2, 3))}


def test_stacked_experts_and_prefixes_of_multimodal_checkpoints_are_read(tmp_path: Path) -> None:
    """Each expert is read as if it were stored separately, under the text model's names."""
    gate_up, down = torch.randn(3, 8, 5), torch.randn(3, 5, 4)
    experts = "model.language_model.layers.1.mlp.experts"
    stored = {f"{experts}.gate_up_proj": gate_up, f"{experts}.down_proj": down}
    stored |= {"model.language_model.norm.weight": torch.randn(5), "mtp.fc.weight": torch.randn(2)}
    save_file(stored, tmp_path / SINGLE)
    headers = read_headers(tmp_path)
    with SafetensorsFolder(tmp_path) as folder:
        read = {name: folder.read("", name, whole(header.shape)) for name, header in headers.items()}
        part = folder.read("", "model.layers.1.mlp.experts.2.up_proj.weight", ((1, 3), (2, 4)))
    expected = {
        "model.norm.weight": stored["model.language_model.norm.weight"],
        "mtp.fc.weight": stored["mtp.fc.weight"],
    }
    for i in range(3):
        rows = {"gate_proj": gate_up[i, :4], "up_proj": gate_up[i, 4:], "down_proj": down[i]}
        expected |= {f"model.layers.1.mlp.experts.{i}.{name}.weight": value for name, value in rows.items()}
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)
    assert torch.equal(part, gate_up[2, 5:7, 2:4])


@pytest.mark.parametrize("shape", [(), (4,), (4, 6), (2**40, 2, 0), (2, 3, 4)])
def test_tensor_that_does_not_stack_experts_is_an_error(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """A damaged header without elements may claim more experts than could be listed."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    content = b"" if 0 in shape else bytes(4 * math.prod(shape))
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, len(content)]}}).encode()
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + content)
    with pytest.raises(UserError, match=rf"{name} has shape .*, which does not stack experts. Fix: download"):
        read_headers(tmp_path)
