"""Updates in bfloat16 on GPUs, through Transformer Engine where it is installed, against plain torch in float32 on the
CPU.

Tolerances are those of bfloat16: the products of Transformer Engine's layers round float32 to TF32, too, whatever torch
is told.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema import Config
from megarl.ops.linear_head import log_prob_and_entropy, plain_log_prob_and_entropy
from tests.closeness import relative_error
from tests.gpu.gpus import needs_gpus, run_on_gpus
from tests.interpreted_head import CASES, check
from tests.parity import Outcome, RankResult, canonical, config_of, plain_training, random_groups, train
from tests.tiny_model import write_tiny_model

UPDATES = [random_groups(0)]
WHOLE, WORST = 0.05, 0.15
WHOLE_IN_FP8 = 0.3
"""Bounds of the gradient's distance from the reference, relative to its norm, and of a tensor's largest difference,
relative to its largest number. bfloat16 on CPU has up to 0.03 and 0.09 of them here."""

SIZES = dict(
    vocab_size=128,
    hidden_size=256,
    num_attention_heads=4,
    num_hidden_layers=2,
    intermediate_size=512,
    max_position_embeddings=64,
)
ROUTED = dict(moe_intermediate_size=256, num_experts_per_tok=2)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", dict(num_key_value_heads=2, head_dim=64)),
    "experts": ("qwen3_moe", dict(num_key_value_heads=2, head_dim=64, num_experts=4, norm_topk_prob=True) | ROUTED),
    "latent": (
        "deepseek_v3",
        dict(
            num_key_value_heads=4,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
            first_k_dense_replace=1,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
        )
        | ROUTED,
    ),
}
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
    return {name: write_tiny_model(folder / name, kind, **SIZES | more) for name, (kind, more) in MODELS.items()}


@pytest.fixture(scope="module")
def references(models: dict[str, Path]) -> dict[str, Outcome]:
    return {name: plain_training(folder, UPDATES, kl_coefficient=0.0) for name, folder in models.items()}


def train_and_fetch(store, rank: int, config: Config, folder: Path) -> RankResult:
    """Trains, and fetches what is compared into host memory, in float32."""
    result = train(store, rank, config, folder, UPDATES)
    fetched = {
        what: {name: tensor.float().cpu() for name, tensor in getattr(result, what).items()}
        for what in ("gradients", "weights")
    }
    return dataclasses.replace(result, **fetched)


def distances(folder: Path, reference: Outcome, layout: str, *overrides: str) -> tuple[float, float]:
    """Returns what WHOLE and WORST bound."""
    config = config_of(folder, "model.dtype=bfloat16", f"actor.layout={{{layout}}}", *overrides)
    ranks = run_on_gpus(config.actor.layout.world_size, train_and_fetch, config, folder)
    ours = canonical(folder, ranks, "gradients")
    pairs = [(ours[name], theirs.detach()) for name, theirs in reference.gradients.items() if name in ours]
    squares = sum(float((one - other).square().sum()) for one, other in pairs)
    return squares**0.5 / reference.norm, max(relative_error(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_gpus(1)) for name in MODELS])
def test_gradients_are_those_of_plain_torch(models, references, name):
    whole, worst = distances(models[name], references[name], "")
    assert whole <= WHOLE and worst <= WORST, (whole, worst)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=needs_gpus(2)) for name in LAYOUTS])
def test_two_gpus_have_the_gradients_of_plain_torch(models, references, layout):
    name, keys = LAYOUTS[layout]
    whole, worst = distances(models[name], references[name], keys)
    assert whole <= WHOLE and worst <= WORST, (whole, worst)


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=needs_gpus(1, can_rehearse=False)) for name in ("tensorwise", "blockwise")]
)
def test_gradients_in_fp8_are_near_and_not_those_of_bfloat16(models, references, recipe):
    whole, _ = distances(models["dense"], references["dense"], "", f"actor.fp8={recipe}")
    without, _ = distances(models["dense"], references["dense"], "")
    assert without < whole <= WHOLE_IN_FP8, (without, whole)


HEADS = {
    "Qwen2.5-1.5B": (1536, 151936, 4096),
    "Llama-3.1-8B": (4096, 128256, 8192),
    "one token and part of a tile": (2048, 33333, 4097),
}
"""Hidden size, vocabulary and tokens."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_gpus(1, can_rehearse=False)) for name in HEADS])
def test_head_in_bfloat16_at_the_sizes_of_models(name):
    """Against full logits of the same numbers in float32, on the same device."""
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
    found = []
    for dtype, head in ((torch.bfloat16, log_prob_and_entropy), (torch.float32, plain_log_prob_and_entropy)):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight)]
        values = head(*leaves, targets=targets, temperature=1.0, vocab_size=vocabulary)
        values = values if isinstance(values, torch.Tensor) else torch.stack(values, -1)
        (values * gradient).sum().backward()
        found.append((values.detach(), *(leaf.grad.float() for leaf in leaves)))
    (ours, *own), (theirs, *expected) = found
    assert relative_error(ours, theirs) <= 1e-4
    assert all(relative_error(one, other) <= 2e-2 for one, other in zip(own, expected, strict=True))


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=needs_gpus(1, can_rehearse=False)) for dtype in (torch.float32, torch.bfloat16)]
)
def test_head_on_its_kernels_equals_full_logits(dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    for case in CASES:
        check(dtype, *case, device="cuda")
