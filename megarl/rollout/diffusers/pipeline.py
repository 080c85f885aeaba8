"""Load the parts of a diffusers folder: transformer, noise schedule, text encoder and image decoder.

Classes are chosen from a fixed list, weights are read only from safetensors files, and no code from the folder runs.
"""

from __future__ import annotations

import errno
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from megarl.core import device
from megarl.core.errors import UserError
from megarl.core.files import is_plain, read_foreign_object, shown
from megarl.models.denoiser import Z_IMAGE, DenoiserShape
from megarl.models.tokenizer import load_tokenizer
from megarl.models.weight_files import read_headers

KEY = "model.path"

PIPELINES = ("ZImagePipeline",)
CLASSES: Mapping[str, tuple[str, ...]] = {
    "transformer": (Z_IMAGE,),
    "scheduler": ("FlowMatchEulerDiscreteScheduler",),
    "text_encoder": ("Qwen3Model", "Qwen3ForCausalLM"),
    "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend"),
    "vae": ("AutoencoderKL",),
}
"""The supported classes of each part of a folder."""

UNSUPPORTED_SCHEDULES = (
    *("use_dynamic_shifting", "shift_terminal", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"),
    *("invert_sigmas", "stochastic_sampling"),
)
"""Settings of diffusers' scheduler under which its noise levels differ from `sigma_schedule`."""

CACHE_BYTES = 2**30
"""Maximum size of the cached embeddings in host memory."""


class HostedModel:
    """A frozen model that moves to the device when it is used and, if `offload` is set, back to host memory after each
    use."""

    def __init__(self, model: torch.nn.Module, offload: bool):
        self._model, self._offload = model.eval().requires_grad_(False), offload

    @contextmanager
    def on_device(self) -> Iterator[Any]:
        """Move the model to the device for the duration of the context, and return it."""
        self._model.to(device.device())
        try:
            with torch.no_grad():
                yield self._model
        finally:
            if self._offload:
                self.move_out()

    def move_out(self) -> None:
        """Move the model to host memory until its next use."""
        self._model.to("cpu")
        device.release_cache()


class PromptEncoder:
    """Encodes captions as diffusers' Z-Image pipeline does, and caches the results."""

    def __init__(self, tokenizer: Any, model: HostedModel, max_tokens: int, cache_bytes: int = CACHE_BYTES):
        self.tokenizer, self.model = tokenizer, model
        self._max_tokens, self._cache_bytes = max_tokens, cache_bytes
        self._cached: OrderedDict[str, torch.Tensor] = OrderedDict()
        """Embeddings by text, the most recently used last."""

    def encode(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return text -> embedding: the second-to-last hidden states, [L, caption channels], in host memory. Texts are
        encoded one at a time, so that batching does not change an embedding."""
        captions = {text: self._cached[text] for text in dict.fromkeys(texts) if text in self._cached}
        if missing := [text for text in dict.fromkeys(texts) if text not in captions]:
            with self.model.on_device() as model:
                captions |= {text: self._encode(model, text) for text in missing}
        for text, caption in captions.items():
            self._cached[text] = caption
            self._cached.move_to_end(text)
        while self._cached and sum(caption.nbytes for caption in self._cached.values()) > self._cache_bytes:
            self._cached.popitem(last=False)
        return captions

    def _encode(self, model: Any, text: str) -> torch.Tensor:
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        inputs = self.tokenizer(rendered, truncation=True, max_length=self._max_tokens, return_tensors="pt")
        output = model(input_ids=inputs.input_ids.to(device.device()), output_hidden_states=True)
        return output.hidden_states[-2][0].cpu()


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
        shift: the scheduler's shift, see `sigma_schedule`.
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
            loads_transformer: whether to read the transformer's weights, which otherwise arrive by a refit.
        """
        classes = _classes(folder)
        config = read_foreign_object(folder / "transformer" / "config.json", f"{KEY}: ")
        shape = DenoiserShape.of(config)
        kind = getattr(diffusers, classes["transformer"])
        with torch.device("meta"):
            transformer = kind.from_config(config)
        # diffusers' own `to` warns about dtypes.
        transformer = torch.nn.Module.to(transformer, dtype).to_empty(device=device.device())
        if loads_transformer:
            # Loaded tensors are views of a memory-mapped file. A sleeping engine could not free them, and at their
            # addresses some kernels round differently than in memory from torch's allocator.
            transformer.load_state_dict(_load(kind, folder / "transformer", dtype=dtype).state_dict())
        # An attention implementation named in config.json could be code from the hub.
        options = {"dtype": dtype, "attn_implementation": "sdpa"}
        text_encoder = _load(getattr(transformers, classes["text_encoder"]), folder / "text_encoder", **options)
        if text_encoder.config.hidden_size != shape.caption:
            raise UserError(
                f"{KEY}={folder}: the text encoder has {text_encoder.config.hidden_size} channels, but the transformer "
                f"expects cap_feat_dim={shape.caption}. Fix: copy the model again"
            )
        vae = _load(getattr(diffusers, classes["vae"]), folder / "vae", dtype=dtype)
        tokenizer = load_tokenizer(folder / "tokenizer", KEY)
        return cls(
            transformer.eval().requires_grad_(False),
            shape,
            _shift(folder / "scheduler" / "scheduler_config.json"),
            PromptEncoder(tokenizer, HostedModel(text_encoder, offload), shape.max_caption_tokens),
            ImageDecoder(vae, HostedModel(vae, offload)),
        )


def _classes(folder: Path) -> dict[str, str]:
    """Return the class of each part, as named in model_index.json."""
    index = read_foreign_object(folder / "model_index.json", f"{KEY}: ")
    if (name := index.get("_class_name")) not in PIPELINES:
        raise UserError(
            f"{KEY}={folder}: model_index.json: _class_name={name}: not supported. Fix: use a model whose pipeline has "
            f"the class {' or '.join(PIPELINES)}"
        )
    classes = {}
    for part, supported in CLASSES.items():
        entry = index.get(part)
        name = entry[1] if isinstance(entry, list) and len(entry) == 2 else entry
        if name not in supported:
            raise UserError(
                f"{KEY}={folder}: model_index.json: {part}={shown(entry)}: not supported. Fix: use a model whose "
                f"{part} is of class {' or '.join(supported)}"
            )
        classes[part] = name
    return classes


def _load(kind: Any, folder: Path, **options: Any) -> Any:
    read_headers(folder)  # raises a UserError for missing and truncated files, and for pickled weights
    load: Callable[..., Any] = functools.partial(kind.from_pretrained, local_files_only=True, use_safetensors=True)
    try:
        return load(folder, **options)
    except (MemoryError, torch.OutOfMemoryError):  # not caused by the files' content
        raise
    except Exception as error:  # the libraries share no exception class
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
