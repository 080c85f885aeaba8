"""Updates through Transformer Engine's layers, as on GPUs, against transformers. What its kernels compute is computed
by torch (tests/transformer_engine.py); the rest is its Python, in a process of its own in which Megatron finds it."""

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
"""Models with what is special about each family. Those left out take no other way here than one that is left."""

APART = {"Qwen3", "DeepSeek-V3, YaRN"}
"""Models that are also trained on packs in which every sample has its own prompt, as Transformer Engine's attention
takes them."""

FP8 = dict(
    delayed=("TEDelayedScaling", "HYBRID", "none"),
    tensorwise=("Float8CurrentScaling", "HYBRID", "selective"),
    blockwise=("Float8BlockScaling", "E4M3", "full"),
    mxfp8=("MXFP8BlockScaling", "E4M3", "none"),
)
"""Our name of a recipe -> the class of it, Megatron's or Transformer Engine's, its format, and an actor.recompute:
under fp8 Megatron recomputes by Transformer Engine's functions."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folders = {name: write(tmp_path_factory.mktemp("model"), name) for name in NAMES}
    return folders | {"bfloat16": write_tiny_llama(tmp_path_factory.mktemp("bfloat16"))}


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory) -> dict[str, Trained]:
    """Returns what comes of every case. One process runs them all, as it takes seconds to start."""
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
def test_training_equals_that_of_transformers(trained, folders, name):
    assert trained[name].kernels.startswith("layers of Transformer Engine, Transformer Engine's FusedAdam")
    assert not trained[name].quantized
    plain = plain_training(folders[name], [[*random_groups(0), branching_group(0)]], kl_coefficient=0.0)
    assert_same_training(folders[name], [trained[name].rank], plain)


@pytest.mark.parametrize("name", sorted(APART))
def test_own_prompts_go_through_its_attention_with_the_same_training(trained, folders, name):
    apart, shared = trained[f"{name}, prompts apart"], trained[name]
    assert apart.attended and not shared.attended
    for what in ("gradients", "weights"):
        ours, theirs = (canonical(folders[name], [case.rank], what) for case in (apart, shared))
        assert_close(ours, theirs, theirs, what)


@pytest.mark.parametrize("recipe", FP8)
def test_products_are_in_the_recipe_that_fp8_names(trained, folders, recipe):
    """Rounding to fp8 is not computed here, so that gradients are those of bfloat16."""
    layers = ("TELayerNormColumnParallelLinear", "TERowParallelLinear")
    assert trained[recipe].quantized == {(layer, *FP8[recipe][:2]) for layer in layers}
    ours, theirs = (canonical(folders["bfloat16"], [trained[case].rank], "gradients") for case in (recipe, "bfloat16"))
    assert_close(ours, theirs, theirs, "gradient")
