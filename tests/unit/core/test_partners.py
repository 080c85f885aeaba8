"""Which rank keeps a copy of which, and which copy a rank fetches after nodes are lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from megarl.core.partners import Transfer, deliveries, fetches, keepers, without_copy

NODES = {
    "one rank per node": [0, 1, 2],
    "two ranks per node": [3, 3, 5, 5],
    "fewer ranks on the last node": [0, 0, 0, 1],
    "more ranks on the last node": [0, 1, 1, 1],
}


def held_on(nodes: Sequence[int], *lost: int) -> list[set[int]]:
    """Return, for each rank, the ranks with copies on its node, if the copies on the lost nodes are gone."""
    copies = [(rank, rank) for rank in range(len(nodes))] + list(enumerate(keepers(nodes)))
    on_node = {node: {rank for rank, holder in copies if nodes[holder] == node} for node in nodes}
    return [set() if node in lost else on_node[node] for node in nodes]


def test_keepers_are_at_the_same_position_on_the_next_node() -> None:
    assert keepers([0, 0, 1, 1, 4, 4]) == [2, 3, 4, 5, 0, 1]
    assert keepers([0, 1]) == [1, 0]
    assert keepers([0, 0, 1]) == [2, 2, 0]
    assert keepers([0, 1, 1]) == [1, 0, 0]


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_keepers_are_on_other_nodes(nodes: list[int]) -> None:
    assert all(nodes[keeper] != nodes[rank] for rank, keeper in enumerate(keepers(nodes)))


def test_ranks_of_one_node_have_no_keepers() -> None:
    assert list(keepers([2, 2, 2])) == []
    assert deliveries(keepers([2, 2])) == []


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_ranks_of_a_lost_node_fetch_from_their_keepers(nodes: list[int]) -> None:
    assert fetches(held_on(nodes)) == [] and without_copy(held_on(nodes)) == []
    for lost in set(nodes):
        held = held_on(nodes, lost)
        assert without_copy(held) == []
        found = fetches(held)
        assert [transfer.rank for transfer in found] == [rank for rank, node in enumerate(nodes) if node == lost]
        for rank, source, destination in found:
            assert rank == destination and nodes[source] == nodes[keepers(nodes)[rank]]


def test_fetches_of_a_node_come_from_different_ranks() -> None:
    """All sources send the same number of copies."""
    sources = [transfer.source for transfer in fetches(held_on([0, 0, 1, 1], 0))]
    assert sorted(sources) == [2, 3]


@pytest.mark.parametrize(
    ("nodes", "lost", "expected"),
    [
        ([0, 1, 2, 3], (1, 2), [1]),  # node 3 has the keeper of rank 2
        ([0, 1, 2, 3], (0, 2), []),
        ([0, 0, 1, 1], (0, 1), [0, 1, 2, 3]),
    ],
)
def test_ranks_that_lost_both_copies_are_named(nodes: list[int], lost: Collection[int], expected: list[int]) -> None:
    assert without_copy(held_on(nodes, *lost)) == expected


def test_keepers_that_hold_a_copy_receive_none() -> None:
    nodes = [0, 1, 2]
    assert deliveries(keepers(nodes)) == [Transfer(0, 0, 1), Transfer(1, 1, 2), Transfer(2, 2, 0)]
    assert deliveries(keepers(nodes), held_on(nodes)) == []
    assert deliveries(keepers(nodes), held_on(nodes, 1)) == [Transfer(0, 0, 1)]
    assert deliveries((), held_on(nodes, 1)) == []
