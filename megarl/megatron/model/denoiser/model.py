"""Z-Image's transformer (arXiv 2511.22699) as a megatron-core model."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megarl.megatron import parallel
from megarl.megatron.model.denoiser.inputs import DenoiserInput, DocumentStream
from megarl.megatron.model.denoiser.layers import layer_spec
from megarl.models.denoiser import TIME_CHANNELS, TIME_HIDDEN, DenoiserShape
from megarl.ops.packed_attention import take

FINAL_EPSILON = 1e-6


class Denoiser(MegatronModule):
    """This rank's layers for one virtual stage of the model.

    Three kinds of parameters are replicated on every tensor-parallel rank. Those applied only to a rank's own tokens
    are marked, so that Megatron sums their gradients under sequence parallelism. Those applied to all tokens, before
    the tokens are scattered, already have complete gradients. Those that embed the noise level are also replicated on
    every pipeline stage, and Megatron sums their gradients over the stages.

    Under context parallelism, each rank applies the parameters only to its own tokens, and DDP sums the gradients.
    """

    def __init__(self, config: TransformerConfig, shape: DenoiserShape, virtual: int | None):
        super().__init__(config)
        self.pre_process = parallel.is_first_stage(virtual)
        self.post_process = parallel.is_last_stage(virtual)
        self.vp_stage, self.model_type = virtual, ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = False
        self.shape = shape
        hidden, dtype = shape.hidden, config.params_dtype
        self.time_embedder = nn.Sequential(
            nn.Linear(TIME_CHANNELS, TIME_HIDDEN, dtype=dtype),
            nn.SiLU(),
            nn.Linear(TIME_HIDDEN, shape.conditioning, dtype=dtype),
        )
        self._mark(self.time_embedder, is_on_every_stage=True)
        if self.pre_process:
            self.image_embedder = nn.Linear(shape.patch_dim, hidden, dtype=dtype)
            self.caption_norm = nn.RMSNorm(shape.caption, eps=config.layernorm_epsilon, dtype=dtype)
            self.caption_embedder = nn.Linear(shape.caption, hidden, dtype=dtype)
            self.image_padding = nn.Parameter(torch.zeros(1, hidden, dtype=dtype))
            self.caption_padding = nn.Parameter(torch.zeros(1, hidden, dtype=dtype))
            self.noise_refiner = self._stack(shape.refiners, shape.conditioning)
            self.context_refiner = self._stack(shape.refiners, None)
        self.decoder = self._stack(get_num_layers_to_build(config, vp_stage=virtual), shape.conditioning)
        if self.post_process:
            self.output_modulation = nn.Linear(shape.conditioning, hidden, dtype=dtype)
            self.output_layer = nn.Linear(hidden, shape.patch_dim, dtype=dtype)
            self._mark(self.output_modulation)
            self._mark(self.output_layer)

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        """Set the hidden states from the previous stage. Megatron's schedules call this method."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def forward(self, item: DenoiserInput) -> torch.Tensor:
        """Return the velocity dx/dσ of all image tokens without padding, float32 [N, patch channels]; before the last
        stage, return the hidden states, [T/cp, 1, hidden]. Context-parallel ranks must compute the same loss from the
        velocity, because each rank propagates only the gradient of its own tokens."""
        conditioning = self._embed_noise_levels(item.sigmas)
        hidden = self._embed_tokens(item, conditioning) if self.pre_process else None
        hidden = self._run(self.decoder, hidden, item.joint, conditioning)
        if not self.post_process:
            return hidden
        scale = 1 + take(self.output_modulation(F.silu(conditioning)), item.joint.document_numbers)
        normalized = F.layer_norm(hidden[:, 0], (self.shape.hidden,), eps=FINAL_EPSILON)
        output = self._gather(self.output_layer(normalized * scale), is_replicated=True)
        return -item.image_rows(output).float()  # the model was trained to predict the opposite direction

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the sharded state dict of this rank's parameters. The first stage saves those that are on every
        stage."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for key, entry in state.items() if not self.pre_process else ():
            if key.startswith(f"{prefix}time_embedder."):
                entry.replica_id = (1, *entry.replica_id[1:])
        return state

    def _embed_noise_levels(self, sigmas: torch.Tensor) -> torch.Tensor:
        """Return the embedded noise levels, [D, conditioning]. The model's own time is 1 − σ, 1 for an image."""
        half = TIME_CHANNELS // 2
        # The order of operations matches diffusers, so that rounding is identical.
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=sigmas.device) / half)
        angles = (1 - sigmas)[:, None] * self.shape.time_scale * frequencies
        return self.time_embedder(torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.config.params_dtype))

    def _embed_tokens(self, item: DenoiserInput, conditioning: torch.Tensor) -> torch.Tensor:
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
        return stack(hidden, None, context=context, rotary_pos_emb=stream.angles, packed_seq_params=stream)

    def _scatter(self, tokens: torch.Tensor) -> torch.Tensor:
        return scatter_to_sequence_parallel_region(tokens) if self.config.sequence_parallel else tokens

    def _gather(self, tokens: torch.Tensor, is_replicated: bool) -> torch.Tensor:
        """Gather the tokens of all tensor- and context-parallel ranks. All tensor-parallel ranks then run the same
        computation, so their gradients must not be summed.

        Args:
            is_replicated: whether context-parallel ranks also run the same computation on the gathered tokens.
        """
        if self.config.sequence_parallel:
            tokens = gather_from_sequence_parallel_region(tokens, tensor_parallel_output_grad=False)
        summed, process_group = not is_replicated, parallel.context_group()
        return gather_from_sequence_parallel_region(tokens, tensor_parallel_output_grad=summed, group=process_group)

    def _stack(self, num_layers: int, conditioning: int | None) -> TransformerBlock:
        return TransformerBlock(
            self.config,
            TransformerBlockSubmodules([layer_spec(conditioning) for _ in range(num_layers)]),
            post_layer_norm=False,
            pre_process=self.pre_process,
            post_process=self.post_process,
            vp_stage=self.vp_stage,
        )

    def _mark(self, module: nn.Module, is_on_every_stage: bool = False) -> None:
        """Mark parameters that are replicated on every tensor-parallel rank but applied only to its own tokens."""
        for parameter in module.parameters():
            parallel.mark(parameter, sequence_parallel=self.config.sequence_parallel)
            if is_on_every_stage:
                # In a separate bucket, the data-parallel ranks shard the gradient in the same way on every stage. The
                # gradient norm counts only the first stage's copy.
                parallel.mark(parameter, pipeline_parallel=True, shared_embedding=True, shared=not self.pre_process)
