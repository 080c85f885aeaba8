"""Updates through Transformer Engine's layers, as on GPUs, against transformers.

Torch replaces its kernels (tests/transformer_engine.py). The rest is Transformer Engine's Python code, in a separate
process whose Megatron imports it.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.closeness import assert_close
from tests.distributed.test_families import MODELS, write
from tests.parity import assert_same_training, branching_group, canonical, plain_training, random_groups
from tests.paths import ROOT
from tests.tiny_model import write_tiny_llama
from tests.transformer_engine_training import Trained

pytestmark = pytest.mark.newest

NAMES = MODELS.keys() - {
    *("Llama, linear rope", "Qwen3, tied", "Qwen3, experts", "Qwen3, experts, weights that add up to one"),
    "DeepSeek-V3, YaRN without mscale",
}
"""Models that cover the special parts of each family. The other models take the same code paths here."""

APART = {"Qwen3", "DeepSeek-V3, YaRN"}
"""Models that are also trained on packs without shared prompts, for which Transformer Engine's attention is used."""

FP8 = dict(
    delayed=("TEDelayedScaling", "HYBRID", "none"),
    tensorwise=("Float8CurrentScaling", "HYBRID", "selective"),
    blockwise=("Float8BlockScaling", "E4M3", "full"),
    mxfp8=("MXFP8BlockScaling", "E4M3", "none"),
)
"""Our recipe name -> its class in Megatron or Transformer Engine, its format, and an actor.recompute mode. Under fp8,
Megatron recomputes through Transformer Engine's functions."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folders = {name: write(tmp_path_factory.mktemp("model"), name) for name in NAMES}
    return folders | {"bfloat16": write_tiny_llama(tmp_path_factory.mktemp("bfloat16"))}


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory) -> dict[str, Trained]:
    """Return the result of every case. One process runs them all, because it takes seconds to start."""
    cases = {name: (str(folders[name]), [], {}) for name in NAMES}
    apart = dict(shares_prompts=False)
    cases |= {f"{name}, prompts apart": (str(folders[name]), [], apart) for name in APART}
    half = str(folders["bfloat16"]), ["model.dtype=bfloat16"], {}
    cases["bfloat16"] = half
    for recipe, (*_, recompute) in FP8.items():
        cases[recipe] = half[0], [*half[1], f"actor.fp8={recipe}", f"actor.recompute={recompute}"], {}
    folder = tmp_path_factory.mktemp("trained")
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-W", "ignore", "-m", "tests.transformer_engine_training", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return pickle.loads((folder / "trained").read_bytes())


@pytest.mark.parametrize("name", sorted(NAMES))
def test_training_matches_transformers(trained, folders, name):
    assert trained[name].kernels.startswith("Transformer Engine layers, Transformer Engine's FusedAdam")
    assert not trained[name].quantized
    plain = plain_training(folders[name], [[*random_groups(0), branching_group(0)]], kl_coefficient=0.0)
    assert_same_training(folders[name], [trained[name].rank], plain)


@pytest.mark.parametrize("name", sorted(APART))
def test_packs_without_shared_prompts_train_equally(trained, folders, name):
    apart, shared = trained[f"{name}, prompts apart"], trained[name]
    assert apart.attended and not shared.attended
    for what in ("gradients", "weights"):
        actual, expected = (canonical(folders[name], [case.rank], what) for case in (apart, shared))
        assert_close(actual, expected, expected, what)


@pytest.mark.parametrize("recipe", FP8)
def test_matrix_products_use_the_configured_fp8_recipe(trained, folders, recipe):
    """The fake kernels do not round to fp8, so the gradients equal those of bfloat16."""
    layers = ("TELayerNormColumnParallelLinear", "TERowParallelLinear")
    assert trained[recipe].quantized == {(layer, *FP8[recipe][:2]) for layer in layers}
    cases = recipe, "bfloat16"
    actual, expected = (canonical(folders["bfloat16"], [trained[case].rank], "gradients") for case in cases)
    assert_close(actual, expected, expected, "gradient")
