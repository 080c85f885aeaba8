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
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

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
        "a Git LFS pointer, not the file itself. Fix:",
    ),
    (lambda folder: os.truncate(folder / SINGLE, 5000), "not a complete safetensors file"),
    (lambda folder: os.truncate(folder / SINGLE, 3), "not a complete safetensors file"),
    (lambda folder: os.truncate(folder / SINGLE, 0), "not a complete safetensors file"),
    (lambda folder: (folder / SINGLE).rename(folder / "pytorch_model.bin"), "Fix: save the weights as safetensors"),
    (lambda folder: convert(folder, torch.float8_e4m3fn), "has the unsupported dtype F8_E4M3. Supported dtypes: F64,"),
    (lambda folder: convert(folder, torch.int8), "has the unsupported dtype I8. Supported dtypes: F64,"),
    (shard, f"contains neither {SINGLE} nor {INDEX}. Fix: download the index"),
    (without_lm_head, "the checkpoint has no tensor lm_head.weight. Fix: use a complete checkpoint"),
    (index('{"weight_map": {"lm_head.weight": "a.safetensors"}}'), "lists a.safetensors, but the file does not exist"),
    (index("half of an ind"), "not an index of safetensors files. Fix: download it again"),
    (index("[" * 100_000), "not an index of safetensors files. Fix: download it again"),
    (index("{}"), "not an index of safetensors files. Fix: download it again"),
    (index('{"weight_map": {"lm_head.weight": "../../other/a.safetensors"}}'), "not an index of safetensors files"),
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
    with pytest.raises(UserError, match=rf"{name} has shape .*, which is not a shape of stacked experts. Fix:"):
        read_headers(tmp_path)


OSS_EXPERTS = "model.layers.1.mlp.experts"


def mxfp4_experts(rows: int = 6, blocks: int = 3) -> dict[str, torch.Tensor]:
    """Return gpt-oss's stacked tensors with all byte values and scales of ordinary weights."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    tensors: dict[str, torch.Tensor] = {}
    for name in ("gate_up_proj", "down_proj"):
        tensors[f"{OSS_EXPERTS}.{name}_blocks"] = random(2, rows, blocks, 16)
        tensors[f"{OSS_EXPERTS}.{name}_scales"] = random(2, rows, blocks, low=1, high=250)
        tensors[f"{OSS_EXPERTS}.{name}_bias"] = torch.randn(2, rows).bfloat16()
    return tensors


def test_mxfp4_equals_transformers_bit_for_bit(tmp_path: Path) -> None:
    tensors = mxfp4_experts()
    tensors[f"{OSS_EXPERTS}.down_proj_blocks"][:, 0, 0] = torch.arange(16) * 17  # every value of an element
    tensors[f"{OSS_EXPERTS}.down_proj_scales"][:, 0] = torch.tensor([0, 254, 255])
    is_scale = [name for name in tensors if name.endswith("_scales")]
    save_file({name: tensors[name] for name in is_scale}, tmp_path / "a.safetensors")
    save_file({name: t for name, t in tensors.items() if name not in is_scale}, tmp_path / "b.safetensors")
    weight_map = {name: "a.safetensors" if name in is_scale else "b.safetensors" for name in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    headers = read_headers(tmp_path)
    with SafetensorsFolder(tmp_path) as folder:
        for name in ("gate_up_proj", "down_proj"):
            parts = (tensors[f"{OSS_EXPERTS}.{name}_{kind}"] for kind in ("blocks", "scales"))
            whole_stack = convert_moe_packed_tensors(*parts).transpose(1, 2)  # [experts, rows, columns]
            for expert, expected in enumerate(whole_stack):
                ours = f"{OSS_EXPERTS}.{expert}.{name}.weight"
                assert headers[ours] == Header("BF16", (6, 96)) and folder.dtype("", ours) == torch.bfloat16
                assert same_bits(folder.read("", ours, ((0, 6), (0, 96))), expected)
                assert same_bits(folder.read("", ours, ((1, 3), (31, 65))), expected[1:3, 31:65])
            bias = f"{OSS_EXPERTS}.1.{name}.bias"
            assert torch.equal(folder.read("", bias, ((2, 5),)), tensors[f"{OSS_EXPERTS}.{name}_bias"][1, 2:5])


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.contiguous().view(torch.int16), theirs.contiguous().view(torch.int16))


def test_transposed_stacks_of_experts_are_read(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate_up_proj": (2, 5, 8), "gate_up_proj_bias": (2, 8), "down_proj": (2, 4, 5), "down_proj_bias": (2, 5)}
    stored = {f"{OSS_EXPERTS}.{n}": torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    save_file(stored, tmp_path / SINGLE)
    headers = read_headers(tmp_path)
    with SafetensorsFolder(tmp_path) as folder:
        read = {name: folder.read("", name, whole(header.shape)) for name, header in headers.items()}
        part = folder.read("", f"{OSS_EXPERTS}.1.gate_up_proj.weight", ((2, 7), (1, 3)))
    for i in range(2):
        for name in ("gate_up_proj", "down_proj"):
            assert torch.equal(read.pop(f"{OSS_EXPERTS}.{i}.{name}.weight"), stored[f"{OSS_EXPERTS}.{name}"][i].T)
            assert torch.equal(read.pop(f"{OSS_EXPERTS}.{i}.{name}.bias"), stored[f"{OSS_EXPERTS}.{name}_bias"][i])
    assert not read
    assert torch.equal(part, stored[f"{OSS_EXPERTS}.gate_up_proj"][1, 1:3, 2:7].T)


MXFP4_DAMAGES = {
    "missing scales": (
        lambda tensors: tensors.pop(f"{OSS_EXPERTS}.down_proj_scales"),
        "has no tensor .*down_proj_scal",
    ),
    "other scales": (
        lambda tensors: tensors.update({f"{OSS_EXPERTS}.down_proj_scales": torch.ones(2, 6, 3)}),
        "down_proj_scales do not have the dtype and shapes of MXFP4 blocks and scales. Fix: download it again",
    ),
    "other blocks": (
        lambda tensors: tensors.update({f"{OSS_EXPERTS}.down_proj_blocks": torch.ones(2, 6, 3, 16)}),
        "down_proj_scales do not have the dtype and shapes of MXFP4",
    ),
    "flat blocks": (
        lambda tensors: tensors.update({f"{OSS_EXPERTS}.down_proj_blocks": torch.ones(2, 6)}),
        "down_proj_blocks has shape .*, which is not a shape of stacked experts",
    ),
}


@pytest.mark.parametrize("damage", MXFP4_DAMAGES)
def test_damaged_mxfp4_tensors_are_named(tmp_path: Path, damage: str) -> None:
    change, message = MXFP4_DAMAGES[damage]
    change(tensors := mxfp4_experts())
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(UserError, match=message):
        read_headers(tmp_path)
