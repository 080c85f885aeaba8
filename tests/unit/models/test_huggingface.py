from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from transformers import AutoConfig

from megarl.models.families import FAMILIES, TRANSFORMERS_TYPES, completed
from megarl.models.huggingface import (
    WindowedAttention,
    attention_window,
    dequantized,
    has_sinks,
    linear_attention,
    rope_parameters,
    untrained_part,
    windowed_attention,
    without_untrained_part,
)
from megarl.models.mtp import add_mtp
from megarl.models.multimodal import TEXT_TYPES, WHOLE, text_config, whole_config
from megarl.models.shape import ModelShape
from megarl.models.unsupported import unsupported
from megarl.models.vision import add_vision
from tests.published_models import CONFIGS

COMPUTED = {
    **{"attn_output_gate": True, "full_attention_interval": 4, "output_gate_type": "silu"},
    "intermediate_size": 0,
}
"""Defaults of models with gated delta nets that are not class attributes in transformers."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_match_transformers(model_type: str) -> None:
    ours = completed({"model_type": model_type})
    known = AutoConfig.for_model(TRANSFORMERS_TYPES.get(model_type, model_type))
    theirs = type(known)
    if model_type in TEXT_TYPES.values():  # the whole model's key decides
        whole = type(AutoConfig.for_model(model_type.removesuffix("_text")))
        assert ours.pop("tie_word_embeddings") == whole.tie_word_embeddings
    if (rope := ours.pop("rope_parameters", None)) is not None:
        assert rope | {"rope_theta": ours["rope_theta"]} == known.rope_parameters
    for key in ours.keys() - {"model_type", "rope_theta", "partial_rotary_factor"}:
        # Read defaults from class attributes, because instances have derived values. A key that a family lacks is off.
        off = FAMILIES["llama"].get(key)
        absent = COMPUTED.get(key, off) if "linear_key_head_dim" in ours else off
        assert ours[key] == getattr(theirs, key, absent), key
    for key in ("rope_theta", "partial_rotary_factor"):
        assert ours[key] == known.rope_parameters.get(key, FAMILIES["llama"][key])


def test_multi_token_prediction_is_removed_and_described() -> None:
    config = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    assert untrained_part(config) == "multi-token prediction (num_nextn_predict_layers=1)"
    assert without_untrained_part(config) == {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}
    assert untrained_part(without_untrained_part(config)) is None
    assert without_untrained_part({"model_type": "llama"}) == {"model_type": "llama"}


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_layer_types_and_rotary_share_match_transformers(model_type: str) -> None:
    theirs = AutoConfig.for_model(model_type, num_hidden_layers=9)
    model = completed({"model_type": model_type, "num_hidden_layers": 9})
    assert linear_attention(model).layers == tuple(kind == "linear_attention" for kind in theirs.layer_types)
    assert model["partial_rotary_factor"] == theirs.rope_parameters["partial_rotary_factor"]
    explicit = model | {"layer_types": ["full_attention", *["linear_attention"] * 8]}
    assert linear_attention(explicit).layers == (False, *(True,) * 8)


def test_windowed_layers_match_transformers() -> None:
    theirs = AutoConfig.for_model("gpt_oss", num_hidden_layers=5).to_dict()
    windows = windowed_attention(theirs)
    assert windows is not None and windows.size == theirs["sliding_window"] == 128
    assert windows.layers == tuple(kind == "sliding_attention" for kind in theirs["layer_types"])
    assert windowed_attention(theirs | {"layer_types": None}) == windows
    explicit = theirs | {"layer_types": ["full_attention", *["sliding_attention"] * 4]}
    assert windowed_attention(explicit) == WindowedAttention(128, (False, *(True,) * 4))
    assert windowed_attention(theirs | {"sliding_window": None}) is None
    assert attention_window(theirs) is None and has_sinks(theirs)


def test_models_without_windowed_layers_keep_full_attention() -> None:
    mistral = completed({"model_type": "mistral", "num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 5})
    assert windowed_attention(mistral) is None and attention_window(mistral) == 4096 and not has_sinks(mistral)


def test_text_model_of_a_multimodal_checkpoint_is_used() -> None:
    text = CONFIGS["Qwen3.5-27B"] | {"mtp_num_hidden_layers": 1}
    outer = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "dtype": "bfloat16"}
    config = text_config(outer | {"text_config": text, "vision_config": {"depth": 27}})
    assert config == text | {"dtype": "bfloat16", "vision_config": {"depth": 27}, WHOLE: outer}
    assert untrained_part(config) == (
        "multi-token prediction (mtp_num_hidden_layers=1), the vision encoder (vision_config)"
    )
    assert without_untrained_part(config) == text | {"dtype": "bfloat16", "mtp_num_hidden_layers": 0}
    assert untrained_part(add_mtp(config)) == "the vision encoder (vision_config)"
    assert without_untrained_part(add_mtp(config)) == text | {"dtype": "bfloat16"}
    assert untrained_part(add_vision(add_mtp(config))) is None


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return all settings that transformers reads, without the copy of a key of the whole model."""
    settings = AutoConfig.for_model(**config).to_dict()
    settings["text_config"].pop("tie_word_embeddings", None)
    return settings


