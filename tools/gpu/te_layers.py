"""Compares Transformer Engine's layers on the GPU with plain torch in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from tests.closeness import relative_error

Errors = dict[str, float]
"""Relative errors of the output and of the gradients, by name."""

INPUT, OUTPUT, TOKENS, EPS = 1024, 2048, 512, 1e-6
EXPERT_TOKENS = (256, 0, 128, 640)
HEADS, GROUPS, HEAD_DIM, LENGTHS = 32, 8, 128, (700, 1, 333, 1014)
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def compare_layers() -> dict[str, Errors]:
    """Return the errors of each layer. Requires Transformer Engine."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    recipes = {
        "fp8_delayed": recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="max"),
        "fp8_current": recipe.Float8CurrentScaling(),
        "fp8_block": recipe.Float8BlockScaling(),
    }
    bfloat16 = {"bias": False, "params_dtype": torch.bfloat16}
    fused = te.LayerNormLinear(INPUT, OUTPUT, normalization="RMSNorm", eps=EPS, **bfloat16)
    errors = {
        "linear": _linear(te.Linear(INPUT, OUTPUT, **bfloat16), _plain_linear),
        "norm and linear": _linear(fused, _plain_norm_linear),
        "experts": _experts(te, None),
        "experts, fp8_block": _experts(te, recipes["fp8_block"]),
        "attention": _attention(te),
        "adam": _adam(te),
    }
    for name, chosen in recipes.items():
        layer = te.Linear(INPUT, OUTPUT, **bfloat16)
        for _ in range(3 if name == "fp8_delayed" else 1):  # its scales are based on earlier steps
            with te.autocast(enabled=True, recipe=chosen):
                errors[f"linear, {name}"] = _linear(layer, _plain_linear)
    return errors


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _errors(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> Errors:
    return {name: relative_error(value.detach().float(), theirs[name].detach()) for name, value in ours.items()}


def _plain_linear(x: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return F.linear(x, weights["weight"])


def _plain_norm_linear(x: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return F.linear(F.rms_norm(x, (INPUT,), weights["layer_norm_weight"], EPS), weights["weight"])


def _linear(layer: Any, plain: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]) -> Errors:
    layer.zero_grad(set_to_none=True)
    x, gradient = _drawn(TOKENS, INPUT).requires_grad_(), _drawn(TOKENS, OUTPUT)
    exact = x.detach().float().requires_grad_()
    weights = {name: weight.detach().float().requires_grad_() for name, weight in layer.named_parameters()}
    out, expected = layer(x), plain(exact, weights)
    out.backward(gradient)
    expected.backward(gradient.float())
    ours = {name: weight.grad for name, weight in layer.named_parameters()}
    theirs = {name: weight.grad for name, weight in weights.items()}
    return _errors({"output": out, "input": x.grad, **ours}, {"output": expected, "input": exact.grad, **theirs})


def _experts(te: Any, recipe: Any) -> Errors:
    layer = te.GroupedLinear(len(EXPERT_TOKENS), 512, 1024, bias=False, params_dtype=torch.bfloat16)
    x, gradient = _drawn(sum(EXPERT_TOKENS), 512).requires_grad_(), _drawn(sum(EXPERT_TOKENS), 1024)
    with te.autocast(enabled=True, recipe=recipe) if recipe else nullcontext():
        out = layer(x, list(EXPERT_TOKENS))
    out.backward(gradient)
    exact = x.detach().float().requires_grad_()
    weights = {name: weight.detach().float().requires_grad_() for name, weight in layer.named_parameters()}
    parts = zip(exact.split(EXPERT_TOKENS), weights.values(), strict=True)
    expected = torch.cat([F.linear(part, weight) for part, weight in parts])
    expected.backward(gradient.float())
    used = [name for name, count in zip(weights, EXPERT_TOKENS, strict=True) if count]
    ours = {name: getattr(layer, name).grad for name in used}
    theirs = {name: weights[name].grad for name in used}
    return _errors({"output": out, "input": x.grad, **ours}, {"output": expected, "input": exact.grad, **theirs})


def _attention(te: Any) -> Errors:
    """Compare causal attention within packed documents, with fewer KV heads than heads."""
    total, bounds = sum(LENGTHS), torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    options: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
    layer = te.DotProductAttention(HEADS, HEAD_DIM, num_gqa_groups=GROUPS, attention_dropout=0.0, **options)
    inputs = [_drawn(total, heads, HEAD_DIM).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    exact = [x.detach().float().requires_grad_() for x in inputs]
    gradient = _drawn(total, HEADS * HEAD_DIM)
    longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(LENGTHS))
    out = layer(*inputs, **options, **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), bounds), **longest)
    out.backward(gradient)
    documents = []
    for parts in zip(*(x.split(LENGTHS) for x in exact), strict=True):
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        documents.append(attended[0].transpose(0, 1).flatten(1))
    expected = torch.cat(documents)
    expected.backward(gradient.float())
    names = ("query", "key", "value")
    ours, theirs = (dict(zip(names, (x.grad for x in xs), strict=True)) for xs in (inputs, exact))
    return _errors({"output": out, **ours}, {"output": expected, **theirs})


def _adam(te: Any) -> Errors:
    ours = [torch.nn.Parameter(torch.randn(size, device="cuda")) for size in (7, 4096, 100_003)]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    fused, plain = te.optimizers.FusedAdam(ours, **ADAM), torch.optim.AdamW(theirs, **ADAM)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        fused.step()
        plain.step()
    names = [f"parameter {number}" for number in range(len(ours))]
    return _errors(dict(zip(names, ours, strict=True)), dict(zip(names, theirs, strict=True)))
