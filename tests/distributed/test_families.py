"""Every model family in Megatron against transformers: logits, gradients and weights of a GRPO update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config.schema import Config
from megarl.megatron.workers.actor import ActorWorker
from tests.closeness import assert_close, expected, load
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import (
    Group,
    assert_same_training,
    config_of,
    local_batch,
    plain_training,
    random_groups,
    rank_batches,
    train,
)
from tests.tiny_model import SHARDED_VOCAB, write_tiny_model

GROUPS = random_groups(0, SHARDED_VOCAB)

DENSE = dict(
    vocab_size=SHARDED_VOCAB,
    hidden_size=48,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=8,
    num_hidden_layers=2,
    intermediate_size=72,
    max_position_embeddings=64,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=1000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
MIXTRAL = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
QWEN3_MOE = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20)
DEEPSEEK = dict(
    vocab_size=SHARDED_VOCAB,
    hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_hidden_layers=3,
    intermediate_size=80,
    max_position_embeddings=64,
    q_lora_rank=12,
    kv_lora_rank=20,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    first_k_dense_replace=1,
    moe_intermediate_size=24,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
)
GATED_DELTA = dict(
    vocab_size=SHARDED_VOCAB,
    hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_hidden_layers=4,
    max_position_embeddings=64,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=6,
    linear_value_head_dim=10,
    rms_norm_eps=1e-3,  # large, because the delta net's norm would amplify rounding errors of near-zero outputs
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
)
GATED_DELTA_EXPERTS = dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, shared_expert_intermediate_size=28
)
GLM = dict(
    vocab_size=SHARDED_VOCAB,
    hidden_size=48,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=12,
    num_hidden_layers=3,
    intermediate_size=80,
    max_position_embeddings=64,
    first_k_dense_replace=1,
    moe_intermediate_size=24,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=3,
    routed_scaling_factor=1.5,
    attention_bias=True,
    use_qk_norm=True,
)
ONE_GROUP = dict(n_group=1, topk_group=1)
MOONLIGHT = ONE_GROUP | dict(q_lora_rank=None, rms_norm_eps=1e-2, routed_scaling_factor=2.446, num_experts_per_tok=3)
KIMI_YARN = dict(rope_theta=50.0, factor=32.0, original_max_position_embeddings=16, beta_fast=1.0, beta_slow=1.0)
KIMI = ONE_GROUP | dict(
    rope_parameters=KIMI_YARN | dict(rope_type="yarn", mscale=1.0, mscale_all_dim=1.0),
    n_shared_experts=1,
    routed_scaling_factor=2.827,
)
YARN = dict(rope_type="yarn", rope_theta=1e3, factor=4.0, original_max_position_embeddings=16, beta_fast=4, beta_slow=1)
GPT_OSS = dict(
    vocab_size=SHARDED_VOCAB,
    hidden_size=48,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    num_hidden_layers=4,
    intermediate_size=40,
    max_position_embeddings=64,
    num_local_experts=8,
    num_experts_per_tok=3,
    sliding_window=5,
    rope_parameters=YARN | dict(beta_fast=1.0, beta_slow=0.16, truncate=False),
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("llama", {}),
    "Llama 3, tied": ("llama", dict(tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE)),
    "Llama, linear rope": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    "Llama, all biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "Llama, attention biases": ("llama", dict(attention_bias=True)),
    "Llama, MLP biases": ("llama", dict(mlp_bias=True)),
    "Mistral": ("mistral", dict(head_dim=16, sliding_window=64)),
    "Phi-3": ("phi3", dict(sliding_window=64)),
    "Qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "Qwen3": ("qwen3", dict(head_dim=16, rms_norm_eps=1e-5)),
    "Qwen3, tied": ("qwen3", dict(tie_word_embeddings=True)),
    "Mixtral": ("mixtral", MIXTRAL),
    "Qwen3, experts": ("qwen3_moe", QWEN3_MOE),
    "Qwen3, experts, weights that add up to one": ("qwen3_moe", QWEN3_MOE | dict(norm_topk_prob=True)),
    "Qwen3, experts in some layers": (
        "qwen3_moe",
        QWEN3_MOE | dict(num_hidden_layers=4, mlp_only_layers=[1], decoder_sparse_step=2, tie_word_embeddings=True),
    ),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "DeepSeek-V3, YaRN": ("deepseek_v3", dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.7))),
    "DeepSeek-V3, YaRN without mscale": ("deepseek_v3", dict(rope_parameters=YARN)),
    "DeepSeek-V3, direct queries, any group": ("deepseek_v3", dict(q_lora_rank=None, n_group=1, topk_group=1)),
    "Qwen3.5": ("qwen3_5_text", dict(intermediate_size=72)),
    "Qwen3.5, tied": ("qwen3_5_text", dict(intermediate_size=72, tie_word_embeddings=True)),
    "Qwen3.5, experts": ("qwen3_5_moe_text", GATED_DELTA_EXPERTS),
    "Qwen3-Next": ("qwen3_next", GATED_DELTA_EXPERTS | dict(intermediate_size=72, mlp_only_layers=[1])),
    "GLM-4.6": ("glm4_moe", {}),
    "GLM-4.5-Air": ("glm4_moe", dict(use_qk_norm=False, routed_scaling_factor=1.0)),
    "GLM, groups, no biases": (
        "glm4_moe",
        dict(attention_bias=False, num_experts_per_tok=4, n_group=4, topk_group=2, tie_word_embeddings=True),
    ),
    "Kimi K2": ("kimi_k2", KIMI),
    "Kimi K2, large epsilon": ("kimi_k2", KIMI | dict(rms_norm_eps=1e-2)),
    "Moonlight": ("deepseek_v3", MOONLIGHT),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss, rounded YaRN": ("gpt_oss", dict(rope_parameters=GPT_OSS["rope_parameters"] | dict(truncate=True))),
}
SIZES = dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), GATED_DELTA)
SIZES |= {"deepseek_v3": DEEPSEEK, "glm4_moe": GLM, "gpt_oss": GPT_OSS, "kimi_k2": DEEPSEEK}
"""Sizes by model_type, DENSE for all others."""


def logits(store, rank: int, config: Config, folder: Path, groups: list[Group]) -> dict[str, torch.Tensor]:
    """Return, by sample id, the logits [R, vocabulary] of its response, computed in one process."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    captured = capture_logits(worker)
    batch = local_batch(*rank_batches(config, worker.packing, groups))
    worker.keep_log_probs("old", batch)
    order = [item.sample for members in batch.members for item in members]
    parts = torch.cat(captured).split([len(sample.response_ids) for sample in order])
    return {sample.id: part for sample, part in zip(order, parts, strict=True)}


