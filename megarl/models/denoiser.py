"""Interpret the config.json of an image model's transformer, as written by diffusers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from megarl.core.errors import UserError
from megarl.core.files import is_plain, read_foreign_object, shown
from megarl.models.shape import ModelShape

Z_IMAGE = "ZImageTransformer2DModel"
"""diffusers' class of Z-Image's transformer (arXiv 2511.22699)."""

STABLE_DIFFUSION_3 = "SD3Transformer2DModel"
"""diffusers' class of the transformer of Stable Diffusion 3 and 3.5 (arXiv 2403.03206)."""

TIME_CHANNELS = 256
"""Number of channels of the noise level's sinusoidal embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiserShape(ModelShape):
    """The architecture parameters of a diffusion transformer.

    Attributes:
        channels: number of latent channels.
        patch: height and width of the square of latents that forms a token.
        caption: number of channels of a caption's tokens, which are the text encoders' output.
        pooled: number of channels of the vector that summarizes a caption; None if the model has none.
        conditioning: number of channels of the embedded noise level, which includes the pooled caption.
        image_limit: maximum numbers of rows and columns of image tokens.
        refiners: number of layers before the main stack that process only images; an equal number of layers processes
            only captions.
    """

    channels: int
    patch: int
    caption: int
    pooled: int | None
    conditioning: int
    image_limit: tuple[int, int]
    refiners: int

    token_multiple: ClassVar[int]
    """The image tokens and the caption tokens are each padded to a multiple of this."""
    pixels_per_latent: ClassVar[int] = 8
    """Height and width in pixels of one latent of the published VAE. The transformer's config.json does not contain
    it."""
    text_encoder_parameters: ClassVar[int]
    decoder_parameters: ClassVar[int] = 83_819_683
    """Numbers of parameters of the published text encoders and VAE, which are frozen."""

    @property
    def patch_dim(self) -> int:
        """Number of latent values in a token."""
        return self.patch**2 * self.channels

    @property
    def max_caption_tokens(self) -> int:
        """Maximum number of caption tokens, with padding. Longer captions are truncated."""
        raise NotImplementedError

    def caption_tokens(self, num_tokens: float) -> int:
        """Return the number of tokens that the transformer processes, with padding, for a caption of num_tokens ≥ 1
        tokens."""
        raise NotImplementedError

    def image_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens, with padding, of an image of this size in pixels."""
        pixels = self.pixels_per_latent * self.patch
        return self.padded(-(-height // pixels) * -(-width // pixels))

    def padded(self, num_tokens: int) -> int:
        """Return the number of tokens of an image or a caption after padding."""
        return -(-num_tokens // self.token_multiple) * self.token_multiple

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> DenoiserShape:
        """Build the shape from diffusers' config.json. Raise a UserError if the class is unknown, a value has the wrong
        type, or a feature is not supported."""
        name = hf_config.get("_class_name")
        if name == Z_IMAGE:
            return ZImageShape.read(hf_config)
        if name == STABLE_DIFFUSION_3:
            return StableDiffusion3Shape.read(hf_config)
        raise UserError(
            f"config.json: _class_name={name}: not supported. Fix: use a model of class {Z_IMAGE} or "
            f"{STABLE_DIFFUSION_3}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ZImageShape(DenoiserShape):
    """The architecture parameters of Z-Image, a single-stream diffusion transformer. Padding tokens have a learned
    embedding, and a document's tokens attend to its padding.

    Attributes:
        time_scale: factor applied to the noise level before it is embedded.
        rotary_base: base of the rotary position embedding.
        rotary_axes: number of rotary channels per axis. The axes are the position in the sequence (one per caption
            token, one for the whole image), the row in the image, and the column.
        axis_lengths: number of positions per axis.
    """

    time_scale: float
    rotary_base: float
    rotary_axes: tuple[int, ...]
    axis_lengths: tuple[int, ...]

    token_multiple: ClassVar[int] = 32
    text_encoder_parameters: ClassVar[int] = 4_022_468_096
    """Number of parameters of Qwen3-4B."""
    time_hidden: ClassVar[int] = 1024
    """Number of hidden channels in the network that embeds the noise level."""

    @property
    def max_caption_tokens(self) -> int:
        # diffusers truncates captions to 512 tokens. Caption positions start at 1, and the image takes the next one.
        return min(512, (self.axis_lengths[0] - 2) // self.token_multiple * self.token_multiple)

    def caption_tokens(self, num_tokens: float) -> int:
        return self.padded(min(round(num_tokens), self.max_caption_tokens))

    @classmethod
    def read(cls, hf_config: Mapping[str, Any]) -> Self:
        model = {**_Z_IMAGE_DEFAULTS, **hf_config}
        counts = ("in_channels", "dim", "n_layers", "n_refiner_layers", "n_heads", "cap_feat_dim")
        lists = ("all_patch_size", "all_f_patch_size", "axes_dims", "axes_lens")
        _check(model, counts, lists, numbers=("rope_theta", "t_scale"))
        _refuse(
            model,
            {
                "all_patch_size": len(model["all_patch_size"]) != 1,
                "all_f_patch_size": list(model["all_f_patch_size"]) != [1],
                "axes_dims": sum(model["axes_dims"]) * model["n_heads"] != model["dim"],
                "n_kv_heads": model["n_kv_heads"] != model["n_heads"],  # diffusers ignores the key
                "norm_eps": model["norm_eps"] != 1e-5,  # in diffusers, norms of queries and keys always use 1e-5
                "qk_norm": not model["qk_norm"],
                "siglip_feat_dim": model["siglip_feat_dim"] is not None,
            },
        )
        hidden, lengths = model["dim"], tuple(model["axes_lens"])
        return cls(
            **_layer_fields("z_image", model["n_layers"], hidden, model["n_heads"], has_bias=False, qk_norm=True),
            intermediate=int(hidden / 3 * 8),  # diffusers rounds the same way
            channels=model["in_channels"],
            patch=model["all_patch_size"][0],
            caption=model["cap_feat_dim"],
            pooled=None,
            conditioning=min(hidden, 256),
            image_limit=(lengths[1], lengths[2]),
            refiners=model["n_refiner_layers"],
            time_scale=model["t_scale"],
            rotary_base=model["rope_theta"],
            rotary_axes=tuple(model["axes_dims"]),
            axis_lengths=lengths,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StableDiffusion3Shape(DenoiserShape):
    """The architecture parameters of Stable Diffusion 3 and 3.5, whose layers have separate weights for images and
    captions. Images and captions attend to each other. Nothing is padded.

    Attributes:
        dual_layers: indices of the layers in which images also attend to themselves alone, with separate weights.
        grid: number of rows, and of columns, of the position embedding. Images use its center.
    """

    dual_layers: frozenset[int]
    grid: int

    token_multiple: ClassVar[int] = 1
    text_encoder_parameters: ClassVar[int] = 123_650_304 + 694_659_840 + 4_762_310_656
    """Numbers of parameters of CLIP-L, CLIP-G and the encoder of T5-XXL."""
    time_scale: ClassVar[float] = 1000.0
    """Factor applied to the noise level before it is embedded."""
    clip_tokens: ClassVar[int] = 77
    t5_tokens: ClassVar[int] = 256
    """Numbers of CLIP and T5 tokens per caption. diffusers' pipeline pads or truncates captions to these lengths."""

    @property
    def max_caption_tokens(self) -> int:
        return self.clip_tokens + self.t5_tokens

    def caption_tokens(self, num_tokens: float) -> int:
        return self.max_caption_tokens

    def is_last(self, layer: int) -> bool:
        """Return whether the layer is the last one, where captions provide only keys and values."""
        return layer == self.num_layers - 1

    @classmethod
    def read(cls, hf_config: Mapping[str, Any]) -> Self:
        model = {**_STABLE_DIFFUSION_3_DEFAULTS, **hf_config}
        counts = ("sample_size", "patch_size", "in_channels", "num_layers", "attention_head_dim", "num_attention_heads")
        counts += ("joint_attention_dim", "caption_projection_dim", "pooled_projection_dim", "pos_embed_max_size")
        _check(model, counts)
        heads, dual, grid = model["num_attention_heads"], model["dual_attention_layers"], model["pos_embed_max_size"]
        hidden = heads * model["attention_head_dim"]
        if not isinstance(dual, list | tuple) or not all(is_plain(layer, int) for layer in dual):
            raise UserError(
                f"config.json: dual_attention_layers={shown(dual)}: expected a list of integers. Fix: copy the file "
                "again"
            )
        _refuse(
            model,
            {
                "caption_projection_dim": model["caption_projection_dim"] != hidden,
                "dual_attention_layers": not set(range(model["num_layers"])).issuperset(dual),
                "out_channels": model["out_channels"] not in (None, model["in_channels"]),
                "qk_norm": model["qk_norm"] not in (None, "rms_norm"),
            },
        )
        has_norms = model["qk_norm"] is not None
        return cls(
            **_layer_fields("sd3", model["num_layers"], hidden, heads, has_bias=True, qk_norm=has_norms),
            intermediate=4 * hidden,
            channels=model["in_channels"],
            patch=model["patch_size"],
            caption=model["joint_attention_dim"],
            pooled=model["pooled_projection_dim"],
            conditioning=hidden,
            image_limit=(grid, grid),
            refiners=0,
            dual_layers=frozenset(dual),
            grid=grid,
        )


_Z_IMAGE_DEFAULTS: Mapping[str, Any] = {
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
_STABLE_DIFFUSION_3_DEFAULTS: Mapping[str, Any] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "num_layers": 18,
    "attention_head_dim": 64,
    "num_attention_heads": 18,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1152,
    "pooled_projection_dim": 2048,
    "out_channels": 16,
    "pos_embed_max_size": 96,
    "dual_attention_layers": (),
    "qk_norm": None,
}
"""diffusers' defaults for keys that config.json omits."""


def pixels_per_latent(folder: Path) -> int:
    """Return the height and width in pixels of one latent of the VAE next to a transformer's folder."""
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


def _layer_fields(
    model_type: str, num_layers: int, hidden: int, heads: int, has_bias: bool, qk_norm: bool
) -> dict[str, Any]:
    """Return the fields of ModelShape that denoisers have in common, except `intermediate`."""
    return dict(
        model_type=model_type,
        num_layers=num_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        rotary_dim=hidden // heads,
        vocab=0,
        tied=False,
        qkv_bias=has_bias,
        attention_out_bias=has_bias,
        mlp_bias=has_bias,
        qk_norm=qk_norm,
        fused=False,
        experts=None,
        latent=None,
    )


def _check(
    model: Mapping[str, Any], counts: Sequence[str], lists: Sequence[str] = (), numbers: Sequence[str] = ()
) -> None:
    """Raise a UserError for the first key whose value is not a positive integer (`counts`), a list of positive integers
    (`lists`) or a positive number (`numbers`)."""

    def is_list(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(is_plain(item, int) and item > 0 for item in value)

    wrong = {key: "a positive integer" for key in counts if not (is_plain(model[key], int) and model[key] > 0)}
    wrong |= {key: "a list of positive integers" for key in lists if not is_list(model[key])}
    wrong |= {key: "a positive number" for key in numbers if not (is_plain(model[key], float) and model[key] > 0)}
    for key, expected in wrong.items():
        raise UserError(f"config.json: {key}={shown(model[key])}: expected {expected}. Fix: copy the file again")


def _refuse(model: Mapping[str, Any], is_unsupported: Mapping[str, bool]) -> None:
    """Raise a UserError that names the keys with unsupported values."""
    if features := [f"{key}={model[key]}" for key, refused in is_unsupported.items() if refused]:
        name = model["_class_name"]
        raise UserError(f"config.json: {', '.join(features)}: not supported for {name}. Fix: use another model")
