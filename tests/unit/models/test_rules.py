from __future__ import annotations

from typing import Any

import pytest

from megarl.models.huggingface import FAMILIES, completed
from megarl.models.rules import (
    check_critic_model,
    check_model,
    check_reward_model,
    engine_shards_keep_blocks_whole,
    model_has_mtp,
)
from megarl.resharding.families import quantized_destinations, vllm_holders
from tests.marks import each_value
from tests.published_models import CONFIGS
from tests.unit.config.rules.recipes import GAE, errors, recipe

SMOLLM2 = {
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
}


def model_errors(hf_config: dict[str, Any], *overrides: str) -> list[str]:
    config = recipe(*overrides)
    with pytest.raises(ValueError) as error:
        check_model(config, hf_config)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor.layout.tp=3", "actor.layout.sequence_parallel=true"],
        ["actor.layout.dp=2"],
        ["rollout.tp=3"],
        ["rollout.context_length=8192", "actor.tokens_per_microbatch=8192"],
        ["actor.layout.pp=4", "actor.layout.last_stage_layers=6"],
        ["actor.layout.pp=4", "actor.layout.first_stage_layers=8", "actor.layout.last_stage_layers=6"],
        ["actor.layout.first_stage_layers=17"],
        ["actor.layout.pp=30", "actor.layout.last_stage_layers=null"],
    ],
)
def test_model_fits(overrides: list[str]) -> None:
    check_model(recipe(*overrides), SMOLLM2)


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ["actor.layout.tp=2"],
            [
                (
                    "actor.layout.tp=2: 9 attention heads are not divisible by 2 (9 / 2 = 4.5). Fix: set "
                    "actor.layout.tp to 1 or 3"
                ),
                (
                    "actor.layout.tp=2: 3 KV heads are not divisible by 2 (3 / 2 = 1.5). Fix: set actor.layout.tp to "
                    "1 or 3"
                ),
            ],
        ),
        (
            ["actor.layout.tp=9"],
            [
                (
                    "actor.layout.tp=9: 3 KV heads are not divisible by 9 (3 / 9 = 0.3333). Fix: set actor.layout.tp "
                    "to 1 or 3"
                ),
                (
                    "actor.layout.tp=9: 1536 MLP rows (intermediate_size) are not divisible by 9 (1536 / 9 = 170.7). "
                    "Fix: set"
                ),
            ],
        ),
        (
            ["rollout.tp=2"],
            [
                "rollout.tp=2: 9 attention heads are not divisible by 2 (9 / 2 = 4.5). Fix: set rollout.tp to 1 or 3",
                "rollout.tp=2: 3 KV heads are not divisible by 2 (3 / 2 = 1.5). Fix: set rollout.tp to 1 or 3",
            ],
        ),
        (["rollout.tp=9"], ["rollout.tp=9: 1536 MLP rows (intermediate_size) are not divisible by 9"]),
        (
            ["actor.layout.pp=4", "actor.layout.last_stage_layers=null"],
            [
                "actor.layout.pp=4: 30 layers cannot be split evenly over the stages: 30 layers over 4 stages (30 / 4 "
                "= 7.5). Fix: set pp to 1, 2, 3, 5, 6, 10, 15 or 30 with first_stage_layers=null and "
                "last_stage_layers=null, or last_stage_layers=6 alone (3 x 8 + 6 = 30)"
            ],
        ),
        (
            ["actor.layout.pp=3", "actor.layout.last_stage_layers=13"],
            [
                "actor.layout.pp=3, last_stage_layers=13: 30 layers cannot be split evenly over the stages: 30 - 13 = "
                "17 layers over 2 other stages (17 / 2 = 8.5). Fix: set pp"
            ],
        ),
        (
            ["actor.layout.vpp=2"],
            [
                "actor.layout.vpp=2: 13 layers of a pipeline stage (last_stage_layers) are not divisible by 2 (13 / 2 "
                "= 6.5). Fix: set actor.layout.vpp to 1"
            ],
        ),
        (["actor.layout.last_stage_layers=30"], ["30 - 30 = 0 layers over 1 other stage (0 / 1 = 0). Fix: set pp"]),
        (["actor.layout.first_stage_layers=13"], ["30 - 13 - 13 = 4 layers over 0 other stages. Fix: set pp"]),
        (
            ["actor.layout.pp=31", "actor.layout.last_stage_layers=null"],
            ["30 layers over 31 stages (30 / 31 = 0.9677)"],
        ),
        (
            ["rollout.context_length=8193", "actor.tokens_per_microbatch=10000"],
            ["rollout.context_length=8193: the model has 8192 positions (max_position_embeddings). Fix: set"],
        ),
        (
            ["rollout.top_k=49153"],
            ["rollout.top_k=49153: the model's vocabulary has 49152 tokens. Fix: set rollout.top_k to"],
        ),
    ],
)
def test_layout_that_does_not_fit_the_model_is_refused(overrides: list[str], messages: list[str]) -> None:
    lines = model_errors(SMOLLM2, *overrides)
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert message in line


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


