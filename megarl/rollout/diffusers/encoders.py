"""Encode captions with an image model's frozen text encoders."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from megarl.core import device
from megarl.core.latents import Conditioning
from megarl.models.denoiser import DenoiserShape, StableDiffusion3Shape

Caption = Conditioning[torch.Tensor]

CACHE_BYTES = 2**30
"""Maximum total size in bytes of the embeddings cached in host memory."""


class HostedModel:
    """A frozen model that is moved to the device for use. With `offload`, it returns to host memory after each use."""

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
    """Encodes captions as diffusers' pipeline does, and caches the results.

    Attributes:
        tokenizer: the tokenizer of the first text encoder.
    """

    def __init__(self, tokenizer: Any, model: HostedModel, cache_bytes: int = CACHE_BYTES):
        self.tokenizer, self.model = tokenizer, model
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[str, Caption] = OrderedDict()
        """Embeddings by text, the most recently used last."""

    def encode(self, texts: Sequence[str]) -> dict[str, Caption]:
        """Return text -> embedding, in host memory. Texts are encoded one at a time, so that batching does not change
        an embedding."""
        captions = {text: self._cached[text] for text in dict.fromkeys(texts) if text in self._cached}
        if missing := [text for text in dict.fromkeys(texts) if text not in captions]:
            with self.model.on_device() as model:
                captions |= {text: self._encode(model, text).to("cpu") for text in missing}
        for text, caption in captions.items():
            self._cached[text] = caption
            self._cached.move_to_end(text)
        while self._cached and sum(map(_num_bytes, self._cached.values())) > self._cache_bytes:
            self._cached.popitem(last=False)
        return captions

    def _encode(self, model: Any, text: str) -> Caption:
        raise NotImplementedError


class ZImageEncoder(PromptEncoder):
    """Z-Image's text encoder, a language model. A caption is encoded as the hidden states of the second-to-last
    layer."""

    def __init__(self, tokenizer: Any, model: HostedModel, shape: DenoiserShape):
        super().__init__(tokenizer, model)
        self._max_tokens = shape.max_caption_tokens

    def _encode(self, model: Any, text: str) -> Caption:
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        inputs = self.tokenizer(rendered, truncation=True, max_length=self._max_tokens, return_tensors="pt")
        output = model(input_ids=inputs.input_ids.to(device.device()), output_hidden_states=True)
        return Conditioning(output.hidden_states[-2][0])


class StableDiffusion3Encoder(PromptEncoder):
    """Two CLIP text encoders and, if the folder has it, T5. The channels of the CLIP encoders' second-to-last hidden
    states are concatenated and zero-padded; T5's output is appended as additional tokens. The pooled caption
    concatenates the text embeddings of both CLIP encoders. All texts are padded to the same length, and the padding is
    not masked."""

    def __init__(self, tokenizers: Sequence[Any], models: HostedModel, shape: StableDiffusion3Shape):
        """`models` contains a text encoder for each tokenizer: two, or three with T5."""
        super().__init__(tokenizers[0], models)
        self._tokenizers, self._shape = tokenizers, shape

    def _encode(self, model: Any, text: str) -> Caption:
        length = min(self._shape.clip_tokens, self.tokenizer.model_max_length)
        clip = [model[i](self._ids(i, text, length), output_hidden_states=True) for i in range(2)]
        tokens = torch.cat([output.hidden_states[-2][0].to(clip[0].text_embeds.dtype) for output in clip], dim=-1)
        tokens = F.pad(tokens, (0, self._shape.caption - tokens.shape[-1]))
        if len(self._tokenizers) == 2:
            t5 = tokens.new_zeros(self._shape.t5_tokens, self._shape.caption)
        else:
            t5 = model[2](self._ids(2, text, self._shape.t5_tokens))[0][0]
        return Conditioning(torch.cat([tokens, t5]), torch.cat([output.text_embeds[0] for output in clip]))

    def _ids(self, index: int, text: str, length: int) -> torch.Tensor:
        """Return the token ids for a text encoder, padded to this length, [1, length]."""
        options = dict(padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        return self._tokenizers[index]([text], **options).input_ids.to(device.device())


def _num_bytes(caption: Caption) -> int:
    return caption.tokens.nbytes + (0 if caption.pooled is None else caption.pooled.nbytes)
