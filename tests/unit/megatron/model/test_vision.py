"""The vision tower against transformers' own: equal numbers, and no value that the host reads from the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForImageTextToText

from megarl.megatron.model.vision import build_tower, derived_arguments
from megarl.models.folder import read_config
from megarl.models.multimodal import VISION
from megarl.models.vision import add_vision, vision_of
from tests import tiny_vision
from tests.closeness import assert_close, assert_matches, float64

KINDS = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
GRIDS = torch.tensor([[1, 8, 8], [1, 2, 6], [1, 10, 14]])
"""Grids that Qwen2.5-VL's windows of 4 × 4 patches divide evenly, do not fill, and divide with a remainder."""

CPU, META = torch.device("cpu"), torch.device("meta")


def towers(folder: Path, kind: tiny_vision.Kind, recompute: str | None = None) -> tuple[Any, Any]:
    """Return the tower of transformers and ours, with equal random weights."""
    tiny_vision.build(folder, kind)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").model.visual
    hf_config = add_vision(read_config(folder))
    shape = vision_of(hf_config)
    assert shape is not None
    options: dict[str, Any] = {} if recompute is None else dict(recompute_method="uniform", recompute_num_layers=1)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=2, recompute_granularity=recompute, **options
    )
    ours = build_tower(shape, hf_config[VISION], config)
    ours.load_state_dict(theirs.state_dict())
    return theirs.train(), ours.train()


def patches(tower: torch.nn.Module, device: torch.device = CPU) -> torch.Tensor:
    weight = tower.get_parameter("patch_embed.proj.weight")
    generator = torch.Generator().manual_seed(0)
    return torch.randn(int(GRIDS.prod(1).sum()), weight[0].numel(), generator=generator).to(device)


def features(output: Any) -> torch.Tensor:
    """Return all features of a tower: merged patches, and those of inner layers."""
    return torch.stack([output.pooler_output, *(getattr(output, "deepstack_features", None) or [])])


def run(tower: Any, pixels: torch.Tensor, grids: torch.Tensor, **derived: torch.Tensor) -> torch.Tensor:
    """Return the features after a forward and a backward pass."""
    result = features(tower(pixels, grid_thw=grids, **derived))
    weights = torch.linspace(-1, 1, result.numel()).view(result.shape).to(result.device)
    (result * weights).sum().backward()
    return result.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_tower_matches_transformers(kind: tiny_vision.Kind, tmp_path: Path) -> None:
    """In float64, so that the order of summation does not matter."""
    with float64():
        theirs, ours = (tower.double() for tower in towers(tmp_path, kind))
        pixels = patches(ours).double()
        expected, actual = run(theirs, pixels, GRIDS), run(ours, pixels, GRIDS, **derived_arguments(ours, GRIDS, CPU))
    exact, found = (results(*pair) for pair in ((theirs, expected), (ours, actual)))
    assert found.keys() == exact.keys()
    assert_close(found, exact, exact, "gradient", torch.float64)


def results(tower: torch.nn.Module, values: torch.Tensor) -> dict[str, Any]:
    """Return the features and the gradients."""
    return {"features": values} | {name: parameter.grad for name, parameter in tower.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_changes_nothing(kind: tiny_vision.Kind, tmp_path: Path) -> None:
    _, plain = towers(tmp_path / "plain", kind)
    _, recomputing = towers(tmp_path / "recomputing", kind, "full")
    exact, found = (
        results(tower, run(tower, patches(tower), GRIDS, **derived_arguments(tower, GRIDS, CPU)))
        for tower in (plain, recomputing)
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in exact.items())


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_host_reads_no_value_from_the_device(kind: tiny_vision.Kind, recompute: str | None, tmp_path: Path) -> None:
    """Tensors on the meta device have no values, so reading one raises an error."""
    theirs, ours = (tower.to(META) for tower in towers(tmp_path, kind, recompute))
    pixels = patches(ours, META)
    derived = derived_arguments(ours, GRIDS, META)
    assert run(ours, pixels, GRIDS, **derived).device == META
    assert all(parameter.grad is not None for parameter in ours.parameters())
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        run(theirs, pixels, GRIDS.to(META))
    for name in ("cu_seqlens", "cu_window_seqlens"):
        if name in derived:
            with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
                run(ours, pixels, GRIDS, **derived | {name: derived[name].to(META)})


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_patch_projection_equals_the_convolution(kind: tiny_vision.Kind, dtype: torch.dtype, tmp_path: Path) -> None:
    """The convolution of Qwen2.5-VL has no bias."""
    theirs, ours = (tower.patch_embed.to(dtype) for tower in towers(tmp_path, kind))
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    pixels = torch.randn(50, ours.proj.weight[0].numel(), generator=torch.Generator().manual_seed(0)).to(dtype)

    def convolved() -> dict[str, torch.Tensor]:
        dtype = torch.get_default_dtype()
        return {"patches": theirs.to(dtype)(pixels.to(dtype))}

    assert_matches({"patches": ours(pixels)}, convolved, kind)


def test_windows_of_equal_size_are_one_batch(tmp_path: Path) -> None:
    """The first image has four windows of 4 × 4 patches. The second has two windows, of 2 × 4 and 2 × 2. The third has
    six of 4 × 4, two of 2 × 4, three of 4 × 2 and one of 2 × 2, of which five have 8 patches."""
    _, ours = towers(tmp_path, "qwen2_5_vl")
    derived = derived_arguments(ours, GRIDS, CPU)
    sizes = [4 * [16], [8, 4], 6 * [16] + 5 * [8] + [4]]
    assert derived["cu_window_seqlens"].diff().tolist() == [size for image in sizes for size in image]
    with Calls() as calls:
        run(ours, patches(ours), GRIDS, **derived)
    windows, images = [(4, 16), (1, 8), (1, 4), (6, 16), (5, 8), (1, 4)], [(1, 64), (1, 12), (1, 140)]
    assert calls.batches == [*windows, *images, *windows]


def test_windows_of_several_frames_are_refused(tmp_path: Path) -> None:
    _, ours = towers(tmp_path, "qwen2_5_vl")
    with pytest.raises(AssertionError, match="windows of different frames"):
        derived_arguments(ours, torch.tensor([[2, 8, 8]]), CPU)


class Calls(TorchFunctionMode):
    """Records the number and the length of the sequences in each call of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[int, int]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.batches.append((args[0].shape[0], args[0].shape[2]))
        return function(*args, **(kwargs or {}))
