"""The base class of image models' transformers, built on megatron-core."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megarl.megatron import parallel
from megarl.megatron.model.denoiser.inputs import DenoiserInput, Document
from megarl.models.denoiser import TIME_CHANNELS, DenoiserShape

FINAL_EPSILON = 1e-6


class Denoiser(MegatronModule):
    """This rank's layers for one virtual stage of the model.

    Three kinds of parameters are replicated on every tensor-parallel rank. Those applied only to a rank's own tokens
    are marked, so that Megatron sums their gradients under sequence parallelism. Those applied to all tokens, before
    the tokens are scattered, already have complete gradients. Those that embed the noise level are also replicated on
    every pipeline stage, and Megatron sums their gradients over the stages.

    Under context parallelism, each rank applies the parameters only to its own tokens, and DDP sums the gradients.
    """

    decoder: TransformerBlock
    image_embedder: nn.Module
    caption_embedder: nn.Module
    time_embedder: nn.Sequential

    on_every_stage: ClassVar[Sequence[str]] = ("time_embedder",)
    """Names of the modules that are on every pipeline stage, because all layers use their outputs."""

    def __init__(self, config: TransformerConfig, shape: DenoiserShape, virtual: int | None):
        super().__init__(config)
        self.pre_process = parallel.is_first_stage(virtual)
        self.post_process = parallel.is_last_stage(virtual)
        self.vp_stage, self.model_type = virtual, ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = False
        self.shape = shape

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        """Set the hidden states from the previous stage. Megatron's schedules call this method."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def prepare(self, documents: Sequence[Document]) -> DenoiserInput:
        """Return the model's input for a microbatch."""
        raise NotImplementedError

    def forward(self, item: Any) -> torch.Tensor:
        """Return the velocity dx/dσ of all image tokens without padding, float32 [N, patch channels]; before the last
        stage, return the hidden states, [T/cp, 1, hidden]. Context-parallel ranks must compute the same loss from the
        velocity, because each rank propagates only the gradient of its own tokens."""
        raise NotImplementedError

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the sharded state dict of this rank's parameters. The first stage saves those that are on every
        stage."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        replicated = tuple(f"{prefix}{name}." for name in self.on_every_stage)
        for key, entry in state.items() if not self.pre_process else ():
            if key.startswith(replicated):
                entry.replica_id = (1, *entry.replica_id[1:])
        return state

    def _embed_times(self, times: torch.Tensor) -> torch.Tensor:
        """Embed the documents' times, [D] in the model's own scale, and return [D, conditioning]."""
        half = TIME_CHANNELS // 2
        # The order of operations matches diffusers, so that rounding is identical.
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=times.device) / half)
        angles = times[:, None] * frequencies
        return self.time_embedder(torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.config.params_dtype))

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

    def _main_stack(self, spec: ModuleSpec) -> TransformerBlock:
        return self._stack(get_num_layers_to_build(self.config, vp_stage=self.vp_stage), spec)

    def _stack(self, num_layers: int, spec: ModuleSpec) -> TransformerBlock:
        return TransformerBlock(
            self.config,
            TransformerBlockSubmodules([spec] * num_layers),
            post_layer_norm=False,
            pre_process=self.pre_process,
            post_process=self.post_process,
            vp_stage=self.vp_stage,
        )

    def _embedder(self, channels: int, hidden: int) -> nn.Sequential:
        """Return a network that embeds the noise level or the pooled caption, which every stage needs."""
        dtype = self.config.params_dtype
        embedder = nn.Sequential(
            nn.Linear(channels, hidden, dtype=dtype),
            nn.SiLU(),
            nn.Linear(hidden, self.shape.conditioning, dtype=dtype),
        )
        for parameter in embedder.parameters():
            # Use a separate bucket, so that data-parallel ranks shard the gradient in the same way on every stage.
            # The gradient norm counts only the first stage's copy.
            parallel.mark(parameter, pipeline_parallel=True, shared_embedding=True, shared=not self.pre_process)
        return embedder

    def _mark(self, module: nn.Module) -> None:
        """Mark replicated parameters that each tensor-parallel rank applies only to its own tokens."""
        for parameter in module.parameters():
            parallel.mark(parameter, sequence_parallel=self.config.sequence_parallel)
