from __future__ import annotations

from typing import Any

import pytest

from megarl.models.config_types import wrong_type
from megarl.models.multimodal import text_config
from megarl.models.rules import check_critic_model, check_model, check_reward_model, check_teacher_model
from megarl.models.rules.draft import check_draft_model
from tests.published_models import CONFIGS, VISION_CONFIGS
from tests.unit.config.rules.recipes import recipe
from tests.unit.models.rules.model_configs import model_errors

VISION = ("model.vision=true", "actor.layout={pp: 1, last_stage_layers: null}")
MODELS = {name: text_config(config) for name, config in VISION_CONFIGS.items()}
QWEN3_VL = MODELS["Qwen3-VL-8B"]
CRITIC = ("algorithm.advantage.estimator=gae", "critic.layout.pp=1")


@pytest.mark.parametrize("name", MODELS)
def test_vision_language_models_fit(name: str) -> None:
    check_model(recipe(*VISION), MODELS[name])


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "Qwen3-VL-8B", "Qwen3-VL-30B-A3B"])
def test_models_without_a_text_class_require_vision(name: str) -> None:
    [line] = model_errors(MODELS[name], VISION[1])
    assert line == (
        f"model.vision=false: model.path=smollm2: vLLM runs models of type {VISION_CONFIGS[name]['model_type']} only "
        "with their vision tower. Fix: set model.vision=true"
    )


def test_text_model_of_qwen35_works_without_its_tower() -> None:
    check_model(recipe(VISION[1]), MODELS["Qwen3.5-35B-A3B"])


def test_text_model_with_vision_is_refused() -> None:
    [line] = model_errors(CONFIGS["Qwen3-8B"], *VISION)
    assert (
        line == "model.vision=true: model.path=smollm2 has no vision tower (vision_config). Fix: set model.vision=false"
    )


@pytest.mark.parametrize(
    ("layout", "first", "fix"),
    [
        # (36 - 2) / 17 = 2
        ("{pp: 18}", "which has 2 layers", "set actor.layout.first_stage_layers=19"),
        ("{pp: 3, vpp: 6}", "which has 12 / vpp=6 = 2 layers", "set actor.layout.first_stage_layers=24"),
        ("{pp: 36}", "which has 1 layer", "set actor.layout.pp=12, first_stage_layers=null and"),
        (
            "{pp: 2, vpp: 18}",
            "which has 18 / vpp=18 = 1 layer",
            "set actor.layout.pp=1, vpp=1, first_stage_layers=null and",
        ),
        ("{pp: 3, first_stage_layers: 2}", "which has 2 layers", "set actor.layout.first_stage_layers=4"),
    ],
)
def test_deepstack_layers_must_be_in_the_first_chunk(layout: str, first: str, fix: str) -> None:
    """Qwen3-VL-8B has 36 layers, the first three of which add features."""
    sizes = f"actor.layout={layout}".replace("}", ", last_stage_layers: null}")
    [line] = model_errors(QWEN3_VL, VISION[0], sizes)
    assert f"must be in the first stage's first chunk, {first}. Fix: {fix}" in line
    remedies = fix.removeprefix("set actor.layout.").removesuffix(" and").split(", ")
    changes = [f"actor.layout.{remedy}" for remedy in remedies]
    check_model(recipe(VISION[0], sizes, "actor.layout.last_stage_layers=null", *changes), QWEN3_VL)


@pytest.mark.parametrize(
    ("overrides", "message", "remedy"),
    [
        (CRITIC, "the critic does not see the images", ["critic.shared_backbone=true"]),
        (["implicit_reward.coefficient=1"], "the implicit reward model does", ["implicit_reward.coefficient=0"]),
        (
            ["reward_model.path=rm"],
            "the reward model would read placeholders",
            ["reward_model.path=null"],
        ),
        (["teachers.models=[{name: t, path: big}]"], "teachers do not see the images", ["teachers.models=[]"]),
        (
            ["rollout.speculative={method: draft_model, path: small, tokens: 3}"],
            "draft models do not see the images",
            ["rollout.speculative.method=ngram", "rollout.speculative.path=null"],
        ),
        (["rollout.quantization=fp8_block"], "engines would also quantize", ["rollout.quantization=null"]),
    ],
)
def test_models_that_do_not_see_images_are_refused(overrides: list[str], message: str, remedy: list[str]) -> None:
    lines = model_errors(QWEN3_VL, *VISION, *overrides)
    assert any(f"with model.vision=true, {message}" in line for line in lines)
    assert all(each in line for line in lines if message in line for each in remedy)
    check_model(recipe(*VISION, *overrides, *remedy), QWEN3_VL)


