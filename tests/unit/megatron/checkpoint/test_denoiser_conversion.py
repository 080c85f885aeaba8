"""Conversion from a diffusers folder to a Megatron checkpoint, to another layout and back is bit-exact."""

from __future__ import annotations

import json

import pytest
import torch

from megarl.megatron.checkpoint.conversion import huggingface_to_megatron, megatron_to_huggingface, reshape
from tests.tiny_denoiser import MODELS
from tests.unit.resharding.cases import layout_of

GRID = {
    "1 process, TP2 and PP2": (layout_of(), layout_of(tp=2, pp=2)),
    "PP2, VPP2 and uneven PP3": (layout_of(pp=2, vpp=2), layout_of(pp=3, first=1, last=2)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", GRID)
def test_round_trip_is_bit_exact(tmp_path, name, case):
    first, second = GRID[case]
    source = MODELS[name].write(tmp_path / "diffusers", torch.bfloat16)
    huggingface_to_megatron(source, tmp_path / "first", first)
    reshape(tmp_path / "first", tmp_path / "second", second)
    megatron_to_huggingface(tmp_path / "second", tmp_path / "back", shard_bytes=100_000)
    written = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors*"))
    assert "diffusion_pytorch_model.safetensors.index.json" in written and len(written) > 2
    before, after = (
        MODELS[name].model_class.from_pretrained(folder, torch_dtype=torch.bfloat16).state_dict()
        for folder in (source, tmp_path / "back")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back")]
    assert configs[0] == configs[1]
