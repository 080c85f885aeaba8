"""Arguments of vLLM engines, compared with those that vLLM accepts."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.vllm_arguments import ADJUSTABLE, MANAGED, REFITTABLE
from tests.paths import ROOT
from tests.published_models import CONFIGS

PROGRAM = """
import pickle, sys
from pathlib import Path
from tests.unit.rollout.vllm.test_engine_arguments import collect_arguments

folder = Path(sys.argv[1])
(folder / "collected").write_bytes(pickle.dumps(collect_arguments(folder)))
"""


LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 128},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64},
}

VISION = {"model_type": "qwen3_5", "text_config": LLAMA | {"model_type": "qwen3_5_text"}, "vision_config": {}}


def collect_arguments(folder: Path) -> dict[str, object]:
    from vllm import EngineArgs, SamplingParams
    from vllm.exceptions import VLLMValidationError

    from megarl.config.load import load
    from megarl.rollout.vllm.engine_arguments import engine_arguments, rollout_arguments
    from tests.paths import BASE

    def recipe(temperature: float) -> None:
        load(BASE, [f"model.path={folder}", "data.source=arithmetic", f"rollout.temperature={temperature}"])

    def sampling(temperature: float) -> None:
        try:
            SamplingParams(temperature=temperature)
        except VLLMValidationError as error:
            raise ValueError from error

    common = ("rollout", folder, "float32", 1, 64, 0.5)
    refusals = []
    for name in ("no_such_key", "max_num_seq"):
        try:
            engine_arguments(*common, {name: 1})
        except ValueError as error:
            refusals.append(str(error))
    return {
        "known": {field.name for field in dataclasses.fields(EngineArgs)},
        "defaults": {name: getattr(EngineArgs("model"), name) for name in REFITTABLE},
        "changed": engine_arguments(*common, {"enforce_eager": False, "block_size": 32}, load_format="dummy"),
        "refusals": refusals,
        "speculative": [
            rollout_arguments(
                load(BASE, [f"model.path={folder}", "data.source=arithmetic", *keys]).rollout, folder, "float32", 0
            ).get("speculative_config")
            for keys in (
                [],
                ["rollout.speculative={method: ngram, tokens: 5}"],
                [f"rollout.speculative={{method: draft_model, tokens: 2, path: {folder}}}"],
                [f"rollout.speculative={{method: eagle3, tokens: 4, path: {folder}}}"],
            )
        ],
        "temperatures": [(value, accepts(sampling, value), accepts(recipe, value)) for value in (0.01, 2.0, 2.01)],
        "linear": engine_arguments("rollout", folder / "linear", *common[2:], {}),
        "vision": [
            rollout_arguments(
                load(BASE, [f"model.path={folder}", "data.source=arithmetic"]).rollout,
                folder / "vision",
                "float32",
                0,
                pixels=pixels,
            )
            for pixels in (None, (None, None), (784, 3136))
        ],
    }


def accepts(use: Callable[[float], None], temperature: float) -> bool:
    try:
        use(temperature)
    except ValueError:
        return False
    return True


@pytest.mark.slow
def test_overrides_are_passed_on_or_rejected_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for name in ("linear", "vision"):
        (tmp_path / name).mkdir()
    (tmp_path / "vision" / "config.json").write_text(json.dumps(VISION))
    (tmp_path / "linear" / "config.json").write_text(json.dumps(CONFIGS["Qwen3-Next-80B-A3B"]))
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, check=True)
    collected = pickle.loads((tmp_path / "collected").read_bytes())
    assert {name for given in MANAGED.values() for name in given} | ADJUSTABLE <= collected["known"]
    assert collected["defaults"] == {name: value for name, (value, _) in REFITTABLE.items()}
    changed = collected["changed"]
    assert (changed["enforce_eager"], changed["block_size"], changed["load_format"]) == (False, 32, "dummy")
    assert changed["max_model_len"] == 64
    without, ngram, draft_model, eagle = collected["speculative"]
    assert without is None
    assert ngram == dict(method="ngram", num_speculative_tokens=5, prompt_lookup_min=2, prompt_lookup_max=4)
    assert draft_model == dict(method="draft_model", num_speculative_tokens=2, model=str(tmp_path))
    assert eagle == dict(method="eagle3", num_speculative_tokens=4, model=str(tmp_path))
    assert collected["linear"]["mamba_ssm_cache_dtype"] == "float32"
    assert "mamba_ssm_cache_dtype" not in changed
    text, default, limited = collected["vision"]
    assert text["hf_overrides"]["architectures"] == ["Qwen3_5ForCausalLM"] and "mm_encoder_tp_mode" not in text
    assert "architectures" not in default["hf_overrides"] and default["mm_encoder_tp_mode"] == "data"
    assert default["mm_processor_kwargs"] == {}
    assert limited["mm_processor_kwargs"] == {"min_pixels": 784, "max_pixels": 3136}
    assert collected["temperatures"] == [(0.01, True, True), (2.0, True, True), (2.01, False, False)]
    unknown, misspelt = collected["refusals"]
    assert unknown.startswith("rollout.vllm_overrides.no_such_key=1: not a vLLM engine argument. Fix: ")
    assert misspelt.startswith(
        "rollout.vllm_overrides.max_num_seq=1: not a vLLM engine argument. Fix: use max_num_seqs"
    )
