"""Prepares the denoiser's input for a microbatch, once for all layers and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Self

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.core.latents import Conditioning
from megarl.megatron import parallel
from megarl.megatron.context_parallel import consecutive_shares
from megarl.models.denoiser import DenoiserShape, ZImageShape


@dataclass(frozen=True, slots=True)
class Document:
    """One velocity to compute: a denoising step of a sample, for one branch of the guidance.

    Attributes:
        latents: float32 [channels, height, width], with noise.
        sigma: the noise level, from 0 (an image) to 1 (noise).
        caption: the text encoders' output.
    """

    latents: torch.Tensor
    sigma: float
    caption: Conditioning[torch.Tensor]

    def grid(self, patch: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of image tokens for the patch size `patch`."""
        return self.latents.shape[1] // patch, self.latents.shape[2] // patch

    def num_tokens(self, shape: DenoiserShape) -> int:
        """Return the number of tokens, including padding."""
        return shape.padded(prod(self.grid(shape.patch))) + shape.padded(len(self.caption.tokens))


@dataclass
class DocumentStream(PackedSeqParams):
    """Megatron's packed-sequence parameters for tokens that attend to all tokens in their document. The last document
    is filler, possibly empty. Each context-parallel rank holds T/cp consecutive tokens.

    Attributes:
        lengths: number of tokens in each document, including padding, with sum T.
        query_lengths: number of these tokens on this context-parallel rank.
        rotations: complex64 [T/cp, 1, d/2], the rotation of each pair of channels; None without a rotary position
            embedding.
        document_numbers: int64, the index of each token's document, for the tokens on this rank. Filler has the index
            of the document before it.
    """

    lengths: tuple[int, ...] = ()
    query_lengths: tuple[int, ...] = ()
    rotations: torch.Tensor | None = None
    document_numbers: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor], sequence_parallel: bool, is_rotated: bool = True) -> DocumentStream:
        """Build the stream. `parts` holds the rotations of each document's tokens, then those of the filler. With
        `is_rotated=False`, only the lengths of the parts matter."""
        lengths, target = tuple(map(len, parts)), parts[0].device
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        shares = consecutive_shares(len(numbers))
        numbers = numbers[shares.local]
        query_lengths = tuple(numbers.bincount(minlength=len(lengths)).tolist())
        numbers = numbers.clamp(max=len(lengths) - 2)
        return cls(
            "thd",
            lengths=lengths,
            query_lengths=query_lengths,
            rotations=parallel.context_part(torch.cat([*parts])) if is_rotated else None,
            document_numbers=(parallel.local_part(numbers) if sequence_parallel else numbers).to(target),
        )


