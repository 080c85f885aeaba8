"""Load the parts of a diffusers folder: transformer, noise schedule, text encoder and image decoder.

Classes are chosen from a fixed list, weights are read only from safetensors files, and no code from the folder runs.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from megarl.algorithms.transition import sigma_schedule, trained_sigma_schedule
from megarl.core import device
from megarl.core.errors import UserError
from megarl.core.files import is_plain, read_foreign_object, shown
from megarl.models.denoiser import STABLE_DIFFUSION_3, Z_IMAGE, DenoiserShape, StableDiffusion3Shape
from megarl.models.tokenizer import load_tokenizer
from megarl.models.weight_files import read_headers
from megarl.rollout.diffusers.encoders import HostedModel, PromptEncoder, StableDiffusion3Encoder, ZImageEncoder

KEY = "model.path"

_GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
_CLIP = ("CLIPTextModelWithProjection",), ("CLIPTokenizer", "CLIPTokenizerFast", *_GENERIC_TOKENIZERS)
_COMMON = {"scheduler": ("FlowMatchEulerDiscreteScheduler",), "vae": ("AutoencoderKL",)}
PIPELINES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ZImagePipeline": {
        **_COMMON,
        "transformer": (Z_IMAGE,),
        "text_encoder": ("Qwen3Model", "Qwen3ForCausalLM"),
        "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast", *_GENERIC_TOKENIZERS),
    },
    "StableDiffusion3Pipeline": {
        **_COMMON,
        "transformer": (STABLE_DIFFUSION_3,),
        "text_encoder": _CLIP[0],
        "tokenizer": _CLIP[1],
        "text_encoder_2": _CLIP[0],
        "tokenizer_2": _CLIP[1],
        "text_encoder_3": ("T5EncoderModel",),
        "tokenizer_3": ("T5Tokenizer", "T5TokenizerFast", *_GENERIC_TOKENIZERS),
    },
}
"""Pipeline class -> supported classes of each part of the folder."""

OPTIONAL = ("text_encoder_3", "tokenizer_3")
"""Parts that a folder may lack. Without the T5 encoder, embeddings of T5 tokens are zeros."""

UNSUPPORTED_SCHEDULES = (
    *("use_dynamic_shifting", "shift_terminal", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"),
    *("invert_sigmas", "stochastic_sampling"),
)
"""Settings that make the noise levels of diffusers' scheduler differ from megarl's."""


class ImageDecoder:
    """Decodes latents to images, one at a time.

    Attributes:
        scale: height and width in pixels of one latent.
    """

    def __init__(self, model: Any, hosted: HostedModel):
        self.model = hosted
        self.scale = 2 ** (len(model.config.block_out_channels) - 1)

    def decode(self, latents: Sequence[torch.Tensor]) -> list[NDArray[np.uint8]]:
        """Return RGB images, uint8 [height, width, 3], for latents [channels, height, width] at σ = 0."""
        if not latents:
            return []
        with self.model.on_device() as vae:
            return [self._decode(vae, one) for one in latents]

    def _decode(self, vae: Any, latents: torch.Tensor) -> NDArray[np.uint8]:
        scaled = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        pixels = vae.decode(scaled[None], return_dict=False)[0][0].float()
        return ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()


@dataclass(frozen=True, slots=True)
class ImageModel:
    """The parts of a diffusers folder.

    Attributes:
        transformer: the trained model. Its weights are uninitialized unless `load` reads them.
        shift: the scheduler's shift.
    """

    transformer: Any
    shape: DenoiserShape
    shift: float
    encoder: PromptEncoder
    decoder: ImageDecoder

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, offload: bool, loads_transformer: bool = False) -> ImageModel:
        """Load a diffusers folder. Raise a UserError if a part is missing, damaged or not supported.

        Args:
            dtype: dtype of all models.
            offload: whether the text encoder and the VAE stay in host memory while they are unused.
            loads_transformer: whether to read the transformer's weights, which otherwise arrive with a refit.
        """
        classes = _classes(folder)
        config = read_foreign_object(folder / "transformer" / "config.json", f"{KEY}: ")
        shape = DenoiserShape.of(config)
        kind = getattr(diffusers, classes["transformer"])
        with torch.device("meta"):
            transformer = kind.from_config(config)
        # Call torch's `to`, because diffusers' override warns about dtypes.
        transformer = torch.nn.Module.to(transformer, dtype).to_empty(device=device.device())
        if loads_transformer:
            # Copy the weights, because loaded tensors are views of a memory-mapped file. A sleeping engine could not
            # free them, and some kernels round differently on them than on memory from torch's allocator.
            transformer.load_state_dict(_load(kind, folder / "transformer", dtype=dtype).state_dict())
        vae = _load(getattr(diffusers, classes["vae"]), folder / "vae", dtype=dtype)
        return cls(
            transformer.eval().requires_grad_(False),
            shape,
            _shift(folder / "scheduler" / "scheduler_config.json"),
            _encoder(folder, classes, shape, dtype, offload),
            ImageDecoder(vae, HostedModel(vae, offload)),
        )

    def sigmas(self, num_steps: int, shift: float | None = None) -> list[float]:
        """Return the noise levels of num_steps denoising steps, as in diffusers' pipeline. `shift` defaults to the
        scheduler's."""
        is_sd3 = isinstance(self.shape, StableDiffusion3Shape)
        return (trained_sigma_schedule if is_sd3 else sigma_schedule)(num_steps, shift or self.shift)


