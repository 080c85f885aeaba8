"""check_plan must detect every defect that is injected into a valid plan."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest

from megarl.resharding.families import megatron_holders, vllm_holders
from megarl.resharding.piece import Place
from megarl.resharding.planning.check import PlanError, check_plan
from megarl.resharding.planning.plan import Bucket, Link, Move, Padding, Plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import ordered
from tests.unit.resharding.cases import config_of, layout_of

CONFIG = config_of(num_attention_heads=4, num_key_value_heads=4, intermediate_size=16, vocab_size=37)
SOURCES = megatron_holders(CONFIG, layout_of(tp=4))
# Two engines with two workers each are on another node, which each byte enters once and in which it is forwarded.
DESTINATIONS = [replace(holder, node=1) for holder in vllm_holders(CONFIG, 2, 2)]
PLAN = make_plan(SOURCES, DESTINATIONS)
MOVES = [(i, j) for i, bucket in enumerate(PLAN.buckets) for j in range(len(bucket.moves))]


def move_at(position: tuple[int, int]) -> Move:
    bucket, move = position
    return PLAN.buckets[bucket].moves[move]


def position(parameter: str, count: int = 0) -> tuple[int, int]:
    """Return the position of the move with index `count` among the moves that write into the parameter."""
    return [at for at in MOVES if move_at(at).destination.parameter == parameter][count]


def with_bucket(index: int, *buckets: Bucket) -> Plan:
    return replace(PLAN, buckets=(*PLAN.buckets[:index], *buckets, *PLAN.buckets[index + 1 :]))


def with_move(at: tuple[int, int], *moves: Move) -> Plan:
    """Replace the move at a position by `moves` with the same number of bytes."""
    bucket = PLAN.buckets[at[0]]
    return with_bucket(at[0], replace(bucket, moves=(*bucket.moves[: at[1]], *moves, *bucket.moves[at[1] + 1 :])))


def changed(at: tuple[int, int], **changes) -> Plan:
    return with_move(at, move_at(at)._replace(**changes))


def shifted(place: Place, axis: int, by: int) -> Place:
    rectangle = tuple((a + by, b + by) if i == axis else (a, b) for i, (a, b) in enumerate(place.rectangle))
    return place._replace(rectangle=rectangle)


def assert_rejected(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(plan, SOURCES, DESTINATIONS)


def test_valid_plan_passes():
    assert any(bucket.forwards for bucket in PLAN.buckets)
    check_plan(PLAN, SOURCES, DESTINATIONS)


@pytest.mark.parametrize("index", [0, len(PLAN.buckets) - 1])
def test_dropped_or_duplicated_bucket_is_detected(index):
    bucket = PLAN.buckets[index]
    assert_rejected(with_bucket(index), "elements are never written")
    assert_rejected(with_bucket(index, bucket, bucket), "written twice")


@pytest.mark.parametrize("at", [MOVES[0], MOVES[7], MOVES[-1]])
def test_dropped_or_duplicated_move_is_detected(at):
    assert_rejected(with_move(at), "a bucket declares num_bytes=")
    index, bucket = at[0], PLAN.buckets[at[0]]
    moves = bucket.moves[: at[1]] + bucket.moves[at[1] + 1 :]
    one = 4 * (bucket.num_bytes // 4 - sum(elements(move) for move in moves))
    assert_rejected(with_bucket(index, replace(bucket, moves=moves, num_bytes=bucket.num_bytes - one)), "never written")
    doubled = replace(bucket, moves=(*bucket.moves, move_at(at)), num_bytes=bucket.num_bytes + one)
    assert_rejected(with_bucket(index, doubled), "written twice")


def elements(move: Move) -> int:
    size = 1
    for start, stop in move.source.rectangle:
        size *= stop - start
    return size


def test_dropped_or_duplicated_link_is_detected():
    index, bucket = next((i, bucket) for i, bucket in enumerate(PLAN.buckets) if bucket.forwards)
    edited = partial(replace, bucket)
    assert_rejected(with_bucket(index, edited(forwards=bucket.forwards[1:])), "elements are never written")
    assert_rejected(with_bucket(index, edited(forwards=(*bucket.forwards, bucket.forwards[0]))), "written twice")
    assert_rejected(with_bucket(index, edited(links=(*bucket.links, bucket.links[0]))), "written twice")
    assert_rejected(
        with_bucket(index, edited(links=bucket.forwards, forwards=bucket.links)),
        "forwards elements that it has not received",
    )


def test_forwarding_before_arrival_is_detected():
    """Forwarding is moved from the receiving bucket to a separate one."""
    index, bucket = next((i, bucket) for i, bucket in enumerate(PLAN.buckets) if bucket.forwards)
    again = tuple(Move(move.destination, move.destination, "float32", "float32") for move in bucket.moves)
    first, second = replace(bucket, forwards=()), replace(bucket, links=bucket.forwards, forwards=(), moves=again)
    check_plan(with_bucket(index, first, second), SOURCES, DESTINATIONS)
    assert_rejected(with_bucket(index, second, first), "forwards elements that it has not received")


def test_order_must_contain_every_hop_once():
    plan = ordered(PLAN)
    check_plan(plan, SOURCES, DESTINATIONS)
    first = plan.order[0]
    assert_rejected(replace(plan, order=plan.order[1:]), rf"the order contains {re.escape(str(first))} 0 times")
    assert_rejected(replace(plan, order=(*plan.order, first)), rf"the order contains {re.escape(str(first))} 2 times")
    unknown = first._replace(link=Link(first.link.source, first.link.destination + 1))
    assert_rejected(replace(plan, order=(unknown, *plan.order[1:])), "the order contains .* [02] times")


def test_order_with_early_forwarding_is_detected():
    plan = ordered(PLAN)
    index = next(i for i, hop in enumerate(plan.order) if hop.link.source >= plan.num_sources)
    early = (plan.order[index], *plan.order[:index], *plan.order[index + 1 :])
    assert_rejected(replace(plan, order=early), "forwards elements that it has not received")


def test_unknown_holders_are_detected():
    bucket = PLAN.buckets[0]
    for link in (Link(0, 99), Link(0, 0)):
        assert_rejected(
            with_bucket(0, replace(bucket, links=(link,))), f"{link.destination} is not the index of a dest"
        )
    assert_rejected(with_bucket(0, replace(bucket, links=(Link(-1, 4),))), "-1 is not the index of a holder")
    assert_rejected(replace(PLAN, nodes=(0,) * len(PLAN.nodes)), "was made for different holders, nodes or devices")
    with pytest.raises(PlanError, match="was made for different holders, nodes or devices"):
        check_plan(PLAN, SOURCES[::-1], DESTINATIONS)


def test_wrong_padding_is_detected():
    [*others, last] = PLAN.padding
    assert_rejected(replace(PLAN, padding=tuple(others)), "elements are never written")
    assert_rejected(replace(PLAN, padding=(*PLAN.padding, last)), "written twice")
    fill = Padding((len(SOURCES),), (Place("model.norm.weight", ((0, 3),)),))
    assert_rejected(replace(PLAN, padding=(*PLAN.padding, fill)), "zeroes elements that are not padding")


@pytest.mark.parametrize("axis", [0, 1])
def test_source_place_outside_its_piece_is_detected(axis):
    at = position("model.layers.1.mlp.down_proj.weight")
    assert_rejected(changed(at, source=shifted(move_at(at).source, axis, 1)), "source does not have")


def test_source_place_shifted_within_its_piece_is_detected():
    """Two halves of the rows are swapped; shapes and sizes are correct."""
    at = position("model.layers.0.input_layernorm.weight")
    move = move_at(at)
    low, high = (Place(move.source.parameter, ((start, start + 6),)) for start in (0, 6))
    to_low, to_high = (Place(move.destination.parameter, ((start, start + 6),)) for start in (0, 6))
    check_plan(
        with_move(at, move._replace(source=low, destination=to_low), move._replace(source=high, destination=to_high)),
        SOURCES,
        DESTINATIONS,
    )
    assert_rejected(
        with_move(at, move._replace(source=high, destination=to_low), move._replace(source=low, destination=to_high)),
        "the source sends .*, but the destination stores",
    )


def test_swapped_key_and_value_are_detected():
    rows = [
        move_at(at) for at in MOVES if move_at(at).destination.parameter == "model.layers.0.self_attn.qkv_proj.weight"
    ]
    key = next(move for move in rows if move.source.rectangle[0] == (2, 4))
    at = next(at for at in MOVES if move_at(at) == key)
    value = Place(key.source.parameter, ((4, 6), key.source.rectangle[1]))
    assert_rejected(changed(at, source=value), "the source sends .*v_proj.*, but the destination stores .*k_proj")


def test_shifted_destination_place_is_detected():
    at = position("model.embed_tokens.weight")
    assert_rejected(changed(at, destination=shifted(move_at(at).destination, 0, 1)), "the source sends|does not store")


def test_another_tensor_of_the_same_shape_is_detected():
    at = position("model.layers.0.input_layernorm.weight")
    other = move_at(at).source._replace(parameter="chunk0.decoder.layers.1.input_layernorm.weight")
    assert_rejected(changed(at, source=other), "the source sends")


def test_unknown_parameters_are_detected():
    move = move_at(MOVES[0])
    assert_rejected(changed(MOVES[0], source=move.source._replace(parameter="nothing")), "source does not have")
    assert_rejected(changed(MOVES[0], destination=move.destination._replace(parameter="nothing")), "does not store")


@pytest.mark.parametrize("end", ["source_dtype", "destination_dtype"])
def test_undeclared_cast_is_detected(end):
    assert_rejected(changed(MOVES[0], **{end: "bfloat16"}), "is float32, but the move declares bfloat16")
