"""Shares of context-parallel ranks in the tokens of a pack.

Early tokens of a document attend to little and late ones to much. Megatron therefore counts a sequence as 2·cp equal
chunks, of which rank r has chunks r and 2·cp − 1 − r. A pack is many sequences, and must be cut so that this balances
each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from megarl.core.token_batch import TokenBatch
from megarl.megatron.model.layer_spec import uses_transformer_engine


@dataclass(frozen=True, slots=True)
class ContextShares:
    """The shares of all context-parallel ranks in a pack.

    places   int64 [cp, T/cp]: the places of each rank's tokens in the pack
    rank     this rank
    """

    places: torch.Tensor
    rank: int

    @property
    def own(self) -> torch.Tensor:
        """The places of this rank's tokens in the pack, int64 [T/cp]."""
        return self.places[self.rank]

    @property
    def all(self) -> torch.Tensor:
        """The places of all ranks' tokens, rank after rank as an all-gather returns them, int64 [T]."""
        return self.places.flatten()

    @property
    def sequence(self) -> torch.Tensor:
        """The places in Megatron's order, of which rank r has chunks r and 2·cp − 1 − r, int64 [T]."""
        if len(self.places) == 1:
            return self.places[0]
        first, second = self.places.chunk(2, dim=1)
        return torch.cat((first.flatten(), second.flip(0).flatten()))

    def rows(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows whose token this rank has: their numbers in the batch, and the token's place among its
        tokens."""
        index = torch.full((self.places.numel(),), -1, device=self.places.device)
        index[self.own] = torch.arange(len(self.own), device=index.device)
        here = index[batch.rows]
        numbers = (here >= 0).nonzero()[:, 0]
        return numbers, here[numbers]


def context_shares(batch: TokenBatch) -> ContextShares:
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if size == 1:
        return ContextShares(torch.arange(len(batch.tokens), device=batch.tokens.device)[None], rank)
    places = shares_of_documents(batch, size) if uses_transformer_engine() else shares_of_pack(batch, size)
    return ContextShares(places, rank)


def shares_of_documents(batch: TokenBatch, size: int) -> torch.Tensor:
    """Return places, int64 [size, T/size], with each document cut into chunks by itself, as Transformer Engine does.
    The documents' lengths are multiples of 2 · size."""
    documents = batch.document_tokens.tensor_split(batch.boundaries[1:-1].long().cpu())
    cut = [document.chunk(2 * size) for document in documents]
    return torch.stack(
        [torch.cat([half for chunks in cut for half in (chunks[r], chunks[-1 - r])]) for r in range(size)]
    )


def shares_of_pack(batch: TokenBatch, size: int) -> torch.Tensor:
    """Return places, int64 [size, T/size], with neighbours in the pack in different chunks, so that each chunk has as
    much of the beginning of every document as of its end, whatever their lengths. T is a multiple of 2 · size."""
    chunks = torch.arange(len(batch.tokens), device=batch.tokens.device).view(-1, 2 * size).T
    return torch.stack([torch.cat((chunks[r], chunks[-1 - r])) for r in range(size)])


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum values over the context-parallel ranks of a replica, in place."""
    if parallel_state.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(values, group=parallel_state.get_context_parallel_group())
    return values