def _encoder(
    folder: Path, classes: Mapping[str, str], shape: DenoiserShape, dtype: torch.dtype, offload: bool
) -> PromptEncoder:
    """Load the text encoders. Raise a UserError if their sizes differ from those that the transformer expects."""
    parts = [part for part in ("text_encoder", "text_encoder_2", "text_encoder_3") if part in classes]
    # Set the attention implementation. Otherwise, config.json could name one on the Hub, whose code would run.
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    models = [_load(getattr(transformers, classes[part]), folder / part, **options) for part in parts]
    tokenizers = [load_tokenizer(folder / part.replace("text_encoder", "tokenizer"), KEY) for part in parts]
    if not isinstance(shape, StableDiffusion3Shape):
        [model], [tokenizer] = models, tokenizers
        _require_equal(folder, "cap_feat_dim", shape.caption, model.config.hidden_size)
        return ZImageEncoder(tokenizer, HostedModel(model, offload), shape)
    if len(parts) == 3:
        _require_equal(folder, "joint_attention_dim", shape.caption, models[2].config.d_model)
    clip = models[:2]
    _require_equal(folder, "pooled_projection_dim", shape.pooled, sum(model.config.projection_dim for model in clip))
    channels = sum(model.config.hidden_size for model in clip)
    _require_equal(folder, "joint_attention_dim", shape.caption, max(shape.caption, channels))
    return StableDiffusion3Encoder(tokenizers, HostedModel(torch.nn.ModuleList(models), offload), shape)


def _require_equal(folder: Path, key: str, expected: int | None, channels: int) -> None:
    if channels != expected:
        raise UserError(
            f"{KEY}={folder}: the text encoders have {channels} channels, but the transformer expects {key}={expected}"
            ". Fix: copy the model again"
        )


def _classes(folder: Path) -> dict[str, str]:
    """Return the class of each part, as named in model_index.json. Optional parts may be absent."""
    index = read_foreign_object(folder / "model_index.json", f"{KEY}: ")
    if (name := str(index.get("_class_name"))) not in PIPELINES:
        raise UserError(
            f"{KEY}={folder}: model_index.json: _class_name={name}: not supported. Fix: use a model whose pipeline has "
            f"the class {' or '.join(PIPELINES)}"
        )
    classes = {}
    for part, supported in PIPELINES[name].items():
        entry = index.get(part)
        if part in OPTIONAL and entry in (None, [None, None]):
            continue
        name = entry[1] if isinstance(entry, list) and len(entry) == 2 else entry
        if name not in supported:
            raise UserError(
                f"{KEY}={folder}: model_index.json: {part}={shown(entry)}: not supported. Fix: use a model whose "
                f"{part} is of class {' or '.join(supported)}"
            )
        classes[part] = name
    if ("text_encoder_3" in classes) != ("tokenizer_3" in classes):
        raise UserError(
            f"{KEY}={folder}: model_index.json: only one of text_encoder_3 and tokenizer_3 is present. Fix: copy the "
            "model again"
        )
    return classes


def _load(kind: Any, folder: Path, **options: Any) -> Any:
    read_headers(folder)  # raises a UserError for missing and truncated files, and for pickled weights
    load: Callable[..., Any] = functools.partial(kind.from_pretrained, local_files_only=True, use_safetensors=True)
    try:
        return load(folder, **options)
    except (MemoryError, torch.OutOfMemoryError):  # not caused by the files' content
        raise
    except Exception as error:  # the libraries have no common exception class
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise  # a disk error; OSErrors that the libraries raise themselves have no errno
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"{KEY}: {folder}: cannot be loaded ({reason}). Fix: copy the model again") from error


def _shift(path: Path) -> float:
    settings = read_foreign_object(path, f"{KEY}: ")
    for key in UNSUPPORTED_SCHEDULES:
        if settings.get(key):
            raise UserError(f"{path}: {key}={shown(settings[key])}: not supported. Fix: use a model without it")
    shift = settings.get("shift", 1.0)
    if not (is_plain(shift, float) or is_plain(shift, int)) or shift <= 0:
        raise UserError(f"{path}: shift={shown(shift)}: expected a positive number. Fix: copy the file again")
    return float(shift)