def test_mtp_layers_with_a_tower_are_refused() -> None:
    model = text_config(
        VISION_CONFIGS["Qwen3.5-35B-A3B"]
        | {"text_config": VISION_CONFIGS["Qwen3.5-35B-A3B"]["text_config"] | {"mtp_num_hidden_layers": 1}}
    )
    [line] = model_errors(model, *VISION, "actor.mtp.loss_coefficient=0.1")
    assert line.endswith("MTP layers are not supported with a vision tower. Fix: set actor.mtp.loss_coefficient=null")
    check_model(recipe(*VISION), model)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"mrope_section": [24, 20, 20]}, "mrope_interleaved: true"),
        ({"mrope_interleaved": True}, r"mrope_section: \[24, 20, 20\]"),
    ],
)
def test_keys_that_engines_read_are_required(changes: dict[str, Any], missing: str) -> None:
    message = f"lacks {missing}, which engines require. Fix: add {missing} to rope_scaling of text_config"
    with pytest.raises(ValueError, match=message):
        check_model(recipe(*VISION), QWEN3_VL | {"rope_scaling": changes | {"rope_type": "default"}})


def test_router_key_of_qwen3_vl_is_required() -> None:
    model = {key: value for key, value in MODELS["Qwen3-VL-30B-A3B"].items() if key != "norm_topk_prob"}
    [line] = model_errors(model, *VISION)
    assert line.endswith("lacks norm_topk_prob, which engines require. Fix: add norm_topk_prob: true to text_config")


@pytest.mark.parametrize(
    ("tower", "feature"),
    [
        ({"hidden_act": "relu"}, "vision_config with hidden_act relu"),
        ({"in_channels": 1}, "vision_config with in_channels 1"),
        ({"out_hidden_size": 8}, "vision_config with out_hidden_size 8 for hidden_size 4096"),
        ({"num_heads": 7}, "vision_config with hidden_size 1152 and num_heads 7"),
        ({"num_heads": 192}, "vision_config with hidden_size 1152 and num_heads 192"),
        ({"num_position_embeddings": 10}, "vision_config with num_position_embeddings 10, which is not a square"),
        ({"deepstack_visual_indexes": [27]}, r"vision_config with deepstack_visual_indexes \[27\]"),
        ({"deepstack_visual_indexes": [1] * 37}, "deepstack_visual_indexes with 37 layers for num_hidden_layers 36"),
        ({"window_size": 31}, "vision_config with window_size 31 for patches of 16 pixels"),
    ],
)
def test_unsupported_towers_are_refused(tower: dict[str, Any], feature: str) -> None:
    model = text_config(VISION_CONFIGS["Qwen3-VL-8B"])
    with pytest.raises(ValueError, match=f"megarl does not support {feature}"):
        check_model(recipe(*VISION), model | {"vision_config": model["vision_config"] | tower})


def test_vision_language_models_are_only_policies() -> None:
    """Only engines with a vision tower run them."""
    actor, message = CONFIGS["Qwen3-8B"], "models of type qwen3_vl are supported only as the policy"
    with pytest.raises(ValueError, match=message):
        check_critic_model(recipe(*CRITIC, "critic.path=c"), actor, QWEN3_VL)
    judge = recipe("reward_model={path: rm, engine: vllm, input_format: question, judge: {max_new_tokens: 9}}")
    with pytest.raises(ValueError, match=message):
        check_reward_model(judge, actor, QWEN3_VL)
    config = recipe("teachers.models=[{name: t, path: big}]")
    with pytest.raises(ValueError, match=message):
        check_teacher_model(config, config.teachers.models[0], actor, QWEN3_VL)
    with pytest.raises(ValueError, match=message):
        check_draft_model(recipe("rollout.speculative={method: draft_model, path: d, tokens: 3}"), actor, QWEN3_VL)


@pytest.mark.parametrize("keys", [{"megarl_multimodal": 1}, {"megarl_vision": True}])
def test_files_cannot_set_internal_keys(keys: dict[str, Any]) -> None:
    whole = VISION_CONFIGS["Qwen3-VL-8B"]
    assert text_config(whole | keys | {"text_config": whole["text_config"] | keys}) == text_config(whole)
    assert text_config(CONFIGS["Qwen3-8B"] | keys) == CONFIGS["Qwen3-8B"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vision_config": [1]}, r"vision_config=[1]: expected an object"),
        ({"vision_config": {"depth": "27"}}, "vision_config.depth='27': expected an integer from 1 to 10000"),
        (
            {"vision_config": {"patch_size": [16, 16]}},
            "vision_config.patch_size=[16, 16]: expected an integer",
        ),
        ({"vision_config": {"fullatt_block_indexes": 3}}, "fullatt_block_indexes=3: expected a list of integers"),
        ({"image_token_id": -1}, "image_token_id=-1: expected an integer from 0 to"),
    ],
)
def test_wrong_types_in_tower_configs_are_described(changes: dict[str, Any], problem: str) -> None:
    found = wrong_type(text_config(VISION_CONFIGS["Qwen3-VL-8B"] | changes))
    assert found is not None and problem in found
