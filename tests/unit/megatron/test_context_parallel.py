"""Splitting a pack over context-parallel ranks: every token once, in Megatron's order, and balanced within each
document."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.core.score import NO_BASELINE
from megarl.core.token_batch import TokenBatch
from megarl.data.collate import collate
from megarl.megatron.context_parallel import ContextShares, shares_of_documents, shares_of_pack
from tests.packing import packing
from tests.samples import training_ref

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def batch_of(lengths: list[int], document_multiple: int, pack_multiple: int) -> TokenBatch:
    samples = []
    for i, length in enumerate(lengths):
        response = (7,) * length
        sample = Sample(
            f"{i}", Prompt(f"{i}", "", (5,)), response, (0.0,) * length, (True,) * length, (VersionRun(0, length),),
            "stop", "",
        )  # fmt: skip
        samples.append(training_ref(sample, 0.0, NO_BASELINE, 1.0))
    settings = packing(pack_multiple, False, document_multiple=document_multiple, token_budget=10_000)
    return collate(samples, settings)


def chunks_of(sequence: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Return a rank's tokens of one sequence under Megatron's rule."""
    chunks = sequence.chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


@given(LENGTHS, st.integers(2, 4))
def test_shares_of_pack_follow_megatrons_order(lengths, size):
    batch = batch_of(lengths, 1, 2 * size)
    places = shares_of_pack(batch, size)
    assert sorted(places.flatten().tolist()) == list(range(len(batch.tokens)))
    for rank in range(size):
        shares = ContextShares(places, rank)
        assert torch.equal(shares.local, chunks_of(shares.sequence, size, rank))


@given(LENGTHS, st.integers(2, 4))
def test_shares_of_pack_balance_every_document(lengths, size):
    batch = batch_of(lengths, 1, 2 * size)
    places = shares_of_pack(batch, size)
    start = 0
    for length in lengths:
        document = range(start, start + 1 + length)
        counts = [sum(int(place) in document for place in share) for share in places]
        # The numbers of the document's query-key pairs per rank differ by at most the keys of two queries.
        pairs = [sum(int(place) - start + 1 for place in share if int(place) in document) for share in places]
        assert max(counts) - min(counts) <= 2
        assert max(pairs) - min(pairs) <= 2 * len(document)
        start = document.stop


@given(LENGTHS, st.integers(2, 3))
def test_shares_of_documents_follow_megatrons_rule(lengths, size):
    batch = batch_of(lengths, 2 * size, 2 * size)
    places = shares_of_documents(batch, size)
    ends = batch.boundaries.tolist()
    for rank in range(size):
        documents = [torch.arange(a, b) for a, b in itertools.pairwise(ends)]
        assert torch.equal(places[rank], torch.cat([chunks_of(document, size, rank) for document in documents]))


def test_rows_of_all_ranks_cover_the_batch():
    batch = batch_of([5, 9, 2], 1, 4)
    places = shares_of_pack(batch, 2)
    token_by_row = {}
    for rank in range(2):
        shares = ContextShares(places, rank)
        for number, place in zip(*(x.tolist() for x in shares.rows(batch)), strict=True):
            token_by_row[number] = int(shares.local[place])
    assert token_by_row == dict(enumerate(batch.rows.tolist()))


@pytest.mark.parametrize("length", [1, 7])
def test_single_rank_keeps_the_pack_order(length):
    batch = batch_of([length], 1, 1)
    shares = ContextShares(torch.arange(len(batch.tokens))[None], 0)
    assert shares.sequence.tolist() == shares.local.tolist() == list(range(1 + length))
