from __future__ import annotations

from typing import Any

import pytest

from megarl.models.families import FAMILIES
from megarl.models.rules import check_model
from megarl.models.rules.features import model_has_mtp
from tests.published_models import CONFIGS
from tests.unit.config.rules.recipes import recipe
from tests.unit.models.rules.model_configs import DEEPSEEK, SMOLLM2, model_errors


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gpt2"}, f"model_type gpt2 is not supported. Fix: use a model of type {', '.join(FAMILIES)}"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "megarl does not support rope_scaling with rope_type dynamic",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "megarl does not support rope_scaling with rope_type yarn"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2}},
            "megarl does not support rope_parameters with rope_type llama3 without low_freq_factor, high_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "megarl does not support partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "megarl does not support partial_rotary_factor 0.25"),
        ({"hidden_act": "gelu"}, "megarl does not support hidden_act gelu"),
        ({"model_type": "qwen2", "mlp_bias": True}, "megarl does not support mlp_bias true"),
        (
            {"model_type": "mistral", "mlp_bias": True, "attention_bias": True},
            "megarl does not support attention_bias true and mlp_bias true",
        ),
        ({"model_type": "qwen3", "attention_bias": True}, "megarl does not support attention_bias true"),
        ({"model_type": "phi3", "resid_pdrop": 0.1}, "megarl does not support resid_pdrop 0.1"),
        ({"attention_dropout": 0.1}, "megarl does not support attention_dropout 0.1"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "megarl does not support quantization_config with quant_method fp8",
        ),
    ],
)
def test_unsupported_feature_is_named(changed: dict[str, Any], message: str) -> None:
    (line,) = model_errors(SMOLLM2 | changed)
    assert line.startswith("model.path=smollm2: ") and message in line


@pytest.mark.parametrize(
    ("changed", "window"),
    [
        ({"sliding_window": 255}, 255),
        ({"model_type": "mistral"}, 4096),  # transformers' default
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True}, 9),
    ],
)
def test_samples_longer_than_the_attention_window_are_refused(changed: dict[str, Any], window: int) -> None:
    context = window + 1
    overrides = (f"rollout.context_length={context}", f"actor.tokens_per_microbatch={context}")
    (line,) = model_errors(SMOLLM2 | changed, *overrides, "rollout.max_new_tokens=1")
    assert line.startswith(f"rollout.context_length={context}: it exceeds the model's sliding_window={window}, but")
    overrides = (f"rollout.context_length={window}", f"actor.tokens_per_microbatch={context}")
    check_model(recipe(*overrides, "rollout.max_new_tokens=1"), SMOLLM2 | changed)


def test_incomplete_model_config_is_refused() -> None:
    lines = model_errors({"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 9})
    assert lines == [
        "model.path=smollm2: its config.json lacks intermediate_size, num_attention_heads. Fix: use the "
        "config.json of the original model"
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": "qwen2", "attention_bias": True},
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "qwen2", "sliding_window": 4096},
        {"sliding_window": None, "rope_scaling": None},
        {"rope_parameters": None, "rope_theta": 1e4},
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"mlp_bias": True, "attention_bias": True},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen3", "sliding_window": 9},
    ],
)
def test_supported_variants(changed: dict[str, Any]) -> None:
    check_model(recipe(), SMOLLM2 | changed)