@dataclass(frozen=True, slots=True)
class DenoiserInput:
    """The denoiser's input for one microbatch of D documents.

    The X image tokens and Y caption tokens include the padding of each document, which the document's tokens attend
    to. Filler at the end makes X and Y multiples of cp, or cp · tp with sequence parallelism. It attends only
    to itself, and its outputs are dropped.

    Attributes:
        patch: height and width of an image token.
        patches: float32 [X/cp, patch channels], the image tokens on this context-parallel rank.
        captions: [Y/cp, caption channels], the caption tokens on this rank.
        sigmas: float32 [D], the documents' noise levels.
        images, texts: the two kinds of tokens as separate streams.
    """

    documents: Sequence[Document]
    patch: int
    patches: torch.Tensor
    captions: torch.Tensor
    sigmas: torch.Tensor
    images: DocumentStream
    texts: DocumentStream

    @classmethod
    def of(cls, documents: Sequence[Document], shape: Any, sequence_parallel: bool) -> Self:
        """Pack the documents on their device. The model is faster if documents of equal size are consecutive."""
        raise NotImplementedError

    def unpatchify(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return each document's velocity, [channels, height, width], from image rows [N, patch channels]."""
        grids = [document.grid(self.patch) for document in self.documents]
        square = (self.patch, self.patch, -1)
        return [
            part.unflatten(0, grid).unflatten(2, square).permute(4, 0, 2, 1, 3).flatten(3, 4).flatten(1, 2)
            for part, grid in zip(rows.split(list(map(prod, grids))), grids, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class ZImageInput(DenoiserInput):
    """Z-Image's input. Images and captions are padded to a multiple of 32 tokens per document.

    Attributes:
        image_is_padding, caption_is_padding: bool [X/cp, 1] and [Y/cp, 1].
        joint: the tokens of both kinds; a document's image precedes its caption.
    """

    image_is_padding: torch.Tensor
    caption_is_padding: torch.Tensor
    joint: DocumentStream

    @classmethod
    def of(cls, documents: Sequence[Document], shape: ZImageShape, sequence_parallel: bool) -> ZImageInput:
        length = shape.token_multiple
        patches = [patchify(d.latents, shape.patch) for d in documents]
        image_is_padding = [_is_padding(rows, length) for rows in patches]
        caption_is_padding = [_is_padding(d.caption.tokens, length) for d in documents]
        target = documents[0].latents.device
        texts = [_rotations(_caption_positions(len(rows)), shape).to(target) for rows in caption_is_padding]
        images = [
            _rotations(_image_positions(document.grid(shape.patch), len(rows), len(text)), shape).to(target)
            for document, rows, text in zip(documents, image_is_padding, texts, strict=True)
        ]
        multiple = token_multiple(sequence_parallel)
        images, texts = filled(images, multiple), filled(texts, multiple)
        joint = [torch.cat(pair) for pair in zip(images, texts, strict=True)]
        return cls(
            documents=documents,
            patch=shape.patch,
            patches=share([_padded(rows, length, False) for rows in patches], multiple),
            captions=share([_padded(d.caption.tokens, length, False) for d in documents], multiple),
            image_is_padding=share(image_is_padding, multiple),
            caption_is_padding=share(caption_is_padding, multiple),
            sigmas=torch.tensor([d.sigma for d in documents], dtype=torch.float32, device=target),
            images=DocumentStream.of(images, sequence_parallel),
            texts=DocumentStream.of(texts, sequence_parallel),
            joint=DocumentStream.of(joint, sequence_parallel),
        )

    def join(self, images: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
        """Merge the hidden states of the image tokens [X, …] and caption tokens [Y, …] into the joint stream."""
        pairs = zip(images.split(self.images.lengths), captions.split(self.texts.lengths), strict=True)
        return torch.cat([part for pair in pairs for part in pair])

    def image_rows(self, joint: torch.Tensor) -> torch.Tensor:
        """Select the rows of the image tokens, [N, …], without padding, from the joint stream, [X + Y, …]."""
        documents = zip(joint.split(self.joint.lengths)[:-1], self.documents, strict=True)
        return torch.cat([rows[: prod(document.grid(self.patch))] for rows, document in documents])


def patchify(latents: torch.Tensor, patch: int) -> torch.Tensor:
    """Split latents [channels, height, width] into tokens, [N, patch · patch · channels]. The channel index varies
    fastest within a token."""
    rows = latents.unflatten(2, (-1, patch)).unflatten(1, (-1, patch))
    return rows.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)


def token_multiple(sequence_parallel: bool) -> int:
    """Return the number whose multiples are valid pack lengths."""
    tensor_ranks = parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel else 1
    return parallel_state.get_context_parallel_world_size() * tensor_ranks


def filled(parts: Sequence[torch.Tensor], multiple: int) -> list[torch.Tensor]:
    """Append a part of zeros, possibly empty, to the documents' parts, [L, …] each, so that their total length is a
    multiple of `multiple`."""
    return [*parts, parts[0].new_zeros(-sum(map(len, parts)) % multiple, *parts[0].shape[1:])]


def share(parts: Sequence[torch.Tensor], multiple: int) -> torch.Tensor:
    """Return this context-parallel rank's rows, [T/cp, …], of the documents' parts, [L, …] each."""
    return parallel.context_part(torch.cat(filled(parts, multiple)))


def _padded(rows: torch.Tensor, multiple: int, fill: bool) -> torch.Tensor:
    """Pad [L, …] with `fill` to the next multiple of `multiple` rows."""
    return F.pad(rows, (0, 0, 0, -len(rows) % multiple), value=fill)


def _is_padding(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """Pad the rows, and return which of the resulting rows are padding, bool [L, 1]."""
    return _padded(rows.new_zeros(len(rows), 1, dtype=torch.bool), multiple, True)


def _caption_positions(length: int) -> torch.Tensor:
    """Return the positions of a caption's tokens, [L, 3]. Padding continues the caption's positions."""
    return F.pad(torch.arange(1, length + 1)[:, None], (0, 2))


def _image_positions(grid: tuple[int, int], length: int, caption: int) -> torch.Tensor:
    """Return the positions of an image's tokens, [L, 3]. On the first axis, the image follows the `caption` tokens of
    its caption. All padding has position 0."""
    height, width = grid
    axes = (torch.tensor([caption + 1]), torch.arange(height), torch.arange(width))
    positions = torch.cartesian_prod(*axes).view(-1, 3)
    return F.pad(positions, (0, 0, 0, length - len(positions)))


def _rotations(positions: torch.Tensor, shape: ZImageShape) -> torch.Tensor:
    """Return the rotations for positions [L, 3], complex64 [L, 1, d/2], rounded as in diffusers."""
    angles = [
        positions[:, axis, None] * (1 / shape.rotary_base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))
        for axis, dim in enumerate(shape.rotary_axes)
    ]
    angles = torch.cat(angles, dim=-1).float()[:, None]
    return torch.polar(torch.ones_like(angles), angles)