def capture_logits(worker: ActorWorker) -> list[torch.Tensor]:
    """Return a list that receives the logits [N, vocabulary] of every call of the model."""
    captured: list[torch.Tensor] = []

    def compute(head, inputs, keywords):
        hidden, weight = inputs[0], keywords.get("weight")
        weight = head.weight if weight is None else weight
        captured.append(hidden[:, 0][head.request.rows] @ weight[: head.vocab_size].T)

    worker.chunks[0].module.output_layer.register_forward_pre_hook(compute, with_kwargs=True)
    return captured


@torch.no_grad()
def transformers_logits(folder: Path, groups: list[Group]) -> dict[str, torch.Tensor]:
    model, by_sample = load(AutoModelForCausalLM, folder), {}
    for sample in [sample for group in groups for sample, _ in group]:
        ids = torch.tensor(sample.token_ids[None]).long()
        by_sample[sample.id] = model(ids).logits[0, len(sample.prompt.token_ids) - 1 : -1]
    return by_sample


def write(folder: Path, name: str) -> Path:
    model_type, changes = MODELS[name]
    return write_tiny_model(folder, model_type, **SIZES.get(model_type, DENSE) | changes)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize(
    "folder", exhaustive_but(MODELS, "Llama 3, tied", "Phi-3", "Mixtral", "DeepSeek-V3, YaRN", "Qwen3.5"), indirect=True
)
def test_logits_match_transformers(folder):
    [actual] = run_ranks(1, logits, config_of(folder), folder, GROUPS)
    assert_close(actual, *expected(lambda: transformers_logits(folder, GROUPS)), "logits")


VARIATIONS = (
    *("Llama, attention biases", "Llama, MLP biases", "Qwen3, tied", "Qwen3, experts"),
    *("DeepSeek-V3, YaRN without mscale", "GLM-4.5-Air", "Kimi K2", "Moonlight", "gpt-oss, rounded YaRN"),
)
"""Models without parts of their own: all parts also occur in other models."""


