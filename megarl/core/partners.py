"""Chooses the ranks that keep copies of other nodes' state, so that a model on several nodes survives the loss of a
node."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Transfer(NamedTuple):
    """The copy of a rank's state that `source` sends to `destination`."""

    rank: int
    source: int
    destination: int


def keepers(nodes: Sequence[int]) -> Sequence[int]:
    """Return, for each rank, the rank that keeps a copy of its state: the rank at the same position on the next node.
    The result is empty if all ranks are on one node. nodes: the node number of each rank."""
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    if len(by_node) < 2:
        return ()
    first, *others = by_node.values()
    result = {}
    for ranks, next_ranks in zip([first, *others], [*others, first], strict=True):
        result |= {rank: next_ranks[position % len(next_ranks)] for position, rank in enumerate(ranks)}
    return [result[rank] for rank in range(len(nodes))]


def without_copy(held: Sequence[Collection[int]]) -> list[int]:
    """Return the ranks whose state has no copy on any node. held: for each rank, the ranks with copies on its node."""
    return sorted({*range(len(held))}.difference(*held))


def fetches(held: Sequence[Collection[int]]) -> list[Transfer]:
    """Return transfers that give every rank a copy on its own node. For `held`, see `without_copy`, whose result must
    be empty."""
    transfers = []
    for rank in range(len(held)):
        sources = [other for other, ranks in enumerate(held) if rank in ranks]
        if rank not in sources:
            transfers.append(Transfer(rank, sources[rank % len(sources)], rank))
    return transfers


def deliveries(keepers: Sequence[int], held: Sequence[Collection[int]] = ()) -> list[Transfer]:
    """Return the transfers of every rank's own copy to its keeper, except to keepers that hold it already. For `held`,
    see `without_copy`; by default, no keeper holds the copy."""
    return [Transfer(rank, rank, keeper) for rank, keeper in enumerate(keepers) if not held or rank not in held[keeper]]
