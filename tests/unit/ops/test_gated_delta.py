"""The chunked gated delta rule and its convolution, compared with the recurrence and with transformers' layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from megarl.ops.gated_delta import gated_delta_rule, normalized, packed_convolution
from tests.closeness import relative_error
from tests.gated_delta_reference import convolution, recurrence

LENGTHS = [[2], [64], [7, 1, 130, 64, 65, 3], [5] * 4]
PRECISION = {torch.float32: 2e-5, torch.float64: 1e-12}
"""Relative error allowed in values and gradients. Products within a chunk sum 64 terms in another order."""


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def rule_inputs(num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, 3, *shape, generator=generator, dtype=torch.float64)

    query, key, value = normalized(random(8)), normalized(random(8)), random(5)
    decay, beta = -F.softplus(2 * random()), random().sigmoid()
    return [x.to(dtype).requires_grad_() for x in (query, key, value, decay, beta)]


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = relative_error(actual.double(), expected)
    assert error <= PRECISION[dtype], f"{error:.1e}"


@pytest.mark.parametrize("dtype", list(PRECISION), ids=str)
@pytest.mark.parametrize("continues", [False, True], ids=["from zero", "from states"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_rule_equals_recurrence(lengths, continues, dtype):
    inputs, boundaries = rule_inputs(sum(lengths), dtype), bounds(lengths)
    states = torch.randn(len(lengths), 3, 8, 5, generator=torch.Generator().manual_seed(1), dtype=dtype)
    states = states.requires_grad_() if continues else None
    inputs += [states] if continues else []
    exact = [x.detach().double().requires_grad_() for x in inputs]
    outputs = gated_delta_rule(*inputs[:5], boundaries, states)
    expected = recurrence(*exact[:5], boundaries, exact[5] if continues else None)
    weights = [torch.randn_like(x) for x in expected]
    for actual, right in zip(outputs, expected, strict=True):
        assert actual.dtype is dtype
        assert_near(actual, right, dtype)
    sum((x * w.to(dtype)).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    sum((x * w).sum() for x, w in zip(expected, weights, strict=True)).backward()
    for tensor, right in zip(inputs, exact, strict=True):
        assert_near(tensor.grad, right.grad, dtype)


def test_strong_decay_stays_finite():
    """The decay over a chunk underflows float32, and its inverse would overflow."""
    query, key, value, decay, beta = rule_inputs(130, torch.float32)
    decay = (decay.detach() - 20).requires_grad_()
    out, _ = gated_delta_rule(query, key, value, decay, beta, bounds([130]))
    expected, _ = recurrence(*(x.double() for x in (query, key, value, decay, beta)), bounds([130]))
    assert_near(out, expected, torch.float32)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, key, value, decay, beta))


def test_bfloat16_is_computed_in_float32():
    inputs = [x.detach().bfloat16() for x in rule_inputs(70, torch.float32)]
    out, states = gated_delta_rule(*inputs, bounds([70]))
    exact, _ = recurrence(*(x.double() for x in inputs), bounds([70]))
    assert out.dtype is torch.bfloat16 and states.dtype is torch.float32
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("dtype", list(PRECISION), ids=str)
@pytest.mark.parametrize("continues", [False, True], ids=["from zero", "from history"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_convolution_stops_at_document_borders(lengths, continues, dtype):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(sum(lengths), 6, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(6, 4, generator=generator, dtype=dtype, requires_grad=True)
    history = torch.randn(len(lengths), 3, 6, generator=generator, dtype=dtype) if continues else None
    exact = [x.detach().double().requires_grad_() for x in (inputs, weight)]
    actual = packed_convolution(inputs, weight, bounds(lengths), history)
    expected = convolution(*exact, bounds(lengths), None if history is None else history.double())
    assert_near(actual, expected, dtype)
    weights = torch.randn_like(expected)
    (actual * weights.to(dtype)).sum().backward()
    (expected * weights).sum().backward()
    for tensor, right in zip((inputs, weight), exact, strict=True):
        assert_near(tensor.grad, right.grad, dtype)


def test_ops_compute_the_layer_of_transformers():
    """A pack of documents, against transformers' layer on each document."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=24, linear_num_key_heads=2, linear_num_value_heads=4)
    config = Qwen3_5TextConfig(**sizes, linear_key_head_dim=8, linear_value_head_dim=12, num_hidden_layers=1)
    layer = Qwen3_5GatedDeltaNet(config, 0).double()
    lengths = [7, 130, 1, 65]
    hidden = torch.randn(sum(lengths), 24, dtype=torch.float64)
    packed = packed_layer(layer, hidden, bounds(lengths))
    weights = torch.randn_like(packed)
    ours = torch.autograd.grad((packed * weights).sum(), list(layer.parameters()))
    alone = torch.cat([layer(document[None])[0] for document in hidden.split(lengths)])
    theirs = torch.autograd.grad((alone * weights).sum(), list(layer.parameters()))
    # transformers computes the rule in float32.
    for actual, expected in zip((packed, *ours), (alone, *theirs), strict=True):
        assert_near(actual, expected, torch.float32)


def packed_layer(layer: Qwen3_5GatedDeltaNet, hidden: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
    mixed = packed_convolution(layer.in_proj_qkv(hidden), layer.conv1d.weight[:, 0], boundaries)
    query, key, value = mixed.split((layer.key_dim, layer.key_dim, layer.value_dim), 1)
    query, key = (normalized(x.unflatten(1, (-1, layer.head_k_dim))).repeat_interleave(2, 1) for x in (query, key))
    value = value.unflatten(1, (-1, layer.head_v_dim))
    decay = -layer.A_log.exp() * F.softplus(layer.in_proj_a(hidden) + layer.dt_bias)
    out, _ = gated_delta_rule(query, key, value, decay, layer.in_proj_b(hidden).sigmoid(), boundaries)
    gate = layer.in_proj_z(hidden).unflatten(1, (-1, layer.head_v_dim))
    return layer.out_proj(layer.norm(out, gate).flatten(1))
