"""Stable Diffusion 3's layers: images and captions have separate weights and attend to each other."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, checkpoint, gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megarl.megatron import parallel
from megarl.megatron.model.denoiser.inputs import DocumentStream
from megarl.megatron.model.denoiser.layers import FullAttention
from megarl.megatron.model.layer_spec import RMSNorm, submodules_of
from megarl.models.denoiser import StableDiffusion3Shape
from megarl.ops.full_attention import full_attention
from megarl.ops.modulation import modulate


@dataclass
class TwoStreams(PackedSeqParams):
    """The streams of image tokens and of caption tokens. Hidden states, [X/cp + Y/cp, …], contain a rank's image tokens
    followed by its caption tokens, so that every rank has the same number of each."""

    images: DocumentStream | None = None
    texts: DocumentStream | None = None


class Modulation(ColumnParallelLinear):
    """Shifts, scales and gates, as a linear function of the conditioning [D, conditioning]. Its weight is sharded over
    the tensor-parallel ranks, but all ranks receive all outputs, [D, parts · hidden]."""

    def __init__(self, config: TransformerConfig, conditioning: int, parts: int):
        whole = copy.copy(config)
        whole.sequence_parallel = False  # every rank has the whole input, whose gradient is summed over the ranks
        size = parts * config.hidden_size
        super().__init__(conditioning, size, config=whole, init_method=config.init_method, bias=True)  # pyright: ignore[reportArgumentType]  # init_method is not None
        self.num_parts = parts
        # A rank applies the outputs only to its own tokens. Without sequence parallelism, these are all tokens.
        self.is_partial = config.sequence_parallel

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # Megatron's linear layers also return a bias
        self, conditioning: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Return the parts for each document, [D, hidden] each."""
        local, _ = super().forward(F.silu(conditioning))
        # Megatron gathers along the first axis.
        columns = gather_from_sequence_parallel_region(local.T, tensor_parallel_output_grad=self.is_partial)
        return columns.T.chunk(self.num_parts, dim=-1)