LAYOUTS = {
    "Llama, all biases: TP3": "tp: 3",
    "Llama, all biases: TP3, SP": "tp: 3, sequence_parallel: true",
    "Phi-3: TP3, SP": "tp: 3, sequence_parallel: true",
    "Qwen3: TP3": "tp: 3",
    "Qwen3, tied: TP3, SP": "tp: 3, sequence_parallel: true",
    "DeepSeek-V3: PP2, TP2, SP": "pp: 2, tp: 2, sequence_parallel: true, first_stage_layers: 2",
    "DeepSeek-V3, YaRN: EP2, TP2, ETP1": "tp: 2, sequence_parallel: true, ep: 2, etp: 1",
    "DeepSeek-V3, YaRN: CP2": "cp: 2",
    "DeepSeek-V3, direct queries, any group: TP2, SP": "tp: 2, sequence_parallel: true",
    "Qwen3.5: TP2": "tp: 2",
    "Qwen3.5: TP2, SP": "tp: 2, sequence_parallel: true",
    "Qwen3.5, tied: PP2": "pp: 2",
    "Qwen3.5: CP2": "cp: 2",
    "Qwen3.5: TP2, CP2, SP": "tp: 2, cp: 2, sequence_parallel: true",
    "Qwen3.5, experts: EP2, TP2, ETP1": "tp: 2, sequence_parallel: true, ep: 2, etp: 1",
    "Qwen3.5, experts: EP2, CP2": "cp: 2, ep: 2",
    "Qwen3-Next: TP2, SP": "tp: 2, sequence_parallel: true",
    "Qwen3-Next: PP2, EP2": "pp: 2, dp: 2, ep: 2",
    "GLM-4.6: TP2, SP": "tp: 2, sequence_parallel: true",
    "GLM-4.6: PP2, EP2": "pp: 2, ep: 2, dp: 2, first_stage_layers: 2",
    "GLM-4.5-Air: EP2, TP2, ETP1": "tp: 2, sequence_parallel: true, ep: 2, etp: 1",
    "GLM, groups, no biases: CP2": "cp: 2",
    "GLM, groups, no biases: CP2, TP2, SP, PP2": "cp: 2, tp: 2, sequence_parallel: true, pp: 2, first_stage_layers: 2",
    "Kimi K2: TP2, SP": "tp: 2, sequence_parallel: true",
    "Kimi K2: CP2, EP2": "cp: 2, ep: 2",
    "Kimi K2, large epsilon: PP2, TP2, SP, EP2, ETP1": (
        "pp: 2, tp: 2, sequence_parallel: true, ep: 2, etp: 1, first_stage_layers: 2"
    ),
    "Moonlight: EP2, TP2, ETP1": "tp: 2, sequence_parallel: true, ep: 2, etp: 1",
    "Moonlight: CP2": "cp: 2",
    "gpt-oss: TP2, SP, EP2, ETP1": "tp: 2, sequence_parallel: true, ep: 2, etp: 1",
    "gpt-oss: PP2": "pp: 2",
    "gpt-oss: CP2": "cp: 2",
    "gpt-oss: EP2": "dp: 2, ep: 2",
    "gpt-oss: CP2, TP2, SP, EP2, ETP1": "cp: 2, tp: 2, sequence_parallel: true, ep: 2, etp: 1",
    "gpt-oss, rounded YaRN: PP2, VPP2, EP2": "pp: 2, vpp: 2, dp: 2, ep: 2",
}
"""Cases in which a family's special parts are sharded."""

IN_TEST = (
    *("Llama, all biases: TP3, SP", "Phi-3: TP3, SP", "Qwen3: TP3"),
    *("Qwen3.5: TP2", "Qwen3.5: CP2", "Qwen3-Next: PP2, EP2"),
    *("DeepSeek-V3: PP2, TP2, SP", "DeepSeek-V3, YaRN: CP2", "GLM-4.5-Air: EP2, TP2, ETP1"),
    "gpt-oss: TP2, SP, EP2, ETP1",
)
"""Layouts that run by default. `make test-exhaustive` runs the others, and these models in one process."""

ALONE = MODELS.keys() - {*VARIATIONS} - {case.partition(": ")[0] for case in IN_TEST}


@pytest.mark.parametrize("folder", exhaustive_but(MODELS, *ALONE), indirect=True)
def test_training_matches_transformers(folder):
    ranks = run_ranks(1, train, config_of(folder, "actor.tokens_per_microbatch=256"), folder, [GROUPS])
    assert_same_training(folder, ranks, plain_training(folder, [GROUPS], kl_coefficient=0.0))


@pytest.mark.parametrize("case", exhaustive_but(LAYOUTS, *IN_TEST))
def test_sharded_training_matches_transformers(tmp_path, case):
    (name, _, _), layout = case.partition(": "), LAYOUTS[case]
    folder = write(tmp_path / "model", name)
    config = config_of(folder, "actor.tokens_per_microbatch=256", f"actor.layout={{{layout}}}")
    ranks = run_ranks(config.actor.layout.world_size, train, config, folder, [GROUPS])
    assert_same_training(folder, ranks, plain_training(folder, [GROUPS], kl_coefficient=0.0))
