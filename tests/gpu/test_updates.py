"""bfloat16 updates on GPUs, with Transformer Engine if installed, compared with plain torch in float32 on the CPU.

The tolerances suit bfloat16. float32 would not be more accurate, because Transformer Engine's matrix products round it
to TF32 regardless of torch's settings.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import Config
from megarl.ops.linear_head import log_prob_and_entropy, plain_log_prob_and_entropy
from megarl.ops.shared_attention import pack_mask, shared_attention
from tests.attention_reference import plain_attention
from tests.closeness import Expected, relative_error
from tests.gpu.gpus import needs_gpus, run_on_gpus
from tests.gpu.models import MODELS, write_model
from tests.interpreted_divergence import CASES as DIVERGENCE_CASES
from tests.interpreted_divergence import KINDS as DIVERGENCES
from tests.interpreted_divergence import check as check_divergence
from tests.interpreted_head import CASES, check
from tests.interpreted_layers import ROTATIONS, SWIGLU_CLAMPS, SWIGLU_SHAPES, check_rotation, check_swiglu
from tests.packing import documents
from tests.parity import Outcome, RankResult, canonical, config_of, plain_training, random_groups, train

Gradients = Mapping[str, torch.Tensor]
"""Whole tensors by their Hugging Face names."""

UPDATES = [random_groups(0)]
WHOLE, WORST = 0.05, 0.15
WHOLE_IN_FP8 = 0.3
"""Upper bounds on the gradient's distance from the reference, relative to the reference's norm, and on a tensor's
largest difference, relative to its largest value. bfloat16 on CPU reaches 0.03 and 0.09."""

LAYOUTS = {
    "DP2": ("dense", "dp: 2"),
    "TP2, SP": ("dense", "tp: 2, sequence_parallel: true"),
    "PP2": ("dense", "pp: 2"),
    "CP2": ("dense", "cp: 2"),
    "EP2": ("experts", "dp: 2, ep: 2"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / name, name) for name in MODELS}


@pytest.fixture(scope="module")
def references(models: dict[str, Path]) -> dict[str, Expected[Outcome]]:
    return {name: plain_training(folder, UPDATES, kl_coefficient=0.0) for name, folder in models.items()}


def train_and_fetch(store, rank: int, config: Config, folder: Path, packing: dict[str, Any]) -> RankResult:
    """Train, and copy the gradients and weights to host memory in float32."""
    result = train(store, rank, config, folder, UPDATES, **packing)
    fetched = {
        what: {name: tensor.float().cpu() for name, tensor in getattr(result, what).items()}
        for what in ("gradients", "weights")
    }
    return dataclasses.replace(result, **fetched)


def gradients(folder: Path, layout: str, *overrides: str, **packing: Any) -> Gradients:
    config = config_of(folder, "model.dtype=bfloat16", f"actor.layout={{{layout}}}", *overrides)
    ranks = run_on_gpus(config.actor.layout.world_size, train_and_fetch, config, folder, packing)
    return canonical(folder, ranks, "gradients")


def distances(ours: Gradients, theirs: Gradients) -> tuple[float, float]:
    """Return the relative distance of all gradients and the largest relative error of a tensor."""
    # Compare stacked experts, because a token near a routing boundary may choose another expert and make up half of
    # that expert's tokens.
    pairs = defaultdict[str, list[tuple[torch.Tensor, torch.Tensor]]](list)
    for name in ours.keys() & theirs.keys():
        pairs[re.sub(r"experts\.\d+", "experts", name)].append((ours[name], theirs[name].detach()))
    tensors = [tuple(map(torch.stack, zip(*same_name, strict=True))) for same_name in pairs.values()]
    squares = sum(float((one - other).square().sum()) for one, other in tensors)
    norm = sum(float(other.square().sum()) for _, other in tensors) ** 0.5
    return squares**0.5 / norm, max(relative_error(one, other) for one, other in tensors)


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_gpus(1)) for name in MODELS])
def test_gradients_equal_plain_torch(models, references, name):
    whole, worst = distances(gradients(models[name], ""), references[name].plain.gradients)
    assert whole <= WHOLE and worst <= WORST, (whole, worst)


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_gpus(1)) for name in MODELS])
def test_shared_and_repeated_prompts_have_equal_gradients(models, references, name):
    """Repeated prompts use Transformer Engine's attention, shared ones megarl's. Both match plain torch to bfloat16."""
    shared, apart = (gradients(models[name], "", shares_prompts=shares) for shares in (True, False))
    for one, other in ((shared, apart), (apart, references[name].plain.gradients)):
        whole, worst = distances(one, other)
        assert whole <= WHOLE and worst <= WORST, (whole, worst)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=needs_gpus(2)) for name in LAYOUTS])
def test_gradients_on_two_gpus_equal_plain_torch(models, references, layout):
    name, keys = LAYOUTS[layout]
    whole, worst = distances(gradients(models[name], keys), references[name].plain.gradients)
    assert whole <= WHOLE and worst <= WORST, (whole, worst)


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="fp8 needs Transformer Engine")
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=needs_gpus(1, can_rehearse=False)) for name in ("tensorwise", "blockwise")]
)
def test_fp8_gradients_are_close_but_differ_from_bfloat16(models, references, recipe):
    expected = references["dense"].plain.gradients
    whole, _ = distances(gradients(models["dense"], "", f"actor.fp8={recipe}"), expected)
    without, _ = distances(gradients(models["dense"], ""), expected)
    assert without < whole <= WHOLE_IN_FP8, (without, whole)


ATTENTIONS = {
    "Qwen2.5-0.5B": (14, 2, 64, 64),
    "Qwen2.5-1.5B": (12, 2, 128, 128),
    "DeepSeek-V3, a rank of eight": (16, 16, 192, 128),
}
"""Query heads, key-value heads, and the head dims of keys and values."""

PACKS = {
    "a block and part of one": [(100, [30, 60])],
    "documents within blocks": [(300, [40, 1, 700, 0, 128]), (1, [5] * 20), (512, [512, 300])],
}


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_gpus(1, can_rehearse=False)) for name in ATTENTIONS])
def test_shared_attention_at_model_sizes(name, pack):
    check_attention(*ATTENTIONS[name], *documents(PACKS[pack]), device="cuda")


def check_attention(
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    tokens: torch.Tensor,
    boundaries: torch.Tensor,
    device: str,
) -> None:
    """Compare bfloat16 attention with masked attention over the whole pack in float64 on CPU."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = int(tokens.max()) + 1
    sizes = ((heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))
    inputs = [torch.randn(num_tokens, *size, generator=generator).bfloat16() for size in sizes]
    gradient = torch.randn(num_tokens, heads, value_dim, generator=generator).bfloat16()
    ours, theirs = ([x.clone().to(*to).requires_grad_() for x in inputs] for to in ((device,), (torch.float64,)))
    scale = key_dim**-0.5
    out = shared_attention(*ours, pack_mask(tokens.to(device), boundaries.to(device)), scale)
    out.backward(gradient.to(device))
    expected = plain_attention(*theirs, tokens, boundaries, scale)
    expected.backward(gradient.double())
    assert relative_error(out.detach().cpu().double(), expected.detach()) <= 2e-2
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one.grad.cpu().double(), other.grad) <= 2e-2


