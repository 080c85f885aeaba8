"""Rotary position embeddings configured by a model's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel

from megarl.core import device
from megarl.megatron.model.mtp import mtp_of
from megarl.models.families import completed
from megarl.models.huggingface import rope_parameters
from megarl.models.shape import ModelShape
from megarl.models.vision import vision_of


class DocumentRotary(RotaryEmbedding):
    """Computes rotary angles for token positions within documents, using a single lookup table that grows on demand.
    Megatron's own embedding caches one table per sequence length, for up to 32 lengths.

    The positions come from PackedDocuments. They are set right before each call of the module that reads the angles,
    because a layer that is recomputed in the backward pass needs the positions of its own microbatch. Without
    positions, the module returns angles for all positions in the longest document, and the rotation kernel selects the
    angles for each document.

    Attributes:
        axes: int64 [channels], the axis (time, height or width) that determines each channel's angle; None without a
            vision tower.
    """

    positions: torch.Tensor | None = None
    table: torch.Tensor | None = None
    axes: torch.Tensor | None = None

    def forward(  # pyright: ignore[reportIncompatibleVariableOverride]  # the base class wraps forward in a cache
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group=None
    ) -> torch.Tensor:
        if self.table is None or len(self.table) < max_seq_len:
            self.table = self.get_emb(_power_of_two(max_seq_len))
        return _rows(self.table, self.positions, max_seq_len, self.axes)


class DocumentYarn(YarnRotaryEmbedding):
    """A DocumentRotary with YaRN (arXiv 2309.00071). It also returns the factor that multiplies cosines and sines."""

    positions: torch.Tensor | None = None
    table: torch.Tensor | None = None
    factor: float

    def forward(  # pyright: ignore[reportIncompatibleVariableOverride]  # the base class wraps forward in a cache
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group=None
    ) -> tuple[torch.Tensor, float]:
        table = self.table
        if table is None or len(table) < max_seq_len:
            pair: Any = self.get_emb(_power_of_two(max_seq_len))  # annotated as a single tensor
            table, self.factor = pair
            self.table = table
        return _rows(table, self.positions, max_seq_len), self.factor


@cache
def fuse_rotation() -> None:
    """On GPU, let Megatron rotate queries and keys with our kernel wherever it would use plain torch. This includes all
    models if Transformer Engine is not installed. Interleaved channels, as in latent attention, and heads in which only
    some channels rotate still use plain torch."""
    if not device.on_cuda():
        return
    from megarl.ops.rotary_triton import rotate

    in_torch, documents_in_torch = rope_utils._apply_rotary_pos_emb_bshd, rope_utils._apply_rotary_pos_emb_thd

    def rotated(x: torch.Tensor, angles: torch.Tensor, *, mscale: float = 1.0, **interleaved: bool) -> torch.Tensor:
        if any(interleaved.values()) or x.shape[1] != 1 or x.shape[-1] != angles.shape[-1]:
            return in_torch(x, angles, mscale=mscale, **interleaved)
        return rotate(x, angles[: len(x)], mscale)

    def rotated_documents(x: torch.Tensor, boundaries: torch.Tensor, angles: torch.Tensor, **keywords) -> torch.Tensor:
        if len(boundaries) == 2 and keywords["cp_group"].size() == 1:
            # For queries and keys in each layer, Megatron would copy the angles and keep the copies.
            del keywords["cp_group"]
            return rope_utils._apply_rotary_pos_emb_bshd(x.unsqueeze(1), angles[: len(x)], **keywords).squeeze(1)
        return documents_in_torch(x, boundaries, angles, **keywords)

    rope_utils._apply_rotary_pos_emb_bshd = rotated
    rope_utils._apply_rotary_pos_emb_thd = rotated_documents


def _rows(
    table: torch.Tensor, positions: torch.Tensor | None, max_seq_len: int, axes: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the angles at the given positions, [T, 1, 1, channels]. With `positions` [3, T], each channel uses the
    position on its axis."""
    if positions is None:
        # Megatron would interpret a table with one row per token in the pack as the tokens' own angles.
        return table[:max_seq_len]
    if positions.dim() == 1:
        return table[positions]
    assert axes is not None, "the pack has images, but the model has no vision tower"
    return table[:, 0, 0].gather(0, positions[axes.to(positions.device)].T)[:, None, None]


def axes_of_channels(sections: tuple[int, int, int], is_interleaved: bool) -> torch.Tensor:
    """Return the axis (0: time, 1: height, 2: width) that each rotary channel depends on, int64 [channels]. The second
    half of the channels repeats the first half's angles. The arguments are as in VisionShape."""
    if is_interleaved:
        # The remaining channels belong to time.
        axes = torch.zeros(sum(sections), dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
    else:
        axes = torch.tensor([axis for axis, count in enumerate(sections) for _ in range(count)])
    return axes.repeat(2)


def _power_of_two(least: int) -> int:
    """Return the smallest power of two that is greater than or equal to `least`."""
    return 1 << (least - 1).bit_length()


def set_rotary(model: GPTModel, hf_config: Mapping[str, Any]) -> None:
    """Install the rotary embedding described by config.json in the model and, with latent attention, in every layer."""
    shape, rope = ModelShape.of(hf_config), rope_parameters(completed(hf_config))
    readers: list[Any] = [model]
    if shape.latent:
        mtp = mtp_of(model)
        layers: list[Any] = [*model.decoder.layers, *([] if mtp is None else [x.mtp_model_layer for x in mtp.layers])]
        readers = [layer.self_attention for layer in layers]
    rotary = readers[0].rotary_pos_emb
    for reader in (model, *readers):
        reader.rotary_pos_emb = rotary
    if rope["rope_type"] != "yarn":
        rotary.inv_freq = inverse_frequencies(rope, shape.rotary_dim)
    rotary.__class__ = DocumentYarn if rope["rope_type"] == "yarn" else DocumentRotary
    if (vision := vision_of(hf_config)) is not None:
        rotary.axes = axes_of_channels(vision.rotary_sections, vision.is_interleaved)
    for reader in readers:
        reader.register_forward_pre_hook(_set_positions, with_kwargs=True)


def _set_positions(reader: Any, _: tuple, keywords: dict[str, Any]) -> None:
    reader.rotary_pos_emb.positions = keywords["packed_seq_params"].positions


def inverse_frequencies(rope: Mapping[str, Any], dim: int) -> torch.Tensor:
    """Return the rotation per position for each channel pair, in radians, float32 [dim / 2]. `rope` is the result of
    `rope_parameters`."""
    base = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    match rope["rope_type"]:
        case "default":
            return base
        case "linear":
            return base / rope["factor"]
        case "llama3":
            return _llama3(base, rope)
    raise AssertionError(rope["rope_type"])


def _llama3(base: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Scale frequencies as Llama 3.1 does: stretch long wavelengths by the factor, keep short wavelengths, and
    interpolate in between according to the number of rotations within the original context."""
    # The order of operations matches transformers and vLLM, so that rounding is identical.
    turns = rope["original_max_position_embeddings"] / (2 * math.pi / base)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - unscaled) * base / rope["factor"] + unscaled * base
