"""Assigns a pack's tokens to context-parallel ranks.

In causal attention, early tokens in a document are cheap and late tokens are expensive. Megatron therefore splits a
sequence into 2·cp equal chunks and gives rank r chunks r and 2·cp − 1 − r. A pack contains many documents and must be
cut so that each document is balanced. Without a causal mask, consecutive tokens suffice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from megarl.core import device
from megarl.core.token_batch import TokenBatch


@dataclass(frozen=True, slots=True)
class ContextShares:
    """The tokens that each context-parallel rank holds from a pack. `places`, int64 [cp, T/cp], holds the pack
    positions of each rank's tokens, and `rank` is this rank's index."""

    places: torch.Tensor
    rank: int

    def to(self, target: torch.device) -> ContextShares:
        return ContextShares(device.send(self.places, target), self.rank)

    @property
    def local(self) -> torch.Tensor:
        """Pack positions of this rank's tokens, int64 [T/cp]."""
        return self.places[self.rank]

    @property
    def all(self) -> torch.Tensor:
        """Pack positions of the tokens on all ranks, in all-gather order, int64 [T]."""
        return self.places.flatten()

    @property
    def sequence(self) -> torch.Tensor:
        """Pack positions in the order of Megatron's chunks, int64 [T]. Rank r has chunks r and 2·cp − 1 − r."""
        if len(self.places) == 1:
            return self.places[0]
        first, second = self.places.chunk(2, dim=1)
        return torch.cat((first.flatten(), second.flip(0).flatten()))

    def rows(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch rows whose tokens this rank holds: the row indices in the batch, and the index of each row's
        token among this rank's tokens."""
        if len(self.places) == 1:
            return torch.arange(len(batch.rows), device=batch.rows.device), batch.rows
        index = torch.full((self.places.numel(),), -1, device=self.places.device)
        index[self.local] = torch.arange(len(self.local), device=index.device)
        token_index = index[batch.rows]
        numbers = (token_index >= 0).nonzero()[:, 0]
        return numbers, token_index[numbers]


def context_shares(batch: TokenBatch, splits_documents: bool) -> ContextShares:
    """Return the shares of a pack, in host memory. With `splits_documents`, each document is cut separately."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if size == 1:
        return ContextShares(torch.arange(len(batch.tokens))[None], rank)
    places = shares_of_documents(batch, size) if splits_documents else shares_of_pack(batch, size)
    return ContextShares(places, rank)


def consecutive_shares(num_tokens: int) -> ContextShares:
    """Return shares of consecutive tokens. The number of tokens must be a multiple of cp."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    return ContextShares(torch.arange(num_tokens).view(size, -1), rank)


def shares_of_documents(batch: TokenBatch, size: int) -> torch.Tensor:
    """Return each rank's pack positions, int64 [size, T/size]. Each document is cut into chunks separately, as in
    Transformer Engine and Megatron's gated delta net. Document lengths must be multiples of 2 · size."""
    documents = batch.document_tokens.tensor_split(batch.boundaries[1:-1].long())
    cut = [document.chunk(2 * size) for document in documents]
    places = [torch.cat([half for chunks in cut for half in (chunks[r], chunks[-1 - r])]) for r in range(size)]
    return torch.stack(places)


def shares_of_pack(batch: TokenBatch, size: int) -> torch.Tensor:
    """Return each rank's pack positions, int64 [size, T/size]. Neighboring tokens are in different chunks, so every
    chunk has equal parts from the beginning and end of each document, regardless of document lengths. T must be a
    multiple of 2 · size."""
    chunks = torch.arange(len(batch.tokens)).view(-1, 2 * size).T
    return torch.stack([torch.cat((chunks[r], chunks[-1 - r])) for r in range(size)])


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum values over the context-parallel ranks in a replica, in place."""
    if parallel_state.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(values, group=parallel_state.get_context_parallel_group())
    return values
