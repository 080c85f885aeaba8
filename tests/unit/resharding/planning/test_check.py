"""Defects planted into a good plan: each must be found."""

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
# Two engines of two workers, all on another node: each byte enters it once, and is handed on there.
DESTINATIONS = [replace(holder, node=1) for holder in vllm_holders(CONFIG, 2, 2)]
PLAN = make_plan(SOURCES, DESTINATIONS)
MOVES = [(i, j) for i, bucket in enumerate(PLAN.buckets) for j in range(len(bucket.moves))]


def move_at(position: tuple[int, int]) -> Move:
    bucket, move = position
    return PLAN.buckets[bucket].moves[move]


def position(parameter: str, count: int = 0) -> tuple[int, int]:
    """Returns the position of a move that writes into the parameter. count: how many such moves come before it."""
    return [at for at in MOVES if move_at(at).destination.parameter == parameter][count]


def with_bucket(index: int, *buckets: Bucket) -> Plan:
    return replace(PLAN, buckets=(*PLAN.buckets[:index], *buckets, *PLAN.buckets[index + 1 :]))


def with_move(at: tuple[int, int], *moves: Move) -> Plan:
    """The moves in place of the one at a position; as many bytes."""
    bucket = PLAN.buckets[at[0]]
    return with_bucket(at[0], replace(bucket, moves=(*bucket.moves[: at[1]], *moves, *bucket.moves[at[1] + 1 :])))


def changed(at: tuple[int, int], **changes) -> Plan:
    return with_move(at, move_at(at)._replace(**changes))


def shifted(place: Place, axis: int, by: int) -> Place:
    rectangle = tuple((a + by, b + by) if i == axis else (a, b) for i, (a, b) in enumerate(place.rectangle))
    return place._replace(rectangle=rectangle)