MIXTRAL = SMOLLM2 | {"model_type": "mixtral", "num_attention_heads": 12, "num_key_value_heads": 6}
QWEN3_MOE = MIXTRAL | {"model_type": "qwen3_moe", "num_experts": 12, "moe_intermediate_size": 10}


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        (SMOLLM2, ["actor.layout.ep=2", "actor.layout.dp=2"], "actor.layout.ep=2: model.path=smollm2 has no experts"),
        (
            QWEN3_MOE,
            ["algorithm.trust_region.kl_limit=0.01", "algorithm.objective.name=unclipped", "model.dtype=float32"],
            "model.path=smollm2 may route a token to different experts in each pass. Fix: set algorithm.trust_region",
        ),
        (
            MIXTRAL,
            ["actor.layout.ep=3", "actor.layout.dp=3"],
            (
                "actor.layout.ep=3: 8 experts are not divisible by 3 (8 / 3 = 2.667). Fix: set actor.layout.ep to 1, "
                "2, 4 or 8"
            ),
        ),
        (
            QWEN3_MOE,
            ["actor.layout.ep=3", "actor.layout.dp=12", "actor.layout.etp=4"],
            (
                "actor.layout.etp=4: 10 MLP rows of an expert are not divisible by 4 (10 / 4 = 2.5). Fix: set "
                "actor.layout.etp to 1, 2, 5 or 10"
            ),
        ),
        (
            QWEN3_MOE,
            ["actor.layout.tp=6", "actor.layout.sequence_parallel=true"],
            "actor.layout.tp=6: 10 MLP rows of an expert are not divisible by 6",
        ),
        (
            QWEN3_MOE,
            ["actor.layout.tp=2"],
            "actor.layout.tp=2, sequence_parallel=false: every rank would dispatch all tokens",
        ),
        (QWEN3_MOE, ["rollout.tp=6"], "rollout.tp=6: 10 MLP rows of an expert are not divisible by 6"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, [], "megarl does not support router_jitter_noise 0.1"),
    ],
)
def test_experts_that_do_not_fit_are_refused(model: dict[str, Any], overrides: list[str], message: str) -> None:
    (line,) = model_errors(model, *overrides)
    assert message in line


@pytest.mark.parametrize(
    ("layout", "fix"),
    [
        ("tp: 2", "actor.layout.etp=1 and actor.layout.ep to at least 2, or set actor.layout.tp=1"),
        ("tp: 2, ep: 2, etp: 2, dp: 2", "actor.layout.etp=1"),
    ],
)
def test_experts_with_biases_are_not_sharded(layout: str, fix: str) -> None:
    model = CONFIGS["gpt-oss-20b"]
    (line,) = model_errors(model, f"actor.layout={{{layout}, sequence_parallel: true}}")
    assert line == (
        "actor.layout.etp=2: the experts have biases, which Megatron does not support in sharded experts. Fix: set "
        f"{fix}"
    )
    check_model(recipe("actor.layout={tp: 2, ep: 2, etp: 1, sequence_parallel: true}"), model)
    check_model(recipe("actor.layout={dp: 2}"), model)


