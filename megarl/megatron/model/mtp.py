"""The multi-token prediction (MTP) layer on the last pipeline stage (section 2.2 of arXiv 2412.19437).

It predicts the token after the next one from a token's hidden state and the next token. Its loss has no gradient in the
rest of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR, MTP_GRAD_NORM_GROUP
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    checkpoint,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.core.token_batch import TokenBatch
from megarl.megatron import parallel
from megarl.megatron.model.layer_spec import PackedDocuments, layer_spec, norm_class
from megarl.megatron.routes import model_of
from megarl.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class MtpInput:
    """The layer's input and targets in one microbatch.

    Attributes:
        tokens: int64 [T/cp], the token that follows each of this rank's tokens.
        attention: as in ModelInput.
        targets: int64 [N'], for each of this rank's rows, the token after the row's own target.
        weight: float32 [N'], the target's share of the update's loss; 0 if no token of the sample follows.
    """

    tokens: torch.Tensor
    attention: PackedDocuments
    targets: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, batch: TokenBatch, local: torch.Tensor, rows: torch.Tensor, attention: PackedDocuments) -> MtpInput:
        """Prepare a microbatch whose documents share no tokens. `local`, int64 [T/cp], holds the pack positions of this
        rank's tokens, and `rows`, int64 [N'], the indices of its rows in the batch."""
        follows = (batch.rows.diff() == 1) & (batch.row_sample.diff() == 0)
        weight = F.pad(batch.weight[1:] * follows, (0, 1))
        return cls(batch.tokens.roll(-1)[local], attention, batch.targets.roll(-1)[rows], weight[rows])


class MtpLayer(MegatronModule):
    """A projection of a token's hidden state and the next token's embedding, and a decoder layer. Parameters have the
    names of Megatron's MultiTokenPredictionLayer."""

    def __init__(self, config: TransformerConfig, shape: ModelShape, fused: bool):
        super().__init__(config)
        norm = norm_class(fused)
        sizes: dict[str, Any] = dict(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.enorm, self.hnorm, self.final_layernorm = norm(**sizes), norm(**sizes), norm(**sizes)
        assert config.init_method is not None, "TransformerConfig has not set init_method"
        self.eh_proj = ColumnParallelLinear(
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
        )
        spec = layer_spec(shape, shape.kind(shape.num_layers), fused)
        self.mtp_model_layer = build_module(spec, config=config, layer_number=1, is_mtp_layer=True)

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, angles: torch.Tensor | None, attention: PackedDocuments
    ) -> torch.Tensor:
        """Return the hidden states for the output layer, in the shape of `hidden` and `embedded`: [T/cp, 1, h], or this
        rank's part of it with sequence parallelism. `angles`: rotary angles; None with latent attention."""
        projected, _ = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        projected = gather_from_tensor_model_parallel_region(projected)
        if self.config.sequence_parallel:
            projected = scatter_to_sequence_parallel_region(projected)
        output, _ = self.mtp_model_layer(
            hidden_states=projected, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=attention
        )
        return self.final_layernorm(output)


class MtpBlock(MegatronModule):
    """The model's MTP layers. All supported models have one.

    Attributes:
        embedding: [V / tp, h], the rows of the model's embedding on this rank, available within `shared_embedding`.
    """

    embedding: torch.Tensor | None = None

    def __init__(self, config: TransformerConfig, shape: ModelShape, fused: bool):
        config = copy.copy(config)  # a copy, because this field would change the decoder and GPTModel
        config.mtp_num_layers = shape.mtp_layers
        super().__init__(config)
        self.layers = torch.nn.ModuleList([MtpLayer(config, shape, fused) for _ in range(shape.mtp_layers)])
        for parameter in self.parameters():  # clip the MTP gradient separately from the policy's
            setattr(parameter, GRAD_NORM_GROUP_ATTR, MTP_GRAD_NORM_GROUP)

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor | None, item: MtpInput) -> torch.Tensor:
        """Return the output layer's input for predicting the tokens after the next ones, given the decoder's output.
        Both have the shape [T/cp, 1, h], or this rank's part of it with sequence parallelism."""
        hidden, embedded = hidden.detach(), self._embed(item.tokens)
        if self.config.recompute_granularity != "full":
            return self.layers[0](hidden, embedded, angles, item.attention)
        # `checkpoint` computes gradients only if an argument requires a gradient.
        return checkpoint(
            lambda *states: self.layers[0](*states, angles, item.attention), False, hidden.requires_grad_(), embedded
        )

    @torch.no_grad()
    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens' embeddings, [T/cp, 1, h], or this rank's part with sequence parallelism."""
        assert self.embedding is not None, "the block was called outside shared_embedding"
        size = len(self.embedding)
        index = tokens - size * parallel_state.get_tensor_model_parallel_rank()
        is_inside = (index >= 0) & (index < size)
        rows = F.embedding(index.where(is_inside, 0), self.embedding) * is_inside[:, None]
        if self.config.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(rows)[:, None]
        return reduce_from_tensor_model_parallel_region(rows)[:, None]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the sharded state. Megatron's own method treats all parameters in a ModuleList as replicated."""
        state: dict[str, Any] = {}
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, MtpLayer)
            state |= layer.sharded_state_dict(f"{prefix}layers.{i}.", sharded_offsets, metadata)
        return state


def mtp_of(model: GPTModel) -> MtpBlock | None:
    """Return a chunk's MTP layers; None if it has none."""
    return getattr(model, "mtp", None)


def has_trained_mtp(chunks: Sequence[DistributedDataParallel]) -> bool:
    """Return whether this rank has MTP layers that are trained."""
    block = mtp_of(model_of(chunks[-1]))
    return block is not None and block.is_trained


@contextmanager
def shared_embedding(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Return a context manager that gives the last stage a copy of the first stage's embedding. Collective over all
    ranks. The parameters must be complete."""
    first, last = model_of(chunks[0]), model_of(chunks[-1])
    weight = first.embedding.word_embeddings.weight.detach() if parallel.is_first_stage(None) else None
    block = mtp_of(last) if parallel.is_last_stage(None) else None
    if (weight is None) != (block is None):  # first and last stage are on different ranks
        if weight is None:
            head: Any = last.output_layer
            weight = torch.empty_like(head.weight)
        dist.broadcast(weight, group=parallel.first_and_last_stage(), group_src=0)
    if block is not None:
        block.embedding = weight
    yield
    if block is not None:
        block.embedding = None
