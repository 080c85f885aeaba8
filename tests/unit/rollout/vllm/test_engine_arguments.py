"""Arguments of vLLM engines, compared with those that vLLM accepts."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from vllm import EngineArgs, SamplingParams
from vllm.exceptions import VLLMValidationError

from megarl.config.load import load
from megarl.config.schema import Config
from megarl.config.vllm_arguments import ADJUSTABLE, MANAGED, REFITTABLE
from megarl.rollout.vllm.engine_arguments import engine_arguments, rollout_arguments
from tests.paths import BASE
from tests.published_models import CONFIGS

LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 128},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64},
}

VISION = {"model_type": "qwen3_5", "text_config": LLAMA | {"model_type": "qwen3_5_text"}, "vision_config": {}}
COMMON = ("float32", 1, 64, 0.5)
"""Dtype and other arguments of an engine."""


def model(folder: Path, config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def recipe(folder: Path, *keys: str) -> Config:
    return load(BASE, [f"model.path={folder}", "data.source=arithmetic", *keys])


def test_vllm_has_the_arguments_and_defaults_that_megarl_uses():
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {name for given in MANAGED.values() for name in given} | ADJUSTABLE <= known
    assert {name: getattr(EngineArgs("model"), name) for name in REFITTABLE} == {
        name: value for name, (value, _) in REFITTABLE.items()
    }


def test_overrides_are_passed_on_or_rejected_by_name(tmp_path):
    folder = model(tmp_path, LLAMA)
    changed = engine_arguments(
        "rollout", folder, *COMMON, {"enforce_eager": False, "block_size": 32}, load_format="dummy"
    )
    assert (changed["enforce_eager"], changed["block_size"], changed["load_format"]) == (False, 32, "dummy")
    assert changed["max_model_len"] == 64 and "mamba_ssm_cache_dtype" not in changed
    for name, fix in (("no_such_key", ""), ("max_num_seq", "use max_num_seqs")):
        message = f"^rollout.vllm_overrides.{name}=1: not a vLLM engine argument. Fix: {fix}"
        with pytest.raises(ValueError, match=message):
            engine_arguments("rollout", folder, *COMMON, {name: 1})


def test_linear_attention_keeps_its_state_in_float32(tmp_path):
    folder = model(tmp_path, CONFIGS["Qwen3-Next-80B-A3B"])
    assert engine_arguments("rollout", folder, *COMMON, {})["mamba_ssm_cache_dtype"] == "float32"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (None, None),
        (
            "{method: ngram, tokens: 5}",
            dict(method="ngram", num_speculative_tokens=5, prompt_lookup_min=2, prompt_lookup_max=4),
        ),
        ("{method: draft_model, tokens: 2, path: PATH}", dict(method="draft_model", num_speculative_tokens=2)),
        ("{method: eagle3, tokens: 4, path: PATH}", dict(method="eagle3", num_speculative_tokens=4)),
    ],
    ids=["none", "ngram", "draft_model", "eagle3"],
)
def test_speculative_decoding_is_configured(tmp_path, keys, expected):
    folder = model(tmp_path, LLAMA)
    overrides = [] if keys is None else [f"rollout.speculative={keys.replace('PATH', str(folder))}"]
    found = rollout_arguments(recipe(folder, *overrides).rollout, folder, "float32", 0).get("speculative_config")
    assert found == (expected | {"model": str(folder)} if keys and "PATH" in keys else expected)


def test_vision_towers_run_only_for_images(tmp_path):
    folder = model(tmp_path, VISION)
    rollout = recipe(folder).rollout
    text, default, limited = (
        rollout_arguments(rollout, folder, "float32", 0, pixels=pixels) for pixels in (None, (None, None), (784, 3136))
    )
    assert text["hf_overrides"]["architectures"] == ["Qwen3_5ForCausalLM"] and "mm_encoder_tp_mode" not in text
    assert "architectures" not in default["hf_overrides"] and default["mm_encoder_tp_mode"] == "data"
    assert default["mm_processor_kwargs"] == {}
    assert limited["mm_processor_kwargs"] == {"min_pixels": 784, "max_pixels": 3136}


@pytest.mark.parametrize(("temperature", "is_valid"), [(0.01, True), (2.0, True), (2.01, False)])
def test_recipes_accept_the_temperatures_that_vllm_accepts(tmp_path, temperature, is_valid):
    with nullcontext() if is_valid else pytest.raises(VLLMValidationError):
        SamplingParams(temperature=temperature)
    with nullcontext() if is_valid else pytest.raises(ValueError, match="temperature"):
        recipe(tmp_path, f"rollout.temperature={temperature}")
