"""The tiled head against full logits, in value and gradient, at sizes that cross tile borders."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.ops import linear_head
from megarl.ops.linear_head import log_prob_and_entropy, plain_log_prob_and_entropy
from tests.closeness import relative_error


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(linear_head, "TOKENS_PER_TILE", 8)
    monkeypatch.setattr(linear_head, "VOCABULARY_PER_TILE", 16)


def inputs(num_tokens: int, hidden: int, padded: int, vocab: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(num_tokens, hidden, generator=generator).requires_grad_()
    w = torch.randn(padded, hidden, generator=generator).requires_grad_()
    y = torch.randint(vocab, (num_tokens,), generator=generator)
    gradients = torch.randn(num_tokens, 2, generator=generator)
    return h, w, y, gradients


@pytest.mark.parametrize(("num_tokens", "vocab", "padded"), [(1, 5, 5), (8, 16, 16), (21, 50, 64), (9, 33, 48)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_full_logits(num_tokens, vocab, padded, temperature):
    h, w, y, gradients = inputs(num_tokens, 12, padded, vocab)
    expected = torch.stack(plain_log_prob_and_entropy(h, w, y, temperature, vocab), -1)
    grad_h, grad_w = torch.autograd.grad((expected * gradients).sum(), (h, w))
    scored = log_prob_and_entropy(h, w, y, temperature, vocab)
    ours_h, ours_w = torch.autograd.grad((scored * gradients).sum(), (h, w))
    assert relative_error(scored.detach(), expected.detach()) <= 1e-5
    assert relative_error(ours_h, grad_h) <= 1e-5
    assert relative_error(ours_w, grad_w) <= 1e-5
    assert ours_w[vocab:].abs().max() == 0 if padded > vocab else True


def test_large_logits_stay_finite():
    h, w, y, gradients = inputs(9, 12, 40, 40)
    scored = log_prob_and_entropy(h * 100, w, y, 1.0, 40)
    expected = torch.stack(plain_log_prob_and_entropy(h * 100, w, y, 1.0, 40), -1)
    torch.testing.assert_close(scored, expected, rtol=1e-5, atol=1e-4)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad((scored * gradients).sum(), (h, w)))


def test_weight_gradient_goes_into_main_grad():
    h, w, y, gradients = inputs(9, 12, 40, 40)
    expected = torch.autograd.grad((log_prob_and_entropy(h, w, y, 1.0, 40) * gradients).sum(), w)[0]
    w.main_grad = torch.ones_like(w)
    (log_prob_and_entropy(h, w, y, 1.0, 40) * gradients).sum().backward()
    torch.testing.assert_close(w.main_grad, expected + 1)
    assert w.grad_added_to_main_grad


def test_a_frozen_weight_gets_no_gradient_and_costs_none():
    h, w, y, gradients = inputs(9, 12, 40, 40)
    expected = torch.autograd.grad((log_prob_and_entropy(h, w, y, 1.0, 40) * gradients).sum(), h)[0]
    scored = log_prob_and_entropy(h, w.detach(), y, 1.0, 40)
    with FlopCounterMode(display=False) as counter:
        ours = torch.autograd.grad((scored * gradients).sum(), h)[0]
    assert torch.equal(ours, expected)
    assert counter.get_total_flops() == 2 * 2 * 9 * 12 * 40  # the logits again, and the gradient of the hidden states


def test_no_rows_is_an_empty_batch():
    h, w, y, _ = inputs(0, 12, 40, 40)
    scored = log_prob_and_entropy(h, w, y, 1.0, 40)
    assert scored.shape == (0, 2)
    assert torch.autograd.grad(scored.sum(), w)[0].abs().max() == 0


def test_bfloat16_within_its_precision():
    h, w, y, _ = inputs(32, 64, 64, 64)
    with torch.no_grad():
        h, w = h.bfloat16(), w.bfloat16()
        scored = log_prob_and_entropy(h, w, y, 1.0, 64)
        expected = torch.stack(plain_log_prob_and_entropy(h.float(), w.float(), y, 1.0, 64), -1)
    assert scored.dtype == torch.float32
    assert relative_error(scored, expected) <= 1e-2  # logits are rounded to 8 bits before the sum


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="expected hidden"):
        log_prob_and_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.long), 1.0, 5)
