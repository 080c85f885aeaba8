"""The tiled head compared with full logits, in value and gradient, at sizes that cross tile boundaries."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from megarl.ops import head_tile, output_layer
from megarl.ops.linear_head import log_prob_and_entropy
from tests.closeness import TOLERANCE, assert_close, assert_matches, expected, relative_error
from tests.head_reference import head_results, plain_head


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(output_layer, "CPU_TILE", (8, 16))
        monkeypatch.setattr(head_tile, "BLOCK", 48)
        yield


def inputs(num_tokens: int, hidden: int, padded: int, vocab: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(num_tokens, hidden, generator=generator).requires_grad_()
    w = torch.randn(padded, hidden, generator=generator).requires_grad_()
    y = torch.randint(vocab, (num_tokens,), generator=generator)
    gradients = torch.randn(num_tokens, 2, generator=generator)
    return h, w, y, gradients


def random_candidates(num_tokens: int, vocab: int, seed: int = 1) -> torch.Tensor:
    """Return candidate ids, int64 [N, 7], with padding in any column. Every third row is all padding, so that every
    token is a candidate."""
    generator = torch.Generator().manual_seed(seed)
    candidate_ids = torch.randint(-vocab // 2, vocab, (num_tokens, 7), generator=generator).clamp(min=-1)
    candidate_ids[::3] = -1
    return candidate_ids


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    num_tokens=st.integers(1, 30),
    vocab=st.integers(3, 60),
    padding=st.sampled_from([0, 1, 20]),
    temperature=st.sampled_from(["1", "0.7", "of tokens"]),
    has_bias=st.booleans(),
    truncated=st.booleans(),
)
def test_equals_full_logits(num_tokens, vocab, padding, temperature, has_bias, truncated):
    h, w, y, gradients = inputs(num_tokens, 12, vocab + padding, vocab)
    h = (h.detach() / 12).requires_grad_()  # gradients of nearly certain tokens would consist of rounding errors
    bias = torch.linspace(-1, 1, vocab + padding).requires_grad_() if has_bias else None
    candidate_ids = random_candidates(num_tokens, vocab) if truncated else None
    at = torch.linspace(0.5, 2, num_tokens) if temperature == "of tokens" else float(temperature)
    others = dict(targets=y, temperature=at, vocab_size=vocab, candidate_ids=candidate_ids)
    leaves = {"hidden": h, "weight": w} | ({"bias": bias} if has_bias else {})
    actual = head_results(log_prob_and_entropy(**leaves, **others), gradients, leaves)
    assert_matches(actual, lambda: plain_head(leaves, gradients, **others), "head")
    assert actual["weight"][vocab:].abs().sum() == 0


def test_truncated_policy_matches_worked_example():
    """Logits log 1 … log 5. Candidates per row: all; {2, 4}; {0} plus the target 1; the target only."""
    leaves = {"hidden": torch.ones(4, 1), "weight": torch.log(torch.arange(1.0, 6.0))[:, None]}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    candidate_ids = torch.tensor([[-1, -1], [4, 2], [-1, 0], [2, -1]])
    others = dict(targets=torch.tensor([3, 4, 1, 2]), temperature=1.0, vocab_size=5, candidate_ids=candidate_ids)
    gradients = torch.tensor([[0, 0], [1, 0], [1, 0], [1, 0]])
    shares = [[1 / 15, 2 / 15, 3 / 15, 4 / 15, 5 / 15], [3 / 8, 5 / 8], [1 / 3, 2 / 3], [1.0]]
    chosen = [math.log(p) for p in (4 / 15, 5 / 8, 2 / 3, 1.0)]
    entropies = [-sum(p * math.log(p) for p in row) for row in shares]
    gradient = [-1 / 3, 1 - 2 / 3, 1 - 1 - 3 / 8, 0.0, 1 - 5 / 8]
    exact = {
        "outputs": torch.tensor([chosen, entropies], dtype=torch.float64).t(),
        "weight": torch.tensor(gradient, dtype=torch.float64)[:, None],
    }
    actual = head_results(log_prob_and_entropy(**leaves, **others), gradients, leaves)
    assert_close(actual, exact, plain_head(leaves, gradients, **others), "worked example")


def test_large_logits_stay_finite():
    h, w, y, gradients = inputs(9, 12, 40, 40)
    leaves, others = (
        {"hidden": (h.detach() * 100).requires_grad_(), "weight": w},
        dict(targets=y, temperature=1.0, vocab_size=40),
    )
    actual = head_results(log_prob_and_entropy(**leaves, **others), gradients, leaves)
    exact, plain = expected(lambda: plain_head(leaves, gradients, **others))
    assert all(tensor.isfinite().all() for tensor in actual.values())
    assert_close(actual, {"outputs": exact["outputs"]}, plain, "large logits")


def test_entropy_of_large_equal_logits_is_precise():
    """Logits near 1e4 have a unit in the last place of 1e-3, yet the entropy log V of equal logits is exact."""
    scored = log_prob_and_entropy(torch.full((3, 1), 1e4), torch.ones(40, 1), torch.arange(3), 1.0, 40)
    assert relative_error(scored[:, 1], torch.full((3,), math.log(40), dtype=torch.float64)) <= TOLERANCE


def test_main_grad_accumulates_over_microbatches():
    h, w, y, gradients = inputs(19, 12, 40, 40)
    others = dict(targets=y, temperature=1.0, vocab_size=40)
    exact, plain = expected(lambda: plain_head({"hidden": h, "weight": w}, gradients, **others))
    w.main_grad = torch.ones_like(w)
    for part in (slice(0, 11), slice(11, 19)):
        (log_prob_and_entropy(h[part], w, y[part], 1.0, 40) * gradients[part]).sum().backward()
        assert w.grad_added_to_main_grad
    assert_close({"weight": w.main_grad - 1}, {"weight": exact["weight"]}, plain, "main_grad")


def test_frozen_weight_costs_no_gradient_computation():
    h, w, y, gradients = inputs(9, 12, 40, 40)
    expected = torch.autograd.grad((log_prob_and_entropy(h, w, y, 1.0, 40) * gradients).sum(), h)[0]
    scored = log_prob_and_entropy(h, w.detach(), y, 1.0, 40)
    with FlopCounterMode(display=False) as counter:
        actual = torch.autograd.grad((scored * gradients).sum(), h)[0]
    assert torch.equal(actual, expected)
    assert counter.get_total_flops() == 2 * 2 * 9 * 12 * 40  # recomputed logits and the gradient of the hidden states


def test_saves_inputs_and_two_numbers_per_token():
    h, w, y, _ = inputs(21, 12, 64, 50)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        log_prob_and_entropy(h, w, y, 1.0, 50)
    assert sorted(tuple(x.shape) for x in saved) == [(21,), (21,), (21,), (21, 12), (64, 12)]


def test_empty_batch_has_empty_output():
    h, w, y, _ = inputs(0, 12, 40, 40)
    scored = log_prob_and_entropy(h, w, y, 1.0, 40)
    assert scored.shape == (0, 2)
    assert torch.autograd.grad(scored.sum(), w)[0].abs().max() == 0


@settings(deadline=None, max_examples=30, derandomize=True)
@given(num_tokens=st.integers(1, 40), hidden=st.integers(8, 64), vocab=st.integers(3, 80), padding=st.integers(0, 20))
def test_bfloat16_is_accurate_within_its_precision(num_tokens, hidden, vocab, padding):
    """Only gradients of logits are rounded to 8 bits; logits, and sums over tokens and vocabulary, are not."""
    h, w, y, gradients = inputs(num_tokens, hidden, vocab + padding, vocab)
    leaves = {"hidden": h.detach() / hidden**0.5, "weight": w.detach()}
    leaves = {name: leaf.bfloat16().requires_grad_() for name, leaf in leaves.items()}
    leaves["weight"].main_grad = torch.zeros_like(w)
    others = dict(targets=y, temperature=1.0, vocab_size=vocab)
    scored = log_prob_and_entropy(**leaves, **others)
    (scored * gradients).sum().backward()
    assert scored.dtype == torch.float32
    of_weight = leaves["weight"].main_grad.bfloat16()
    actual = {"outputs": scored.detach(), "hidden": leaves["hidden"].grad, "weight": of_weight}
    assert_matches(actual, lambda: plain_head(leaves, gradients, **others), "head")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("has_bias", [False, True])
def test_bfloat16_logits_match_a_bfloat16_product(temperature, has_bias):
    """The factors have few bits, so that their sums are exact in float32 and both sides round once, identically."""
    generator = torch.Generator().manual_seed(0)
    h, w, y, gradients = inputs(30, 24, 50, 47)
    h, w = (torch.randint(-8, 9, x.shape, generator=generator).bfloat16().requires_grad_() for x in (h, w))
    bias = torch.randint(-4, 5, (50,), generator=generator).bfloat16().requires_grad_() if has_bias else None
    leaves = {"hidden": h, "weight": w} | ({"bias": bias} if has_bias else {})
    others = dict(targets=y, temperature=temperature, vocab_size=47)
    actual = head_results(log_prob_and_entropy(**leaves, **others, logits_dtype=torch.bfloat16), gradients, leaves)
    assert_matches(actual, lambda: plain_head(leaves, gradients, torch.bfloat16, **others), "head")
    unrounded = plain_head(leaves, gradients, **others)["outputs"]
    assert relative_error(unrounded, actual["outputs"]) > 1e-3


def test_bfloat16_gradients_accumulate_in_float32():
    """In bfloat16, a sum of equal numbers stops growing after 256 of them."""
    count = 1024
    h, w = torch.ones(count, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    w.main_grad = torch.zeros(2, 1)
    log_prob_and_entropy(h, w, torch.zeros(count, dtype=torch.long), 1.0, 2)[:, 0].sum().backward()
    assert w.main_grad.flatten().tolist() == [count / 2, -count / 2]


def test_wrong_shapes_are_rejected():
    with pytest.raises(ValueError, match="expected hidden"):
        log_prob_and_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.long), 1.0, 5)
    with pytest.raises(ValueError, match="expected candidate_ids"):
        y, candidate_ids = torch.zeros(3, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long)
        log_prob_and_entropy(torch.zeros(3, 4), torch.zeros(5, 4), y, 1.0, 5, candidate_ids=candidate_ids)