HEADS = {
    "Qwen2.5-1.5B": (1536, 151936, 4096),
    "Llama-3.1-8B": (4096, 128256, 8192),
    "one token and part of a tile": (2048, 33333, 4097),
}
"""Hidden size, vocabulary size and number of tokens."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_gpus(1, can_rehearse=False)) for name in HEADS])
def test_bfloat16_head_at_model_sizes(name):
    """Compare the head with full float32 logits of the same inputs on the same device."""
    torch.backends.cuda.matmul.allow_tf32 = False
    check_sizes(*HEADS[name], device="cuda")


def check_sizes(hidden_size: int, vocabulary: int, num_tokens: int, device: str) -> None:
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((num_tokens, hidden_size), (vocabulary, hidden_size))
    hidden, weight = (
        torch.randn(size, generator=generator, device=device).bfloat16() / hidden_size**0.25 for size in sizes
    )
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator, device=device)
    gradient = torch.randn(num_tokens, 2, generator=generator, device=device)
    results = []
    for dtype, head in ((torch.bfloat16, log_prob_and_entropy), (torch.float32, plain_log_prob_and_entropy)):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight)]
        values = head(*leaves, targets=targets, temperature=1.0, vocab_size=vocabulary)
        values = values if isinstance(values, torch.Tensor) else torch.stack(values, -1)
        (values * gradient).sum().backward()
        results.append((values.detach(), *(leaf.grad.float() for leaf in leaves)))
    (outputs, *grads), (expected, *expected_grads) = results
    assert relative_error(outputs, expected) <= 1e-4
    assert all(relative_error(one, other) <= 2e-2 for one, other in zip(grads, expected_grads, strict=True))


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=needs_gpus(1, can_rehearse=False)) for dtype in (torch.float32, torch.bfloat16)]
)
def test_head_kernels_equal_full_logits(dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    for case in CASES:
        check(dtype, *case, device="cuda")
    for case in DIVERGENCE_CASES:
        check_divergence(dtype, *case, device="cuda")


@pytest.mark.parametrize(
    ("kind", "beta"), [pytest.param(*kind, marks=needs_gpus(1, can_rehearse=False)) for kind in DIVERGENCES]
)
def test_divergence_in_several_tiles_equals_full_logits(kind, beta):
    torch.backends.cuda.matmul.allow_tf32 = False
    check_divergence(torch.bfloat16, kind, beta, True, True, "cuda", (4097, 33333))


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=needs_gpus(1, can_rehearse=False)) for dtype in (torch.float32, torch.bfloat16)]
)
def test_layer_kernels_equal_plain_torch(dtype):
    for shape in SWIGLU_SHAPES:
        for clamp in SWIGLU_CLAMPS:
            check_swiglu(dtype, shape, clamp, device="cuda")
    for case in ROTATIONS:
        check_rotation(dtype, *case, device="cuda")
