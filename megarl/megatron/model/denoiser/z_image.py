"""Z-Image's transformer (arXiv 2511.22699) as a megatron-core model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megarl.megatron import parallel
from megarl.megatron.model.denoiser.inputs import Document, DocumentStream, ZImageInput
from megarl.megatron.model.denoiser.layers import layer_spec
from megarl.megatron.model.denoiser.model import FINAL_EPSILON, Denoiser
from megarl.models.denoiser import TIME_CHANNELS, ZImageShape
from megarl.ops.modulation import modulate


class ZImage(Denoiser):
    """Z-Image. Images and captions are refined separately and then form one stream."""

    def __init__(self, config: TransformerConfig, shape: ZImageShape, virtual: int | None):
        super().__init__(config, shape, virtual)
        self.shape: ZImageShape = shape
        hidden, dtype = shape.hidden, config.params_dtype
        self.time_embedder = self._embedder(TIME_CHANNELS, shape.time_hidden)
        self._mark(self.time_embedder)  # each rank applies the modulations only to its own tokens
        if self.pre_process:
            self.image_embedder = nn.Linear(shape.patch_dim, hidden, dtype=dtype)
            self.caption_norm = nn.RMSNorm(shape.caption, eps=config.layernorm_epsilon, dtype=dtype)
            self.caption_embedder = nn.Linear(shape.caption, hidden, dtype=dtype)
            self.image_padding = nn.Parameter(torch.zeros(1, hidden, dtype=dtype))
            self.caption_padding = nn.Parameter(torch.zeros(1, hidden, dtype=dtype))
            self.noise_refiner = self._stack(shape.refiners, layer_spec(shape.conditioning))
            self.context_refiner = self._stack(shape.refiners, layer_spec(None))
        self.decoder = self._main_stack(layer_spec(shape.conditioning))
        if self.post_process:
            self.output_modulation = nn.Linear(shape.conditioning, hidden, dtype=dtype)
            self.output_layer = nn.Linear(hidden, shape.patch_dim, dtype=dtype)
            self._mark(self.output_modulation)
            self._mark(self.output_layer)

    def prepare(self, documents: Sequence[Document]) -> ZImageInput:
        return ZImageInput.of(documents, self.shape, self.config.sequence_parallel)

    def forward(self, item: ZImageInput) -> torch.Tensor:
        # In Z-Image, time is 1 for an image and 0 for noise.
        conditioning = self._embed_times((1 - item.sigmas) * self.shape.time_scale)
        hidden = self._embed_tokens(item, conditioning) if self.pre_process else None
        hidden = self._run(self.decoder, hidden, item.joint, conditioning)
        if not self.post_process:
            return hidden
        scale = 1 + self.output_modulation(F.silu(conditioning))
        normalized = F.layer_norm(hidden, (self.shape.hidden,), eps=FINAL_EPSILON)
        scaled = modulate(normalized, item.joint.document_numbers, scale)[:, 0]
        output = self._gather(self.output_layer(scaled), is_replicated=True)
        return -item.image_rows(output).float()  # Z-Image predicts −v

    def _embed_tokens(self, item: ZImageInput, conditioning: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of this rank's tokens in the joint stream, [T/cp, 1, hidden]."""
        dtype = self.config.params_dtype
        images = self.image_embedder(item.patches.to(dtype))
        captions = self.caption_embedder(self.caption_norm(item.captions.to(dtype)))
        images = torch.where(item.image_is_padding, self.image_padding, images)
        captions = torch.where(item.caption_is_padding, self.caption_padding, captions)
        images = self._run(self.noise_refiner, self._scatter(images[:, None]), item.images, conditioning)
        captions = self._run(self.context_refiner, self._scatter(captions[:, None]), item.texts, None)
        images, captions = (self._gather(tokens, is_replicated=False) for tokens in (images, captions))
        return self._scatter(parallel.context_part(item.join(images, captions)))

    def _run(
        self, stack: TransformerBlock, hidden: torch.Tensor | None, stream: DocumentStream, context: torch.Tensor | None
    ) -> torch.Tensor:
        return stack(hidden, None, context=context, packed_seq_params=stream)