@pytest.mark.parametrize(
    ("name", "count", "reason"),
    [
        ("GLM-4.6", 1, None),
        ("DeepSeek-V3", 1, None),
        ("GLM-4.6", 2, "its config.json has num_nextn_predict_layers=2, but megarl supports exactly one such layer"),
        ("GLM-4.6", 0, "its config.json has num_nextn_predict_layers=0, but megarl supports exactly one such layer"),
        (
            *("Qwen3-32B", 1),
            "megarl supports multi-token prediction only for models of type deepseek_v3, glm4_moe, qwen3_next, "
            "qwen3_5_moe_text, qwen3_5_text",
        ),
        ("Qwen3-Next-80B-A3B", None, None),
        ("Qwen3-Next-80B-A3B", 0, "its config.json has num_nextn_predict_layers=0, but megarl supports exactly one"),
        ("Qwen3.5-27B", 1, None),
        ("Qwen3.5-35B-A3B", 0, "its config.json has mtp_num_hidden_layers=0, but megarl supports exactly one such"),
        ("Qwen3.5-27B", None, "its config.json has mtp_num_hidden_layers=None, but megarl supports exactly one such"),
    ],
)
def test_kept_mtp_layer_is_supported(name: str, count: int | None, reason: str | None) -> None:
    key = "mtp_num_hidden_layers" if name.startswith("Qwen3.5") else "num_nextn_predict_layers"
    model = CONFIGS[name] | ({} if count is None else {key: count})
    config = recipe("actor.mtp.loss_coefficient=0.0")
    expected = f"actor.mtp.loss_coefficient=0.0: model.path={config.model.path}: {reason}"
    lines = list(model_has_mtp(config, model))
    assert [line.startswith(expected) for line in lines] == ([] if reason is None else [True])
    assert all(line.endswith(". Fix: set actor.mtp.loss_coefficient=null") for line in lines)
    assert list(model_has_mtp(recipe(), model)) == []


def test_mtp_layer_with_its_own_embeddings_is_refused() -> None:
    model = CONFIGS["Qwen3.5-27B"] | dict(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    assert list(model_has_mtp(recipe("actor.mtp.loss_coefficient=0.0"), model)) == []
    model["mtp_use_dedicated_embeddings"] = True
    [line] = model_has_mtp(recipe("actor.mtp.loss_coefficient=0.0"), model)
    assert "mtp_use_dedicated_embeddings=true, but vLLM shares the model's embeddings. Fix: set actor.mtp" in line


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scoring_func": "softmax"}, "megarl does not support scoring_func softmax"),
        ({"topk_method": "greedy"}, "megarl does not support topk_method greedy"),
        ({"norm_topk_prob": False}, "megarl does not support norm_topk_prob False"),
        ({"topk_group": 2}, "megarl does not support num_experts_per_tok 8 with topk_group 2"),
        ({"rope_interleave": False}, "megarl does not support rope_interleave false"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "megarl does not support rope_parameters with rope_type llama3"),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "megarl does not support rope_parameters with rope_type yarn without factor",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": False}},
            "megarl does not support rope_parameters with truncate false",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "attention_factor": 0.5}},
            "megarl does not support rope_parameters with attention_factor 0.5",
        ),
        ({"attention_bias": True}, "megarl does not support attention_bias true"),
    ],
)
def test_unsupported_features_of_deepseek_are_named(changed: dict[str, Any], message: str) -> None:
    for model in (DEEPSEEK, DEEPSEEK | {"model_type": "kimi_k2"}):
        check_model(recipe(), model)
        (line,) = model_errors(model | changed)
        assert message in line


GLM = SMOLLM2 | {"model_type": "glm4_moe", "num_key_value_heads": 3, "attention_bias": True, "use_qk_norm": True}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"num_experts_per_tok": 3, "n_group": 2, "topk_group": 1},
            "megarl does not support num_experts_per_tok 3 with topk_group 1",
        ),
        ({"norm_topk_prob": False}, "megarl does not support norm_topk_prob False"),
        ({"partial_rotary_factor": 1.5}, "megarl does not support partial_rotary_factor 1.5"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2}},
            "megarl does not support rope_scaling with rope_type yarn",
        ),
        ({"mlp_bias": True}, "megarl does not support mlp_bias true"),
    ],
)
def test_unsupported_features_of_glm_are_named(changed: dict[str, Any], message: str) -> None:
    check_model(recipe(), GLM)
    check_model(recipe(), GLM | {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2})
    (line,) = model_errors(GLM | changed)
    assert message in line
