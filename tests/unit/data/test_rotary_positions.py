"""Rotary positions of prompts with images, compared with transformers' get_rope_index."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megarl.core.prompt_images import PromptImage
from megarl.data.rotary_positions import feature_grid, rotary_positions

MERGE = 2
PROMPTS = {
    "one image": (["text", (4, 6), "text"], 9),
    "an image first": ([(2, 2), "text"], 3),
    "two images": (["text", (2, 8), "text", (6, 2), "text"], 5),
    "an image at the end": (["text", (8, 4)], 0),
    "an image before one response token": (["text", (4, 4)], 1),
    "no image": (["text"], 4),
}
"""The parts of a prompt, with the height and width of images in patches, and the number of response tokens."""


def prompt_of(parts: list, num_response: int) -> tuple[int, list[PromptImage], torch.Tensor]:
    """Return the number of tokens, the images and transformers' token types."""
    types: list[int] = []
    images = []
    for i, part in enumerate(parts):
        if part == "text":
            types += [0] * (3 + i)
            continue
        height, width = part
        count = height * width // MERGE**2
        images.append(PromptImage(len(types), count, (1, height, width), f"image {i}"))
        types += [1] * count
    types += [0] * num_response
    return len(types), images, torch.tensor([types])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("case", PROMPTS)
def test_positions_match_transformers(family, case):
    if family == "qwen2_5_vl":
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel as Model
    else:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel as Model
    num_tokens, images, types = prompt_of(*PROMPTS[case])
    model = Model.__new__(Model)
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(vision_config=vision)
    grids = torch.tensor([image.grid for image in images]) if images else None
    reference, _ = model.get_rope_index(torch.zeros(1, num_tokens).long(), types, image_grid_thw=grids)
    assert rotary_positions(num_tokens, images).tolist() == reference[:, 0].tolist()


def test_positions_of_adjacent_images_continue():
    images = [PromptImage(1, 2, (1, 2, 4), "a"), PromptImage(3, 2, (1, 4, 2), "b")]
    assert rotary_positions(6, images).tolist() == [
        [0, 1, 1, 3, 3, 5],
        [0, 1, 1, 3, 4, 5],
        [0, 1, 2, 3, 3, 5],
    ]


def test_feature_grid_divides_by_merge_size():
    assert feature_grid(PromptImage(0, 6, (1, 4, 6), "")) == (2, 3)
    assert feature_grid(PromptImage(0, 24, (1, 4, 6), "")) == (4, 6)