def refused(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(plan, SOURCES, DESTINATIONS)


def test_the_good_plan_passes():
    assert any(bucket.forwards for bucket in PLAN.buckets)
    check_plan(PLAN, SOURCES, DESTINATIONS)


@pytest.mark.parametrize("index", [0, len(PLAN.buckets) - 1])
def test_a_bucket_dropped_and_doubled(index):
    bucket = PLAN.buckets[index]
    refused(with_bucket(index), "elements are never written")
    refused(with_bucket(index, bucket, bucket), "written twice")


@pytest.mark.parametrize("at", [MOVES[0], MOVES[7], MOVES[-1]])
def test_a_move_dropped_and_doubled(at):
    refused(with_move(at), "a bucket says that it has")
    index, bucket = at[0], PLAN.buckets[at[0]]
    moves = bucket.moves[: at[1]] + bucket.moves[at[1] + 1 :]
    one = 4 * (bucket.num_bytes // 4 - sum(elements(move) for move in moves))
    refused(with_bucket(index, replace(bucket, moves=moves, num_bytes=bucket.num_bytes - one)), "never written")
    doubled = replace(bucket, moves=(*bucket.moves, move_at(at)), num_bytes=bucket.num_bytes + one)
    refused(with_bucket(index, doubled), "written twice")


def elements(move: Move) -> int:
    size = 1
    for start, stop in move.source.rectangle:
        size *= stop - start
    return size


def test_a_link_dropped_and_doubled():
    index, bucket = next((i, bucket) for i, bucket in enumerate(PLAN.buckets) if bucket.forwards)
    edited = partial(replace, bucket)
    refused(with_bucket(index, edited(forwards=bucket.forwards[1:])), "elements are never written")
    refused(with_bucket(index, edited(forwards=(*bucket.forwards, bucket.forwards[0]))), "written twice")
    refused(with_bucket(index, edited(links=(*bucket.links, bucket.links[0]))), "written twice")
    refused(with_bucket(index, edited(links=bucket.forwards, forwards=bucket.links)), "hands on what it has not received")


def test_what_is_handed_on_must_have_come_before():
    """A bucket of its own hands on, instead of the one that brings."""
    index, bucket = next((i, bucket) for i, bucket in enumerate(PLAN.buckets) if bucket.forwards)
    again = tuple(Move(move.destination, move.destination, "float32", "float32") for move in bucket.moves)
    first, second = replace(bucket, forwards=()), replace(bucket, links=bucket.forwards, forwards=(), moves=again)
    check_plan(with_bucket(index, first, second), SOURCES, DESTINATIONS)
    refused(with_bucket(index, second, first), "hands on what it has not received")


def test_the_order_is_of_everything_that_travels():
    """It is what a transport that sends goes by."""
    plan = ordered(PLAN)
    check_plan(plan, SOURCES, DESTINATIONS)
    first = plan.order[0]
    refused(replace(plan, order=plan.order[1:]), rf"the order has {re.escape(str(first))} 0 times")
    refused(replace(plan, order=(*plan.order, first)), rf"the order has {re.escape(str(first))} 2 times")
    unknown = first._replace(link=Link(first.link.source, first.link.destination + 1))
    refused(replace(plan, order=(unknown, *plan.order[1:])), "the order has .* [02] times")


def test_the_order_has_what_is_handed_on_after_its_arrival():
    plan = ordered(PLAN)
    index = next(i for i, hop in enumerate(plan.order) if hop.link.source >= plan.num_sources)
    early = (plan.order[index], *plan.order[:index], *plan.order[index + 1 :])
    refused(replace(plan, order=early), "hands on what it has not received")


def test_holders_that_are_not_there():
    bucket = PLAN.buckets[0]
    for link in (Link(0, 99), Link(0, 0)):
        refused(with_bucket(0, replace(bucket, links=(link,))), f"{link.destination} is not the number of a dest")
    refused(with_bucket(0, replace(bucket, links=(Link(-1, 4),))), "-1 is not the number of a holder")
    refused(replace(PLAN, nodes=(0,) * len(PLAN.nodes)), "for the same on other nodes")
    with pytest.raises(PlanError, match="for other holders"):
        check_plan(PLAN, SOURCES[::-1], DESTINATIONS)


def test_a_fill_dropped_doubled_and_over_weights():
    [*others, last] = PLAN.padding
    refused(replace(PLAN, padding=tuple(others)), "elements are never written")
    refused(replace(PLAN, padding=(*PLAN.padding, last)), "written twice")
    fill = Padding((len(SOURCES),), (Place("model.norm.weight", ((0, 3),)),))
    refused(replace(PLAN, padding=(*PLAN.padding, fill)), "fills elements that are not padding")


@pytest.mark.parametrize("axis", [0, 1])
def test_a_source_place_out_of_its_piece(axis):
    at = position("model.layers.1.mlp.down_proj.weight")
    refused(changed(at, source=shifted(move_at(at).source, axis, 1)), "source does not hold")


def test_a_source_place_within_its_piece_but_elsewhere():
    """Half of the rows, from the other half: shapes and volumes are right."""
    at = position("model.layers.0.input_layernorm.weight")
    move = move_at(at)
    low, high = (Place(move.source.parameter, ((start, start + 6),)) for start in (0, 6))
    to_low, to_high = (Place(move.destination.parameter, ((start, start + 6),)) for start in (0, 6))
    check_plan(
        with_move(at, move._replace(source=low, destination=to_low), move._replace(source=high, destination=to_high)),
        SOURCES,
        DESTINATIONS,
    )
    refused(
        with_move(at, move._replace(source=high, destination=to_low), move._replace(source=low, destination=to_high)),
        "at the source, .* at the destination",
    )


def test_key_and_value_exchanged():
    rows = [
        move_at(at) for at in MOVES if move_at(at).destination.parameter == "model.layers.0.self_attn.qkv_proj.weight"
    ]
    key = next(move for move in rows if move.source.rectangle[0] == (2, 4))
    at = next(at for at in MOVES if move_at(at) == key)
    value = Place(key.source.parameter, ((4, 6), key.source.rectangle[1]))
    refused(changed(at, source=value), "v_proj.* at the source, .*k_proj.* at the destination")


def test_a_shifted_destination_place():
    at = position("model.embed_tokens.weight")
    refused(changed(at, destination=shifted(move_at(at).destination, 0, 1)), "at the source|does not keep")


def test_another_tensor_of_the_same_shape():
    at = position("model.layers.0.input_layernorm.weight")
    other = move_at(at).source._replace(parameter="chunk0.decoder.layers.1.input_layernorm.weight")
    refused(changed(at, source=other), "at the source")


def test_unknown_parameters():
    move = move_at(MOVES[0])
    refused(changed(MOVES[0], source=move.source._replace(parameter="nothing")), "source does not hold")
    refused(changed(MOVES[0], destination=move.destination._replace(parameter="nothing")), "does not keep")


@pytest.mark.parametrize("end", ["source_dtype", "destination_dtype"])
def test_a_cast_that_is_not_named(end):
    refused(changed(MOVES[0], **{end: "bfloat16"}), "is float32, which the move does not say")