WHOLE_MODELS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


@pytest.mark.parametrize("whole", WHOLE_MODELS)
def test_tied_embeddings_follow_transformers(whole: str) -> None:
    """Either config may have the key, both, or neither."""
    for outer, inner in itertools.product((None, False, True), repeat=2):
        keys = [{} if value is None else {"tie_word_embeddings": value} for value in (outer, inner)]
        flat = completed(text_config({"model_type": whole, **keys[0], "text_config": keys[1]}))
        theirs = AutoConfig.for_model(whole, text_config=keys[1], **keys[0])
        assert flat["tie_word_embeddings"] == theirs.tie_word_embeddings, (outer, inner)


@pytest.mark.parametrize("whole", WHOLE_MODELS)
def test_config_of_a_multimodal_model_is_restored(whole: str) -> None:
    theirs = AutoConfig.for_model(whole, tie_word_embeddings=True)
    nested = json.loads(theirs.to_json_string()) | {"architectures": ["A"], "image_token_id": 7}
    flat = text_config(nested)
    restored = without_untrained_part(add_vision(flat))
    assert text_config(restored) == flat and restored == whole_config(flat)
    assert settings(restored) == settings(nested)
    assert flat["tie_word_embeddings"] and restored["text_config"]["tie_word_embeddings"]


def test_flat_config_of_qwen25_vl_is_nested() -> None:
    """The config.json files on the Hub have a single level."""
    theirs = json.loads(AutoConfig.for_model("qwen2_5_vl", image_token_id=7).to_json_string())
    text = theirs.pop("text_config") | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    flat = text_config(text | theirs)
    assert flat["model_type"] == "qwen2_5_vl_text" and "image_token_id" not in flat
    assert settings(whole_config(flat)) == settings(text | theirs) and whole_config(flat)["image_token_id"] == 7
    assert rope_parameters(completed(flat))["rope_type"] == "default"


def test_mtp_layer_of_qwen3_next_is_trained_only_if_kept() -> None:
    """Its config.json does not count the layer."""
    config = CONFIGS["Qwen3-Next-80B-A3B"]
    assert untrained_part(config) == "multi-token prediction (tensors mtp.*)"
    assert untrained_part(add_mtp(config)) is None
    assert without_untrained_part(add_mtp(config)) == without_untrained_part(config) == config


def test_mtp_layer_after_a_delta_net_has_full_attention() -> None:
    config = CONFIGS["Qwen3-Next-80B-A3B"] | {"num_hidden_layers": 6}
    shape = ModelShape.of(add_mtp(config))
    assert shape.kind(5) == (True, True) and shape.kind(6) == (True, False)
    shape = ModelShape.of(add_mtp(config | {"mlp_only_layers": [0]}))
    assert shape.kind(5) == (True, True) and shape.kind(6) == (False, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate false"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type sigmoid"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24 with linear_num_key_heads 16"),
        ({"layer_types": ["full_attention"]}, "layer_types with 1 layers for num_hidden_layers 64"),
        ({"layer_types": ["sliding_attention"] * 64}, "layer_types with sliding_attention"),
    ],
)
def test_other_gated_delta_nets_are_refused(changes, message) -> None:
    assert unsupported(completed(CONFIGS["Qwen3.5-27B"])) == []
    assert unsupported(completed(CONFIGS["Qwen3.5-27B"] | changes)) == [message]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": False}, "attention_bias false"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha 1.0"),
        ({"swiglu_limit": 10.0}, "swiglu_limit 10.0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings true"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 12}, "layer_types that do not alternate"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config with quant_method fp8"),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}, "rope_parameters with rope_type default"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0}}, "yarn without beta_slow"),
    ],
)
def test_gpt_oss_variants_that_vllm_ignores_are_refused(changes, message) -> None:
    """vLLM does not read these values, and would compute a different function."""
    config = CONFIGS["gpt-oss-20b"]
    assert unsupported(completed(config)) == []
    [feature] = unsupported(completed(config | changes))
    assert message in feature


def test_yarn_variants_of_gpt_oss_are_refused() -> None:
    config = CONFIGS["gpt-oss-20b"]
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        changed = config | {"rope_scaling": config["rope_scaling"] | {key: 1.5}}
        assert unsupported(completed(changed)) == [f"rope_scaling with {key} 1.5"]


def test_mxfp4_config_describes_the_bfloat16_model() -> None:
    config = CONFIGS["gpt-oss-20b"]
    stored = config | {"quantization_config": {"quant_method": "mxfp4"}, "torch_dtype": "float32"}
    assert dequantized(stored) == config | {"dtype": "bfloat16"}
    other = config | {"quantization_config": {"quant_method": "fp8"}}
    assert dequantized(other) == other and dequantized(config) == config
