"""Tiled divergences over the teacher's most probable tokens compared with full logits, in value and gradient."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.ops import head_tile, output_layer
from megarl.ops.top_tokens import SMALLEST_REST, TopTokens
from tests.closeness import LOSS_FLOOR, assert_close, assert_matches, expected, relative_error
from tests.divergence_case import KINDS, DivergenceCase
from tests.divergence_case import plain as plain_divergence
from tests.top_divergence_case import plain, plain_tokens, tiled, tiled_tokens


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(output_layer, "CPU_TILE", (8, 16))
        monkeypatch.setattr(head_tile, "BLOCK", 24)
        yield


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    k=st.sampled_from([1, 4, 17, 70]),
    num_tokens=st.integers(1, 30),
    vocab=st.integers(3, 60),
    padding=st.tuples(st.sampled_from([0, 20]), st.sampled_from([0, 20])),
    temperature=st.sampled_from([1.0, 0.7, None]),
    biases=st.tuples(st.booleans(), st.booleans()),
)
def test_equals_full_logits(kind, k, num_tokens, vocab, padding, temperature, biases):
    case = DivergenceCase.random(num_tokens, vocab, (vocab + padding[0], vocab + padding[1]), temperature, biases)
    actual = tiled(case, k, *kind)
    assert_matches(actual, partial(plain, case, k, *kind), f"{kind}, k {k}")
    assert actual["weight"][vocab:].abs().sum() == 0


@pytest.mark.parametrize("k", [1, 5, 43, 100])
def test_top_tokens_are_those_of_full_logits(k):
    case = DivergenceCase.random(19, 43, (43, 48), None, (False, True))
    top = tiled_tokens(case, k)
    exact, in_float32 = expected(partial(plain_tokens, case, k))
    assert torch.equal(top.ids, exact["ids"])
    actual = {"log_probs": top.log_probs, "rest": top.rest.clamp(min=-100)}
    assert_close(actual, *({name: values[name] for name in actual} for values in (exact, in_float32)), f"k {k}")
    assert all(map(torch.equal, *((x.ids, x.log_probs, x.rest) for x in (top, TopTokens.unpacked(top.packed)))))


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_all_tokens_give_the_exact_divergence(kind, beta):
    case = DivergenceCase.random(19, 43, (43, 43))
    assert_matches(tiled(case, 43, kind, beta), partial(plain_divergence, case, kind, beta), f"{kind}, beta {beta}")
    exact, fewer = (values["divergence"] for values in (plain_divergence(case, kind, beta), tiled(case, 5, kind, beta)))
    assert (fewer >= 0).all() and (fewer <= exact + LOSS_FLOOR).all() and relative_error(fewer, exact) > 0.01


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("factors", [(8.0, 1.0), (1.0, 8.0), (30.0, 30.0)])
def test_probability_of_a_tiny_rest_stays_exact(kind, beta, factors):
    """The rest's probability is below the resolution of 1 − Σ p under the student, the teacher, or both."""
    case = DivergenceCase.random(19, 43, (43, 43))
    student, teacher = (
        replace(layer, weight=layer.weight * factor)
        for layer, factor in zip((case.student, case.teacher), factors, strict=True)
    )
    case = replace(case, student=student, teacher=teacher)
    actual = tiled(case, 5, kind, beta)
    assert all(values.isfinite().all() for values in actual.values())
    assert_matches(actual, partial(plain, case, 5, kind, beta), f"{kind}, {factors}")


def test_tokens_outside_the_students_vocabulary_belong_to_the_rest():
    """The second of the teacher's three tokens has no row in the student's weight."""
    top = TopTokens.of(torch.tensor([[1, 7, 0]]), torch.tensor([[0.4, 0.3, 0.1]]).log())
    known = top.within(4)
    assert known.ids.tolist() == [[1, -1, 0]]
    assert known.log_probs.exp()[0].tolist() == pytest.approx([0.4, 0.0, 0.1])
    assert known.rest.exp().item() == pytest.approx(0.5)


def test_rest_of_rounded_log_probs_has_a_lower_bound():
    top = TopTokens.of(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0.75, 0.25], [0.75, 0.125]]).log())
    assert top.rest.tolist() == pytest.approx([math.log(SMALLEST_REST), math.log(0.125)])