class TwoStreamLayer(TransformerLayer):
    """A layer with joint attention of images and captions. The inputs and outputs of attention and MLPs are modulated.
    `self_attention` and `mlp` process the images."""

    self_attention: Any
    mlp: Any

    def __init__(self, config: TransformerConfig, shape: StableDiffusion3Shape, **options: Any):
        super().__init__(config, **options)
        layer = self.layer_number - 1
        self.is_last = shape.is_last(layer)
        self.modulation = Modulation(config, shape.conditioning, 9 if layer in shape.dual_layers else 6)
        self.caption_modulation = Modulation(config, shape.conditioning, 2 if self.is_last else 6)
        self.image_attention = self._attention() if layer in shape.dual_layers else None
        self.caption_attention: Any = self._attention(has_output=not self.is_last)
        self.caption_mlp: Any = None
        if self.is_last:
            if shape.qk_norm:
                # Freeze the norm of caption queries. This layer does not use them, because it does not update captions.
                self.caption_attention.q_layernorm.requires_grad_(False)
        else:
            size, matrices = config.ffn_hidden_size, submodules_of(self.submodules_config.mlp)
            self.caption_mlp = MLP(config, matrices, ffn_hidden_size=size, tp_group=self.tp_group)
        self.context_group = parallel.context_group()
        assert config.kv_channels is not None, "Megatron has not derived kv_channels"
        self.scale = 1 / math.sqrt(config.kv_channels)

    def _attention(self, has_output: bool = True) -> SelfAttention:
        submodules = submodules_of(self.submodules_config.self_attention)
        if not has_output:
            submodules = replace(submodules, linear_proj=IdentityOp)
        return SelfAttention(self.config, submodules, self.layer_number, pg_collection=self.pg_collection)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # Megatron passes these arguments by keyword
        self, hidden_states: torch.Tensor, *, context: torch.Tensor, packed_seq_params: TwoStreams, **_
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states, [X/cp + Y/cp, 1, hidden], and the context, which Megatron passes to the next layer.

        Args:
            context: [D, conditioning], the documents' embedded noise levels and pooled captions. Megatron preserves
                this argument's gradient if the layer is recomputed.
        """
        streams = packed_seq_params
        assert streams.images is not None and streams.texts is not None, "the streams were not prepared"
        of_image, of_caption = streams.images.document_numbers, streams.texts.document_numbers
        images, captions = hidden_states.tensor_split([len(of_image)])
        shift, scale, gate, *image_mlp = self.modulation(context)
        normalized = self._normalized(images)
        image_inputs = modulate(normalized, of_image, 1 + scale, shift)
        shift, scale, *caption_rest = self.caption_modulation(context)
        if self.is_last:
            shift, scale = scale, shift  # diffusers' class for the last layer has the other order
        caption_inputs = modulate(self._normalized(captions), of_caption, 1 + scale, shift)
        image_out, caption_out = self._attend(image_inputs, caption_inputs, streams)
        images = images + modulate(image_out, of_image, gate)
        if self.image_attention is not None:
            *image_mlp, shift, scale, gate = image_mlp
            inputs = modulate(normalized, of_image, 1 + scale, shift)
            out = self.image_attention(inputs, attention_mask=None, packed_seq_params=streams.images)
            images = images + modulate(_with_bias(out), of_image, gate)
        images = self._feed_forward(self.mlp, images, of_image, *image_mlp)
        if caption_out is not None:
            gate, *caption_mlp = caption_rest
            captions = captions + modulate(caption_out, of_caption, gate)
            captions = self._feed_forward(self.caption_mlp, captions, of_caption, *caption_mlp)
        return torch.cat([images, captions]), context

    def _attend(
        self, images: torch.Tensor, captions: torch.Tensor, streams: TwoStreams
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs of joint attention for images and captions. Both inputs are [tokens, 1, hidden]. The
        caption output is None in the last layer."""
        assert streams.images is not None and streams.texts is not None
        (image_query, *image_sources), (caption_query, *caption_sources) = (
            [x[:, 0] for x in attention.get_query_key_value_tensors(inputs)]
            for attention, inputs in ((self.self_attention, images), (self.caption_attention, captions))
        )
        key, value = (
            _joined(self._gathered(image), self._gathered(caption), streams.images.lengths, streams.texts.lengths)
            for image, caption in zip(image_sources, caption_sources, strict=True)
        )
        lengths = [sum(pair) for pair in zip(streams.images.lengths, streams.texts.lengths, strict=True)]
        image_rows, caption_rows = streams.images.query_lengths, streams.texts.query_lengths
        if self.is_last:
            out = full_attention(image_query, key, value, lengths, self.scale, image_rows)
            return _with_bias(self.self_attention.linear_proj(out.flatten(1)[:, None])), None
        query = _joined(image_query, caption_query, image_rows, caption_rows)
        rows = [sum(pair) for pair in zip(image_rows, caption_rows, strict=True)]
        out = full_attention(query, key, value, lengths, self.scale, rows).flatten(1)[:, None]
        parts = out.split([count for pair in zip(image_rows, caption_rows, strict=True) for count in pair])
        image_out = _with_bias(self.self_attention.linear_proj(torch.cat(parts[::2])))
        return image_out, _with_bias(self.caption_attention.linear_proj(torch.cat(parts[1::2])))

    def _gathered(self, tokens: torch.Tensor) -> torch.Tensor:
        return gather_from_sequence_parallel_region(tokens, group=self.context_group)

    def _feed_forward(
        self,
        mlp: torch.nn.Module,
        hidden: torch.Tensor,
        numbers: torch.Tensor,
        shift: torch.Tensor,
        scale: torch.Tensor,
        gate: torch.Tensor,
    ) -> torch.Tensor:
        def plain(inputs: torch.Tensor) -> torch.Tensor:
            return _with_bias(mlp(inputs))

        run = partial(checkpoint, plain, False) if self.recompute_mlp and self.training else plain
        out = run(modulate(self._normalized(hidden), numbers, 1 + scale, shift))
        return hidden + modulate(out, numbers, gate)

    def _normalized(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(hidden, hidden.shape[-1:], eps=self.config.layernorm_epsilon)


def layer_spec(shape: StableDiffusion3Shape) -> ModuleSpec:
    layer: Any = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
    layer.submodules.sharded_state_dict_keys_map = {}  # the norms have no weights
    attention = submodules_of(layer.submodules.self_attention)
    attention.core_attention = FullAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return ModuleSpec(TwoStreamLayer, params={"shape": shape}, submodules=layer.submodules)


def _joined(
    images: torch.Tensor, captions: torch.Tensor, image_lengths: Sequence[int], caption_lengths: Sequence[int]
) -> torch.Tensor:
    """Order tokens by document: its image, then its caption."""
    pairs = zip(images.split(list(image_lengths)), captions.split(list(caption_lengths)), strict=True)
    return torch.cat([part for pair in pairs for part in pair])


def _with_bias(output: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    """Add the bias, which Megatron's layers return separately."""
    out, bias = output
    return out if bias is None else out + bias
