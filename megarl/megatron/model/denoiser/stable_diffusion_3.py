"""The transformer of Stable Diffusion 3 and 3.5 (arXiv 2403.03206) as a megatron-core model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megarl.megatron.model.denoiser.inputs import (
    DenoiserInput,
    Document,
    DocumentStream,
    filled,
    patchify,
    share,
    token_multiple,
)
from megarl.megatron.model.denoiser.model import FINAL_EPSILON, Denoiser
from megarl.megatron.model.denoiser.two_streams import Modulation, TwoStreams, layer_spec
from megarl.models.denoiser import TIME_CHANNELS, StableDiffusion3Shape
from megarl.ops.modulation import modulate


@dataclass(frozen=True, slots=True)
class StableDiffusion3Input(DenoiserInput):
    """Stable Diffusion 3's input.

    Attributes:
        positions: int64 [X/cp], the image tokens' positions in the position embedding.
        pooled: float32 [D, pooled channels], the documents' pooled captions.
    """

    positions: torch.Tensor
    pooled: torch.Tensor

    @classmethod
    def of(
        cls, documents: Sequence[Document], shape: StableDiffusion3Shape, sequence_parallel: bool
    ) -> StableDiffusion3Input:
        target, multiple = documents[0].latents.device, token_multiple(sequence_parallel)
        patches = [patchify(d.latents, shape.patch) for d in documents]
        captions, pooled = [d.caption.tokens for d in documents], [d.caption.pooled for d in documents]
        positions = [_positions(document.grid(shape.patch), shape.grid).to(target) for document in documents]
        return cls(
            documents=documents,
            patch=shape.patch,
            patches=share(patches, multiple),
            captions=share(captions, multiple),
            sigmas=torch.tensor([d.sigma for d in documents], dtype=torch.float32, device=target),
            images=DocumentStream.of(filled(patches, multiple), sequence_parallel, is_rotated=False),
            texts=DocumentStream.of(filled(captions, multiple), sequence_parallel, is_rotated=False),
            positions=share(positions, multiple),
            pooled=torch.stack([vector for vector in pooled if vector is not None]),
        )

    def image_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Select the rows [N, …] of the documents' image tokens, without filler, from those of all image tokens."""
        return rows[: sum(self.images.lengths[:-1])]


class StableDiffusion3(Denoiser):
    """Stable Diffusion 3 and 3.5. The gradient of the conditioning is complete on every tensor-parallel rank, because
    the modulations sum it."""

    on_every_stage: ClassVar[Sequence[str]] = ("time_embedder", "pooled_embedder")

    def __init__(self, config: TransformerConfig, shape: StableDiffusion3Shape, virtual: int | None):
        super().__init__(config, shape, virtual)
        self.shape: StableDiffusion3Shape = shape
        hidden, dtype = shape.hidden, config.params_dtype
        assert shape.pooled is not None, "the model has no pooled captions"
        self.time_embedder = self._embedder(TIME_CHANNELS, hidden)
        self.pooled_embedder = self._embedder(shape.pooled, hidden)
        if self.pre_process:
            self.image_embedder = PatchEmbedder(shape.channels, hidden, shape.patch, shape.patch, dtype=dtype)
            table = torch.zeros(1, shape.grid**2, hidden, dtype=dtype)
            self.position_embedding = nn.Parameter(table, requires_grad=False)
            self.caption_embedder = nn.Linear(shape.caption, hidden, dtype=dtype)
        self.decoder = self._main_stack(layer_spec(shape))
        if self.post_process:
            self.output_modulation = Modulation(config, shape.conditioning, 2)
            self.output_layer = nn.Linear(hidden, shape.patch_dim, dtype=dtype)
            self._mark(self.output_layer)

    def prepare(self, documents: Sequence[Document]) -> StableDiffusion3Input:
        return StableDiffusion3Input.of(documents, self.shape, self.config.sequence_parallel)

    def forward(self, item: StableDiffusion3Input) -> torch.Tensor:
        shape = self.shape
        conditioning = self._embed_times(item.sigmas * shape.time_scale)
        conditioning = conditioning + self.pooled_embedder(item.pooled.to(self.config.params_dtype))
        hidden = self._embed_tokens(item) if self.pre_process else None
        streams = TwoStreams(images=item.images, texts=item.texts)
        hidden = self.decoder(hidden, None, context=conditioning, packed_seq_params=streams)
        if not self.post_process:
            return hidden
        images = hidden[: len(item.images.document_numbers)]
        scale, shift = self.output_modulation(conditioning)
        normalized = F.layer_norm(images, (shape.hidden,), eps=FINAL_EPSILON)
        modulated = modulate(normalized, item.images.document_numbers, 1 + scale, shift)[:, 0]
        output = self._gather(self.output_layer(modulated), is_replicated=True)
        return item.image_rows(output).float()

    def _embed_tokens(self, item: StableDiffusion3Input) -> torch.Tensor:
        """Return the hidden states of this rank's tokens, [X/cp + Y/cp, 1, hidden]."""
        dtype = self.config.params_dtype
        images = self.image_embedder(item.patches.to(dtype)) + F.embedding(item.positions, self.position_embedding[0])
        captions = self.caption_embedder(item.captions.to(dtype))
        return torch.cat([self._scatter(tokens[:, None]) for tokens in (images, captions)])


class PatchEmbedder(nn.Conv2d):
    """A convolution over non-overlapping patches, computed as a linear layer."""

    def forward(self, patches: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Map tokens from `patchify` to hidden states, [N, hidden]."""
        return F.linear(patches, self.weight.permute(0, 2, 3, 1).flatten(1), self.bias)


def _positions(grid: tuple[int, int], size: int) -> torch.Tensor:
    """Return the positions, int64 [N], of an image's tokens in the center of a square grid with `size` rows."""
    rows, columns = (torch.arange(length) + (size - length) // 2 for length in grid)
    return (rows[:, None] * size + columns).flatten()
