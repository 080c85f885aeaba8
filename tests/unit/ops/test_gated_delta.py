"""The chunked gated delta rule and its convolution, compared with the recurrence and with transformers' layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from megarl.ops.gated_delta import gated_delta_rule, normalized, packed_convolution
from tests.closeness import assert_close, float64, limit
from tests.gated_delta_reference import convolution, recurrence

LENGTHS = [[2], [64], [7, 1, 130, 64, 65, 3], [5] * 4]
DTYPES = [torch.float32, torch.float64]


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def rule_inputs(num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, 3, *shape, generator=generator, dtype=torch.float64)

    query, key, value = normalized(random(8)), normalized(random(8)), random(5)
    decay, beta = -F.softplus(2 * random()), random().sigmoid()
    return [x.to(dtype) for x in (query, key, value, decay, beta)]


def results(
    compute: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the outputs in `dtype`, and the gradients of a weighted sum of them."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    outputs, generator = compute(*leaves), torch.Generator().manual_seed(2)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype) for x in outputs]
    gradients = torch.autograd.grad(sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)), leaves)
    names = [f"{kind} {i}" for kind, found in (("output", outputs), ("gradient", gradients)) for i in range(len(found))]
    return dict(zip(names, (*outputs, *gradients), strict=True))


def assert_same(
    compute: Callable[..., Sequence[torch.Tensor]],
    reference: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
) -> None:
    """Compare outputs and gradients with the reference, in the dtype of the inputs."""
    dtype = inputs[0].dtype
    actual = results(compute, inputs, dtype)
    assert {x.dtype for x in actual.values()} == {dtype}
    assert_close(actual, *(results(reference, inputs, kind) for kind in (torch.float64, dtype)), "rule", dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("continues", [False, True], ids=["from zero", "from states"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_rule_equals_recurrence(lengths, continues, dtype):
    inputs, boundaries = rule_inputs(sum(lengths), dtype), bounds(lengths)
    states = torch.randn(len(lengths), 3, 8, 5, generator=torch.Generator().manual_seed(1), dtype=dtype)
    inputs += [states] if continues else []
    rule, reference = (lambda *x, f=f: f(*x[:5], boundaries, *x[5:]) for f in (gated_delta_rule, recurrence))
    assert_same(rule, reference, inputs)


def test_strong_decay_stays_finite():
    """The decay over a chunk underflows float32, and its inverse would overflow."""
    inputs = rule_inputs(130, torch.float32)
    inputs[3] = inputs[3] - 20
    rule, reference = (lambda *x, f=f: f(*x, bounds([130])) for f in (gated_delta_rule, recurrence))
    actual = results(rule, inputs, torch.float32)
    exact, plain = (results(reference, inputs, dtype) for dtype in reversed(DTYPES))
    assert_close(actual, *({"output 0": x["output 0"]} for x in (exact, plain)), "strong decay")
    assert all(x.isfinite().all() for x in actual.values())


def test_bfloat16_is_computed_in_float32():
    inputs = rule_inputs(70, torch.bfloat16)
    out, states = gated_delta_rule(*inputs, bounds([70]))
    exact, plain = (recurrence(*(x.to(dtype) for x in inputs), bounds([70]))[0] for dtype in reversed(DTYPES))
    rounding = limit({"out": exact}, {"out": plain}) * exact.abs().max()
    assert out.dtype is torch.bfloat16 and states.dtype is torch.float32
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("continues", [False, True], ids=["from zero", "from history"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_convolution_stops_at_document_borders(lengths, continues, dtype):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(sum(lengths), 6, generator=generator, dtype=dtype)
    weight = torch.randn(6, 4, generator=generator, dtype=dtype)
    history = torch.randn(len(lengths), 3, 6, generator=generator, dtype=dtype) if continues else None

    def packed(*x: torch.Tensor) -> list[torch.Tensor]:
        return [packed_convolution(*x, bounds(lengths), history)]

    def reference(*x: torch.Tensor) -> list[torch.Tensor]:
        return [convolution(*x, bounds(lengths), None if history is None else history.to(x[0].dtype))]

    assert_same(packed, reference, [inputs, weight])


def test_ops_compute_the_layer_of_transformers():
    """A pack of documents, against transformers' layer on each document."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=24, linear_num_key_heads=2, linear_num_value_heads=4)
    config = Qwen3_5TextConfig(**sizes, linear_key_head_dim=8, linear_value_head_dim=12, num_hidden_layers=1)
    layer = Qwen3_5GatedDeltaNet(config, 0).double()
    lengths = [7, 130, 1, 65]
    hidden = torch.randn(sum(lengths), 24, dtype=torch.float64)
    with float64():  # transformers names float32
        packed = packed_layer(layer, hidden, bounds(lengths))
        alone = torch.cat([layer(document[None])[0] for document in hidden.split(lengths)])
    weights = torch.randn_like(packed)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), list(layer.parameters())) for x in (packed, alone))
    names = ("output", *(name for name, _ in layer.named_parameters()))
    actual, exact = (dict(zip(names, found, strict=True)) for found in ((packed, *ours), (alone, *theirs)))
    assert_close(actual, exact, exact, "layer", torch.float64)


def packed_layer(layer: Qwen3_5GatedDeltaNet, hidden: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
    mixed = packed_convolution(layer.in_proj_qkv(hidden), layer.conv1d.weight[:, 0], boundaries)
    query, key, value = mixed.split((layer.key_dim, layer.key_dim, layer.value_dim), 1)
    query, key = (normalized(x.unflatten(1, (-1, layer.head_k_dim))).repeat_interleave(2, 1) for x in (query, key))
    value = value.unflatten(1, (-1, layer.head_v_dim))
    decay = -layer.A_log.exp() * F.softplus(layer.in_proj_a(hidden) + layer.dt_bias)
    out, _ = gated_delta_rule(query, key, value, decay, layer.in_proj_b(hidden).sigmoid(), boundaries)
    gate = layer.in_proj_z(hidden).unflatten(1, (-1, layer.head_v_dim))
    return layer.out_proj(layer.norm(out, gate).flatten(1))
