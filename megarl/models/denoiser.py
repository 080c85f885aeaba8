"""Interpret the config.json of an image model's transformer, as written by diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.core.files import is_plain, read_foreign_object, shown
from megarl.models.shape import ModelShape

Z_IMAGE = "ZImageTransformer2DModel"
"""diffusers' class of Z-Image's transformer (arXiv 2511.22699)."""

TOKEN_MULTIPLE = 32
"""Z-Image pads the tokens of an image, and of a caption, to a multiple of this number with learned tokens."""

MAX_CAPTION_TOKENS = 512
"""diffusers' pipeline truncates longer captions."""

PIXELS_PER_LATENT = 8
"""Height and width in pixels of one latent of Z-Image's VAE. The transformer's config.json does not contain it."""

TEXT_ENCODER_PARAMETERS, DECODER_PARAMETERS = 4_022_468_096, 83_819_683
"""Parameters of Z-Image's text encoder, Qwen3-4B, and of its VAE. They are frozen."""

TIME_CHANNELS, TIME_HIDDEN = 256, 1024
"""Number of cosines and sines of the noise level, and number of hidden channels in the network that embeds them."""

_DEFAULTS: Mapping[str, Any] = {
    "all_patch_size": (2,),
    "all_f_patch_size": (1,),
    "in_channels": 16,
    "dim": 3840,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "n_heads": 30,
    "n_kv_heads": 30,
    "norm_eps": 1e-5,
    "qk_norm": True,
    "cap_feat_dim": 2560,
    "siglip_feat_dim": None,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
    "axes_dims": (32, 48, 48),
    "axes_lens": (1024, 512, 512),
}
"""diffusers' defaults for keys that config.json omits."""

_COUNTS = ("in_channels", "dim", "n_layers", "n_refiner_layers", "n_heads", "cap_feat_dim")
_LISTS = ("all_patch_size", "all_f_patch_size", "axes_dims", "axes_lens")
_NUMBERS = ("rope_theta", "t_scale")
_CONDITIONING = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiserShape(ModelShape):
    """The architecture parameters of a single-stream diffusion transformer.

    Attributes:
        refiners: number of layers that process only images; as many layers process only captions.
        channels: number of latent channels.
        patch: height and width of the square of latents that forms a token.
        caption: number of channels of the text encoder's output.
        conditioning: number of channels of the embedded noise level.
        time_scale: factor by which the noise level is multiplied before it is embedded.
        rotary_base: base of the rotary position embedding.
        rotary_axes: number of rotary channels per axis. The axes are the position in the sequence (one per caption
            token, one for the whole image), the row in the image, and the column.
        axis_lengths: number of positions per axis.
    """

    refiners: int
    channels: int
    patch: int
    caption: int
    conditioning: int
    time_scale: float
    rotary_base: float
    rotary_axes: tuple[int, ...]
    axis_lengths: tuple[int, ...]

    @property
    def patch_dim(self) -> int:
        """Number of latent values in a token."""
        return self.patch**2 * self.channels

    @property
    def image_limit(self) -> tuple[int, int]:
        """Maximum numbers of rows and columns of image tokens."""
        _, rows, columns = self.axis_lengths
        return rows, columns

    @property
    def max_caption_tokens(self) -> int:
        """Number of tokens to which captions are truncated, with padding."""
        # The image's position follows its caption, whose positions start at 1.
        return min(MAX_CAPTION_TOKENS, (self.axis_lengths[0] - 2) // TOKEN_MULTIPLE * TOKEN_MULTIPLE)

    def caption_tokens(self, num_tokens: float) -> int:
        """Return the number of tokens, with padding, of a caption of num_tokens ≥ 1 tokens."""
        return self.padded(min(round(num_tokens), self.max_caption_tokens))

    def padded(self, num_tokens: int) -> int:
        """Return the number of tokens of an image or a caption after padding."""
        return padded(num_tokens)

    def image_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens, with padding, of an image of this size in pixels."""
        pixels = PIXELS_PER_LATENT * self.patch
        return padded(-(-height // pixels) * -(-width // pixels))

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> DenoiserShape:
        """Build the shape from diffusers' config.json. Raise a UserError if the class is unknown, a value has the wrong
        type, or a feature is not supported."""
        if (name := hf_config.get("_class_name")) != Z_IMAGE:
            raise UserError(f"config.json: _class_name={name}: not supported. Fix: use a model of class {Z_IMAGE}")
        model = {**_DEFAULTS, **hf_config}
        for key in (*_COUNTS, *_LISTS, *_NUMBERS):
            if not _is_valid(key, model[key]):
                expected = "a positive integer" if key in _COUNTS else "a positive number"
                expected = "positive integers" if key in _LISTS else expected
                raise UserError(f"config.json: {key}={shown(model[key])}: expected {expected}. Fix: copy it again")
        if features := _unsupported(model):
            raise UserError(f"config.json: {', '.join(features)}: not supported for {Z_IMAGE}. Fix: use another model")
        hidden, heads = model["dim"], model["n_heads"]
        return cls(
            model_type="z_image",
            num_layers=model["n_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            intermediate=int(hidden / 3 * 8),  # diffusers rounds the same way
            vocab=0,
            tied=False,
            qkv_bias=False,
            attention_out_bias=False,
            mlp_bias=False,
            qk_norm=True,
            fused=False,
            experts=None,
            latent=None,
            refiners=model["n_refiner_layers"],
            channels=model["in_channels"],
            patch=model["all_patch_size"][0],
            caption=model["cap_feat_dim"],
            conditioning=min(hidden, _CONDITIONING),
            time_scale=model["t_scale"],
            rotary_base=model["rope_theta"],
            rotary_axes=tuple(model["axes_dims"]),
            axis_lengths=tuple(model["axes_lens"]),
        )


def padded(num_tokens: int) -> int:
    """Return the number of tokens of an image or a caption after padding."""
    return -(-num_tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE


def pixels_per_latent(folder: Path) -> int:
    """Return the height and width in pixels of one latent of the VAE beside a transformer's folder."""
    path = folder.parent / "vae" / "config.json"
    channels = read_foreign_object(path, "model.path: ").get("block_out_channels")
    if not isinstance(channels, list) or not channels:
        raise UserError(
            f"model.path: {path}: block_out_channels={shown(channels)}: expected a list of integers. Fix: copy the "
            "file again"
        )
    return 2 ** (len(channels) - 1)


def is_denoiser(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json belongs to a diffusers model instead of a transformers model."""
    return "_class_name" in config


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a language model or a denoiser from its config.json."""
    return DenoiserShape.of(config) if is_denoiser(config) else ModelShape.of(config)


def _is_valid(key: str, value: Any) -> bool:
    if key in _LISTS:
        return isinstance(value, list | tuple) and all(is_plain(item, int) and item > 0 for item in value)
    return is_plain(value, int if key in _COUNTS else float) and value > 0


def _unsupported(model: Mapping[str, Any]) -> list[str]:
    features = {
        "all_patch_size": len(model["all_patch_size"]) != 1,
        "all_f_patch_size": list(model["all_f_patch_size"]) != [1],
        "axes_dims": sum(model["axes_dims"]) * model["n_heads"] != model["dim"],
        "n_kv_heads": model["n_kv_heads"] != model["n_heads"],  # diffusers ignores the key
        "norm_eps": model["norm_eps"] != 1e-5,  # diffusers always uses 1e-5 in the norms of queries and keys
        "qk_norm": not model["qk_norm"],
        "siglip_feat_dim": model["siglip_feat_dim"] is not None,
    }
    return [f"{key} {model[key]}" for key, is_unsupported in features.items() if is_unsupported]