def test_gpt_oss_engine_does_not_replicate_kv_heads() -> None:
    model = CONFIGS["gpt-oss-20b"]
    check_model(recipe("rollout.tp=8"), model)
    assert model_errors(model, "rollout.tp=16") == [
        "rollout.tp=16: 8 KV heads are not divisible by 16 (8 / 16 = 0.5). Fix: set rollout.tp to 1, 2, 4 or 8"
    ]


def test_delta_net_heads_must_divide_over_tp_and_cp() -> None:
    model = CONFIGS["Qwen3.5-27B"]
    check_model(recipe("actor.layout={tp: 4, cp: 4}"), model)
    lines = model_errors(model, "actor.layout={tp: 2, cp: 3}")
    assert lines == [
        "actor.layout.tp=2, cp=3: 16 key heads of the gated delta nets cannot be split over tp x cp = 2 x 3 = 6 ranks. "
        "Fix: set actor.layout.tp and actor.layout.cp so that their product is 1, 2, 4, 8 or 16"
    ]
    lines = model_errors(model | {"linear_num_key_heads": 6, "linear_num_value_heads": 6}, "rollout.tp=4")
    assert lines == [
        "rollout.tp=4: 6 key heads of the gated delta nets are not divisible by 4 (6 / 4 = 1.5). Fix: set rollout.tp "
        "to 1 or 2"
    ]


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
def test_kept_prediction_layer_is_supported(name: str, count: int | None, reason: str | None) -> None:
    key = "mtp_num_hidden_layers" if name.startswith("Qwen3.5") else "num_nextn_predict_layers"
    model = CONFIGS[name] | ({} if count is None else {key: count})
    config = recipe("actor.mtp.loss_coefficient=0.0")
    expected = f"actor.mtp.loss_coefficient=0.0: model.path={config.model.path}: {reason}"
    lines = list(model_has_mtp(config, model))
    assert [line.startswith(expected) for line in lines] == ([] if reason is None else [True])
    assert all(line.endswith(". Fix: set actor.mtp.loss_coefficient=null") for line in lines)
    assert list(model_has_mtp(recipe(), model)) == []


def test_prediction_layer_with_its_own_embeddings_is_refused() -> None:
    model = CONFIGS["Qwen3.5-27B"] | dict(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    assert list(model_has_mtp(recipe("actor.mtp.loss_coefficient=0.0"), model)) == []
    model["mtp_use_dedicated_embeddings"] = True
    [line] = model_has_mtp(recipe("actor.mtp.loss_coefficient=0.0"), model)
    assert "mtp_use_dedicated_embeddings=true, but vLLM shares the model's embeddings. Fix: set actor.mtp" in line


def test_gated_delta_nets_are_not_quantized() -> None:
    [line] = model_errors(CONFIGS["Qwen3.5-27B"], "rollout.quantization=fp8_block", "model.dtype=bfloat16")
    assert line.startswith("rollout.quantization=fp8_block: vLLM's gated delta nets keep") and "=null" in line


DEEPSEEK = SMOLLM2 | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 9,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_parameters": {"rope_type": "yarn", "factor": 40},
}


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


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_missing_router_keys_for_the_engine_are_refused(model_type: str) -> None:
    model = DEEPSEEK | {"model_type": model_type}
    (line,) = model_errors({key: value for key, value in model.items() if key != "topk_method"})
    assert "lacks topk_method, so the engine would route with softmax and without the bias. Fix: add" in line


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


