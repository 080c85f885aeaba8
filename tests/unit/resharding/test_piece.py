from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from megarl.resharding.piece import Piece, Shard, contains, flat_span, intersect, num_elements, subtract

RECTANGLES = st.tuples(*[st.tuples(st.integers(0, 5), st.integers(1, 4)).map(lambda s: (s[0], s[0] + s[1]))] * 3)


def points(rectangle) -> set[tuple[int, ...]]:
    return set(product(*(range(start, stop) for start, stop in rectangle)))


@given(RECTANGLES, RECTANGLES)
def test_rectangle_operations_match_sets_of_points(a, b):
    common = intersect(a, b)
    assert (points(common) if common else set()) == points(a) & points(b)
    assert contains(a, b) == (points(b) <= points(a))
    assert num_elements(a) == len(points(a))


@given(RECTANGLES, RECTANGLES)
def test_subtract_is_disjoint_and_complete(a, b):
    common = intersect(a, b)
    if common is None:
        return
    parts = subtract(a, common)
    assert sum(num_elements(part) for part in parts) == len(points(a) - points(b))
    assert set().union(*map(points, parts)) == points(a) - points(b)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), st.data())
def test_flat_span_is_few_rectangles_in_order(shape, data):
    elements = list(product(*map(range, shape)))
    start = data.draw(st.integers(0, len(elements)))
    stop = data.draw(st.integers(start, len(elements)))
    parts = flat_span(shape, start, stop)
    assert [point for part in parts for point in product(*(range(*side) for side in part))] == elements[start:stop]
    assert len(parts) <= 2 * len(shape) - 1


def test_to_canonical_maps_part_of_a_piece():
    piece = Piece("c", ((2, 6), (0, 3)), "l", ((10, 14), (5, 8)))
    assert piece.to_canonical(((11, 13), (6, 7))) == ((3, 5), (1, 2))


def test_mismatched_params_names_each_difference():
    shard = Shard({"a": (2, 3), "b": (4,), "c": (1,)}, (), {"a": "float32", "b": "float32", "c": "bfloat16"})
    assert shard.mismatched_params({"c": ((1,), "bfloat16"), "b": ((4,), "float32"), "a": ((2, 3), "float32")}) == []
    assert shard.mismatched_params({"a": ((3, 2), "float32"), "b": ((4,), "float8_e4m3fn"), "d": ((), "float32")}) == [
        "a has shape [3, 2] (float32), but the family expects [2, 3] (float32)",
        "b has shape [4] (float8_e4m3fn), but the family expects [4] (float32)",
        "d [] (float32) does not belong to the family",
        "c is missing",
    ]
