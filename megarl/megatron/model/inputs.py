"""The input of this rank's part of the model from one microbatch, prepared once for all of its layers and chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megarl.core.token_batch import TokenBatch
from megarl.megatron.context_parallel import ContextShares, context_shares, sum_over_ranks
from megarl.megatron.model.head import HeadRequest
from megarl.megatron.model.layer_spec import PackedDocuments, uses_transformer_engine
from megarl.megatron.routes import Routes
from megarl.ops.packed_attention import documents_of
from megarl.ops.shared_attention import pack_mask


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The input of the model from one microbatch.

    tokens, positions   int64 [1, T/cp], those of this context-parallel rank
    attention           the description of which tokens attend to each other
    head                the rows to score among this rank's tokens
    routes              the experts of this rank's tokens, which dense models do not read
    rows                the batch with the fields of these rows only, N' of its N, which the loss reads
    row_numbers         int64 [N']: their numbers in the batch
    num_rows            N
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: PackedDocuments
    head: HeadRequest
    routes: Routes
    rows: TokenBatch
    row_numbers: torch.Tensor
    num_rows: int

    @classmethod
    def of(cls, batch: TokenBatch, sequence_parallel: bool) -> ModelInput:
        shares = context_shares(batch)
        numbers, places = shares.rows(batch)
        rows = batch.take_rows(numbers)
        return cls(
            tokens=batch.tokens[shares.own][None],
            positions=batch.positions[shares.own][None],
            attention=_attention(batch, shares),
            head=HeadRequest(places, rows.targets, rows.candidate_ids),
            routes=Routes.of(batch, shares.own, sequence_parallel),
            rows=rows,
            row_numbers=numbers,
            num_rows=len(batch.rows),
        )

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Join values of every context-parallel rank's rows, [N', …], to [N, …] in the order of the batch, on all
        ranks."""
        everybody = values.new_zeros(self.num_rows, *values.shape[1:])
        everybody[self.row_numbers] = values
        return sum_over_ranks(everybody)


def _attention(batch: TokenBatch, shares: ContextShares) -> PackedDocuments:
    """Return which tokens attend to each other. Transformer Engine attends within boundaries, where no prompt is
    shared; our own attention reads `documents`, and to the rotary embedding, which has the positions, the pack is one
    sequence."""
    num_tokens = len(batch.tokens)
    if uses_transformer_engine() and len(batch.document_tokens) == num_tokens:
        longest = int((batch.boundaries[1:] - batch.boundaries[:-1]).max())
        return PackedDocuments("thd", batch.boundaries, batch.boundaries, max_seqlen_q=longest, max_seqlen_kv=longest)
    whole = torch.tensor([0, num_tokens], dtype=torch.int32, device=batch.tokens.device)
    parts = (shares.own, shares.all) if len(shares.places) > 1 else ()
    describe = pack_mask if uses_transformer_engine() else documents_of
    return PackedDocuments(
        "thd",
        whole,
        whole,
        max_seqlen_q=num_tokens,
        max_seqlen_kv=num_tokens,
        documents=describe(batch.document_tokens, batch.boundaries, *parts),
        positions=batch.positions[shares.sequence],
    )