def test_dense_mlp_rows_are_ignored_without_dense_layers() -> None:
    odd = QWEN3_MOE | {"intermediate_size": 7}
    check_model(recipe("rollout.tp=2", "actor.layout.tp=2", "actor.layout.sequence_parallel=true"), odd)
    lines = model_errors(
        odd | {"mlp_only_layers": [3]}, "rollout.tp=2", "actor.layout.tp=2", "actor.layout.sequence_parallel=true"
    )
    assert ["7 MLP rows (intermediate_size) are not divisible by 2" in line for line in lines] == [True, True]


def test_missing_kv_heads_default_to_attention_heads() -> None:
    ungrouped = {name: value for name, value in SMOLLM2.items() if name != "num_key_value_heads"}
    (line,) = model_errors(ungrouped, "actor.layout.tp=9")
    assert "MLP rows" in line


def test_engine_may_replicate_kv_heads() -> None:
    wide = SMOLLM2 | {"num_attention_heads": 12}
    check_model(recipe("rollout.tp=6"), wide)
    assert model_errors(wide, "rollout.tp=4") == [
        "rollout.tp=4: 3 KV heads are not divisible by 4 (3 / 4 = 0.75). Fix: set rollout.tp to 1, 3, 6 or 12"
    ]


CLASSIFIER = SMOLLM2 | {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


@pytest.mark.parametrize(
    ("changed", "overrides", "message"),
    [
        (
            {},
            ["critic.layout.tp=2"],
            "critic.layout.tp=2: 9 attention heads are not divisible by 2 (9 / 2 = 4.5). Fix: set",
        ),
        ({}, ["critic.layout.pp=7"], "critic.layout.pp=7: 30 layers cannot be split evenly over the stages"),
        ({"model_type": "gpt2"}, [], "critic.path=rm: model_type gpt2 is not supported"),
        ({"hidden_act": "gelu"}, [], "critic.path=rm: megarl does not support hidden_act gelu"),
        (
            {"id2label": {"0": "bad", "1": "good"}},
            [],
            "critic.path=rm: the model has 2 labels (id2label), but a score is a single",
        ),
        (
            {"vocab_size": 49151},
            [],
            "critic.path=rm: its vocab_size=49151 is smaller than the actor's vocab_size=49152, but it reads",
        ),
    ],
)
def test_critic_that_does_not_fit_is_refused(changed: dict[str, Any], overrides: list[str], message: str) -> None:
    config = recipe(GAE, "critic.path=rm", "critic.layout.pp=1", "critic.tokens_per_microbatch=256", *overrides)
    with pytest.raises(ValueError) as error:
        check_critic_model(config, SMOLLM2 | {"vocab_size": 49152}, CLASSIFIER | {"vocab_size": 49152} | changed)
    assert message in str(error.value)


def test_critic_from_the_actors_model_fits() -> None:
    model = SMOLLM2 | {"vocab_size": 49152, "architectures": ["LlamaForCausalLM"]}
    check_critic_model(recipe(GAE, "critic.layout.tp=3"), model, model)


@pytest.mark.parametrize(
    ("changed", "overrides", "message"),
    [
        ({}, ["reward_model.layout.tp=2"], "reward_model.layout.tp=2: 9 attention heads are not divisible by 2"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            [],
            "reward_model.path=rm: its architecture is LlamaForCausalLM, which",
        ),
        (
            {"id2label": {"0": "bad", "1": "good"}},
            [],
            "reward_model.path=rm: the model has 2 labels (id2label), but a score",
        ),
        ({}, ["reward_model.step_end='. '"], "reward_model.step_end='. ': reward_model.path=rm scores whole samples"),
        ({"vocab_size": 9}, [], "reward_model.path=rm: its vocab_size=9 is smaller than the actor's vocab_size=49152"),
    ],
)
def test_reward_model_that_does_not_fit_is_refused(changed: dict[str, Any], overrides: list[str], message: str) -> None:
    config = recipe("reward_model.path=rm", *overrides)
    with pytest.raises(ValueError) as error:
        check_reward_model(config, SMOLLM2 | {"vocab_size": 49152}, CLASSIFIER | {"vocab_size": 49152} | changed)
    assert message in str(error.value)


def test_judge_is_a_language_model_of_any_vocabulary() -> None:
    judge = ["reward_model.path=rm", VLLM, "reward_model={input_format: question, judge: {max_new_tokens: 64}}"]
    actor, model = SMOLLM2 | {"vocab_size": 49152}, SMOLLM2 | {"architectures": ["LlamaForCausalLM"], "vocab_size": 9}
    check_reward_model(recipe(*judge), actor, model)
    with pytest.raises(ValueError, match="its architecture is LlamaForCausalLM, which has no score head"):
        check_reward_model(recipe("reward_model.path=rm", VLLM), actor, model)
    with pytest.raises(
        ValueError, match=r"SequenceClassification, but reward_model.input_format=question requires a language"
    ):
        check_reward_model(recipe(*judge), actor, CLASSIFIER | {"vocab_size": 49152})
    with pytest.raises(ValueError, match=r"reward_model.layout.tp=2: 9 attention heads are not divisible by 2"):
        check_reward_model(recipe(*judge, "reward_model.layout.tp=2"), actor, model)


def test_trained_classifier_kind_must_fit_the_objective() -> None:
    whole = ["algorithm.objective.name=reward_model", "data.format=preferences"]
    steps = ["algorithm.objective.name=process_reward_model", "data.format=labels"]
    check_model(recipe(*whole), CLASSIFIER)
    check_model(recipe(*steps), TOKEN_CLASSIFIER)
    for keys in (whole, steps):
        check_model(recipe(*keys), SMOLLM2)
    with pytest.raises(
        ValueError, match=r"its architecture is \.\.\.ForSequenceClassification, but .*=process_reward_model trains"
    ):
        check_model(recipe(*steps), CLASSIFIER)
    with pytest.raises(
        ValueError, match=r"its architecture is \.\.\.ForTokenClassification, but .*=reward_model trains \.\.\.ForSeq"
    ):
        check_model(recipe(*whole), TOKEN_CLASSIFIER)


VLLM = "reward_model.engine=vllm"


@pytest.mark.parametrize(
    ("changed", "overrides", "message"),
    [
        ({}, ["reward_model.layout.tp=2"], "reward_model.layout.tp=2: 9 attention heads are not divisible by 2"),
        ({"max_position_embeddings": 128}, [], "rollout.context_length=256: the model has 128 positions"),
        ({"hidden_act": "gelu"}, [], "reward_model.path=rm: megarl does not support hidden_act gelu"),
        (
            {"id2label": {"0": "bad", "1": "good"}},
            [],
            "reward_model.path=rm: the model has 2 labels (id2label), but a score",
        ),
    ],
)
def test_reward_model_that_vllm_cannot_serve_is_refused(
    changed: dict[str, Any], overrides: list[str], message: str
) -> None:
    config = recipe("reward_model.path=rm", VLLM, *overrides)
    with pytest.raises(ValueError) as error:
        check_reward_model(config, SMOLLM2 | {"vocab_size": 49152}, CLASSIFIER | {"vocab_size": 49152} | changed)
    assert message in str(error.value)


def test_vllm_supports_attention_windows_unlike_megatron() -> None:
    model = CLASSIFIER | {"vocab_size": 49152, "model_type": "mistral", "sliding_window": 64}
    check_reward_model(recipe("reward_model.path=rm", VLLM), SMOLLM2 | {"vocab_size": 49152}, model)
    with pytest.raises(ValueError, match="exceeds the model's sliding_window=64"):
        check_reward_model(recipe("reward_model.path=rm"), SMOLLM2 | {"vocab_size": 49152}, model)


TOKEN_CLASSIFIER = CLASSIFIER | {"architectures": ["LlamaForTokenClassification"], "vocab_size": 300}


@pytest.mark.parametrize(
    "overrides",
    [
        ["reward_model.input_format=ids"],
        ["reward_model.input_format=chat", "reward_model.step_end=."],
        ["reward_model.input_format=chat", "reward_model.aggregation=mean"],
        ["reward_model.input_format=chat", "algorithm.advantage.estimator=grpo"],
    ],
)
def test_token_scores_must_refer_to_sampled_tokens(overrides: list[str]) -> None:
    actor = SMOLLM2 | {"vocab_size": 300}
    check_reward_model(recipe("reward_model.path=rm", GAE, *overrides), actor, TOKEN_CLASSIFIER)
    with pytest.raises(
        ValueError, match=r"reward_model.input_format=text: reward_model.path=rm scores the tokens of its own tokenizer"
    ):
        check_reward_model(
            recipe("reward_model.path=rm", GAE, "reward_model.input_format=text"), actor, TOKEN_CLASSIFIER
        )


def test_text_reward_model_has_its_own_vocabulary_and_length() -> None:
    read = ["reward_model.path=rm", "reward_model.input_format=text", "reward_model.aggregation=mean"]
    check_reward_model(recipe(*read), SMOLLM2 | {"vocab_size": 49152}, TOKEN_CLASSIFIER)
    long = recipe(*read, "reward_model.context_length=9000")
    with pytest.raises(ValueError, match=r"reward_model.context_length=9000: the model has 8192 positions"):
        check_reward_model(long, SMOLLM2 | {"vocab_size": 49152}, TOKEN_CLASSIFIER)
    (line,) = errors(*read, "reward_model.context_length=20000")
    assert line.startswith(
        "reward_model.tokens_per_microbatch=16384: a sample can have up to reward_model.context_length=20000"
    )
    (line,) = errors("reward_model.path=rm", "reward_model.context_length=512")
    assert line == (
        "reward_model.context_length=512: has no effect unless reward_model.input_format=text. Fix: set "
        "reward_model.input_format=text, or remove the key (its default is null)"
    )


QUANTIZABLE = [name for name, hf_config in CONFIGS.items() if "linear_num_key_heads" not in hf_config]


@pytest.mark.parametrize(("name", "whole_experts"), each_value(QUANTIZABLE, [False, True]))
def test_engine_tp_that_splits_fp8_blocks_is_refused(name: str, whole_experts: bool) -> None:
    """The rule accepts exactly the tensor-parallel sizes whose shards start and end at block boundaries."""
    model = completed(CONFIGS[name] | {"num_hidden_layers": 4})
    for tp in (1, 2, 4, 8):
        keys = ("rollout.quantization=fp8_block", f"rollout.tp={tp}")
        experts = f"rollout.vllm_overrides={{enable_expert_parallel: {str(whole_experts).lower()}}}"
        try:
            holders = vllm_holders(model, tp, 1, "bfloat16", whole_experts)
        except ValueError:
            continue
        messages = [*engine_shards_keep_blocks_whole(recipe(*keys, experts), model)]
        try:
            quantized_destinations(model, holders)
        except ValueError:
            assert len(messages) == 1
            assert messages[0].startswith(f"rollout.quantization=fp8_block: with rollout.tp={tp} ")
        else:
            assert messages == []


def test_split_fp8_block_error_names_the_fixes() -> None:
    keys = ("rollout.quantization=fp8_block", "rollout.tp=4")
    [message] = engine_shards_keep_blocks_whole(recipe(*keys), completed(CONFIGS["Qwen3-30B-A3B"]))
    assert message == (
        "rollout.quantization=fp8_block: with rollout.tp=4 an engine rank has 192 MLP rows of an expert, which is not "
        "a multiple of the block size 128. Fix: set rollout.tp to 1 or 2, or set "
        "rollout.vllm_overrides={enable_expert_parallel: true} so that each expert stays on one rank"
    )
    smollm2 = completed(SMOLLM2 | {"hidden_size": 576})
    [message] = engine_shards_keep_blocks_whole(recipe("rollout.quantization=fp8_block"), smollm2)
    assert message.endswith(
        "has 576 query rows, which is not a multiple of the block size 128. Fix: set rollout.quantization=null"
    )
