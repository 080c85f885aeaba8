"""Compare the declarations of vllm_holder with models that vLLM's own classes build and load."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from vllm.model_executor.models.registry import ModelRegistry

from megarl.models.mtp import add_mtp
from megarl.resharding.families import huggingface_holder, vllm_holder
from megarl.resharding.families.vllm import DRAFTER
from megarl.resharding.piece import Holder
from megarl.resharding.transports.transport import view
from megarl.rollout.vllm import multimodal_models
from tests.marks import exhaustive_but
from tests.published_models import CONFIGS
from tests.unit.resharding.cases import stacked
from tests.unit.resharding.vllm_world import SHARED, weights, worker

multimodal_models.install()

LATENT = dict(
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=8,
    v_head_dim=16,
    first_k_dense_replace=1,
    n_routed_experts=18,
    n_shared_experts=2,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    num_key_value_heads=48,
    max_position_embeddings=64,
)
GATED_DELTA = dict(
    full_attention_interval=2,
    linear_num_key_heads=48,
    linear_num_value_heads=96,
    linear_key_head_dim=2,
    linear_value_head_dim=3,
)
TINY = {
    "Llama": ("Llama-3.1-8B", {}),
    "Llama, tied": ("Llama-3.2-1B", {}),
    "Llama, all biases": ("Llama-3.1-8B", dict(attention_bias=True, mlp_bias=True)),
    "Mistral": ("Mistral-7B-v0.3", {}),
    "Mixtral": ("Mixtral-8x7B", dict(num_local_experts=18, intermediate_size=48)),
    "Phi-3": ("Phi-4", {}),
    "Qwen2": ("Qwen2.5-7B", {}),
    "Qwen2, tied": ("Qwen2.5-0.5B", {}),
    "Qwen3": ("Qwen3-32B", {}),
    "Qwen3, experts": ("Qwen3-30B-A3B", dict(num_experts=18, mlp_only_layers=[0])),
    "DeepSeek-V3": ("DeepSeek-V3", LATENT | dict(q_lora_rank=24)),
    "DeepSeek-V3, direct queries": ("DeepSeek-V3", LATENT | dict(q_lora_rank=None)),
    "Qwen3.5": ("Qwen3.5-9B", GATED_DELTA),
    "Qwen3.5, experts": ("Qwen3.5-35B-A3B", GATED_DELTA | dict(num_experts=18, shared_expert_intermediate_size=48)),
    "Qwen3-Next": (
        "Qwen3-Next-80B-A3B",
        GATED_DELTA | dict(num_experts=18, shared_expert_intermediate_size=48, mlp_only_layers=[1]),
    ),
    "Kimi K2": ("Kimi-K2", LATENT | dict(q_lora_rank=24)),
    "GLM-4.5-Air": ("GLM-4.5-Air", dict(n_routed_experts=18, n_shared_experts=2, max_position_embeddings=64)),
    "GLM-4.6": ("GLM-4.6", dict(n_routed_experts=18, first_k_dense_replace=1, max_position_embeddings=64)),
    "gpt-oss": ("gpt-oss-20b", dict(num_local_experts=16, num_key_value_heads=48)),
}
"""Changes to published models, in addition to SIZES."""

SIZES = dict(
    hidden_size=96,
    num_hidden_layers=2,
    num_attention_heads=48,
    num_key_value_heads=4,
    head_dim=2,
    intermediate_size=96,
    moe_intermediate_size=48,
    vocab_size=131,
)
TP = {1: (0,), 2: (1,), 4: (0, 3), 8: (5,), 12: (7,), 16: (0, 10, 15)}
"""Tensor-parallel size, up to four times the number of KV heads -> tested ranks."""


@pytest.mark.parametrize(
    "sizes",
    [pytest.param((1, 3, 8, 16), id="tp1-3-8-16"), pytest.param(range(1, 17), marks=pytest.mark.exhaustive, id="all")],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_published_models_match_vllm_up_to_tp16(name, sizes, tmp_path):
    """Names, shapes and dtypes are equal, and both sides reject the same sizes. Four layers include all layer types."""
    config = CONFIGS[name] | {"num_hidden_layers": 4}
    for tp in sizes:
        try:
            holder = vllm_holder(config, tp, tp - 1, replica=0, dtype="bfloat16")
        except ValueError:
            with pytest.raises((ArithmeticError, AssertionError, ValueError)), worker(tmp_path, config, tp, tp - 1):
                pass
        else:
            with worker(tmp_path, config, tp, tp - 1) as model:
                assert_declared(holder, model)


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("Llama-3.1-405B", 8),
        pytest.param("Qwen3-235B-A22B", 16, marks=pytest.mark.exhaustive),
        pytest.param("DeepSeek-V3", 16, marks=pytest.mark.exhaustive),
    ],
)
def test_largest_models_match_vllm_with_all_layers(name, tp, tmp_path):
    holder = vllm_holder(CONFIGS[name], tp, 3, replica=0, dtype="bfloat16")
    with worker(tmp_path, CONFIGS[name], tp, 3) as model:
        assert_declared(holder, model)


@pytest.mark.parametrize("name", ["Mixtral-8x22B", "Qwen3-235B-A22B", "DeepSeek-V3", "GLM-4.6", "gpt-oss-120b"])
@pytest.mark.parametrize("tp", [2, 8])
def test_expert_parallel_workers_match_vllm(name, tp, tmp_path):
    config = CONFIGS[name] | {"num_hidden_layers": 4}
    holder = vllm_holder(config, tp, 1, replica=0, dtype="bfloat16", expert_parallel=True)
    with worker(tmp_path, config, tp, 1, expert_parallel=True) as model:
        assert_declared(holder, model)


def assert_declared(holder: Holder, model: torch.nn.Module) -> None:
    real = weights(model)
    assert holder.shapes == {name: tuple(weight.shape) for name, weight in real.items()}
    assert holder.dtypes == {name: str(weight.dtype).removeprefix("torch.") for name, weight in real.items()}


@pytest.mark.parametrize("tp", exhaustive_but(TP, 2, 8))
@pytest.mark.parametrize("name", TINY)
def test_vllm_loads_every_element_where_declared(name, tp, tmp_path):
    check_loaded_elements(name, tp, TP[tp], tmp_path)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3, experts", "DeepSeek-V3", "GLM-4.6", "gpt-oss"])
def test_vllm_loads_whole_experts_where_declared(name, tmp_path):
    """18 experts on four workers: five on each of the first two, four on each of the other two. gpt-oss has 16: vLLM's
    loader requires that they split evenly."""
    check_loaded_elements(name, 4, range(4), tmp_path, expert_parallel=True)


@pytest.mark.parametrize("tp", exhaustive_but(TP, 2))
@pytest.mark.parametrize("name", ["GLM-4.6", "Qwen3-Next", "Qwen3.5", "Qwen3.5, experts"])
def test_drafting_models_load_every_element_where_declared(name, tp, tmp_path):
    check_loaded_elements(name, tp, TP[tp], tmp_path, drafts=True)


@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "Qwen3_5MTP", "Qwen3_5MoeMTP"])
def test_torchvision_stand_in_is_removed(name):
    """transformers would otherwise consider torchvision installed."""
    assert ModelRegistry.models[name].load_model_cls().__name__ == name
    assert not [name for name in sys.modules if name.partition(".")[0] == "torchvision"]


def check_loaded_elements(name, tp, ranks, folder, expert_parallel=False, drafts=False):
    """drafts: check the MTP draft model, without the embedding and the output layer that it shares."""
    published, changes = TINY[name]
    config = CONFIGS[published] | SIZES | changes
    if drafts:
        config |= dict.fromkeys(("mtp_num_hidden_layers", "num_nextn_predict_layers"), 1)
    checkpoint = distinct_elements(add_mtp(config) if drafts else config)
    for rank in ranks:
        described = dict(expert_parallel=expert_parallel, drafts=drafts)
        holder = vllm_holder(add_mtp(config) if drafts else config, tp, rank, replica=0, dtype="float32", **described)
        place = dict(expert_parallel=expert_parallel, dtype=torch.float32, device="cpu", drafts=drafts)
        with worker(folder, config, tp, rank, **place) as model:
            for parameter in model.parameters():
                parameter.data.fill_(math.nan)
            stored = stacked(checkpoint) if name == "gpt-oss" else checkpoint
            model.load_weights(iter(stored.items()))
            real = weights(model)
        declared = held(holder, checkpoint)
        if drafts:
            declared = {n.removeprefix(DRAFTER): w for n, w in declared.items() if n.startswith(DRAFTER)}
            real = {name: weight for name, weight in real.items() if not name.endswith(SHARED)}
        assert declared.keys() == real.keys()
        assert not [name for name, weight in real.items() if not torch.equal(weight, declared[name])], f"rank {rank}"


def distinct_elements(config) -> dict[str, torch.Tensor]:
    """Return a checkpoint with distinct nonzero elements that are exact in float32."""
    tensors, start = {}, 1
    for name, shape in huggingface_holder(config).shapes.items():
        stop = start + math.prod(shape)
        tensors[name] = torch.arange(start, stop, dtype=torch.float32).reshape(shape)
        start = stop
    assert start <= 2**24
    return tensors


def held(holder: Holder, checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.full(shape, math.nan) for name, shape in holder.shapes.items()}
    for piece in holder.pieces:
        target = view(tensors[piece.local], piece.local_rectangle)
        if piece.canonical is None:
            target.zero_()
        else:
            target.copy_(view(checkpoint[piece.canonical], piece.canonical_rectangle))
    return tensors
