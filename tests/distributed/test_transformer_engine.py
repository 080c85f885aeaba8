"""Updates through Transformer Engine's layers, as on GPUs, compared with transformers.

Torch replaces its kernels (tests/transformer_engine.py). The rest is Transformer Engine's Python code, in a separate
process whose Megatron imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from tests import dense_gpt_oss, tiny_vision
from tests.closeness import Expected, expected
from tests.distributed import test_lora as lora
from tests.distributed.test_families import MODELS, write
from tests.distributed.test_vision import VisionReference, assert_same_outcome, groups_of
from tests.lora_reference import MergedReference, PeftReference, write_adapters
from tests.marks import exhaustive_but
from tests.parity import Outcome, assert_same_training, branching_group, canonical, plain_training, random_groups
from tests.tiny_model import write_tiny_experts, write_tiny_llama
from tests.transformer_engine_training import Trained, train_all

NAMES = MODELS.keys() - {
    *("Llama, linear rope", "Qwen3, tied", "Qwen3, experts", "Qwen3, experts, weights that add up to one"),
    "DeepSeek-V3, YaRN without mscale",
}
"""Models that cover the special parts of each family. The other models take the same code paths here."""

IN_TEST = {
    *("Llama 3, tied", "Llama, all biases", "Phi-3", "Qwen3", "Mixtral", "Qwen3, experts in some layers"),
    *("DeepSeek-V3, YaRN", "dense", "own factors", "gpt-oss"),
}
"""Models and adapters that together cover all parts. `make test-exhaustive` runs the others."""

GROUPS = [*random_groups(0), branching_group(0)]
"""The samples on which tests/transformer_engine_training.py trains."""
ADAPTED = "dense", "zero-centered norms", *lora.FACTORS

APART = {"Qwen3", "DeepSeek-V3, YaRN"}
"""Models that are also trained without shared prompts, because only such packs use Transformer Engine's attention."""

FP8 = dict(
    delayed=("TEDelayedScaling", "HYBRID", "none"),
    tensorwise=("Float8CurrentScaling", "HYBRID", "selective"),
    blockwise=("Float8BlockScaling", "E4M3", "full"),
    mxfp8=("MXFP8BlockScaling", "E4M3", "none"),
)
"""megarl's recipe name -> its class in Megatron or Transformer Engine, its format, and an actor.recompute mode. Under
fp8, Megatron recomputes through Transformer Engine's functions."""


@dataclass(frozen=True)
class Adapted:
    """A model with adapters, the config overrides that load the adapters, and a plain reference."""

    folder: Path
    keys: list[str]
    reference: Callable[[], PeftReference | MergedReference]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> dict[str, Adapted]:
    path = tmp_path_factory.mktemp("adapted")
    dense = lora.write_dense(path / "dense")
    adapters = write_adapters(path / "adapters", dense, lora.RANK, lora.ALPHA)
    by_name = {"dense": Adapted(dense, lora.keys_of(adapters), partial(lora.dense_reference, dense, adapters))}
    linear = lora.write_gated_delta(path / "linear")
    adapters = write_adapters(path / "of linear", linear, lora.RANK, lora.ALPHA)
    by_name["zero-centered norms"] = Adapted(
        linear, lora.keys_of(adapters), partial(lora.dense_reference, linear, adapters)
    )
    experts = write_tiny_experts(path / "experts", num_layers=4)
    for name, shares in lora.FACTORS.items():
        factors = lora.random_factors(experts, shares)
        keys = lora.keys_of(lora.write_factors(path / name, experts, factors, shares), shares)
        by_name[name] = Adapted(experts, keys, partial(lora.merged_reference, experts, factors))
    return by_name


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Iterator[dict[str, Path]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        dense_gpt_oss.register(monkeypatch)
        yield written(tmp_path_factory)


def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: write(tmp_path_factory.mktemp("model"), name) for name in NAMES & IN_TEST}
    folders[dense_gpt_oss.NAME] = dense_gpt_oss.write(tmp_path_factory.mktemp("model"))
    folders["images"] = tiny_vision.build(tmp_path_factory.mktemp("images") / "model", "qwen3_vl")
    return folders | {"bfloat16": write_tiny_llama(tmp_path_factory.mktemp("bfloat16"))}


@pytest.fixture(scope="module")
def other_folders(tmp_path_factory) -> dict[str, Path]:
    return {name: write(tmp_path_factory.mktemp("model"), name) for name in NAMES - IN_TEST}


@pytest.fixture(scope="module")
def other_trained(other_folders, adapted, tmp_path_factory) -> dict[str, Trained]:
    cases = {name: (str(folder), [], {}) for name, folder in other_folders.items()}
    cases |= {name: (str(case.folder), case.keys, {}) for name, case in adapted.items() if name not in IN_TEST}
    return train_all(tmp_path_factory.mktemp("trained"), cases)


@pytest.fixture(scope="module")
def trained(folders, adapted, tmp_path_factory) -> dict[str, Trained]:
    cases = {name: (str(folder), [], {}) for name, folder in folders.items() if name in IN_TEST}
    apart = dict(shares_prompts=False)
    cases[dense_gpt_oss.NAME] = str(folders[dense_gpt_oss.NAME]), [], {}
    cases |= {f"{name}, prompts apart": (str(folders[name]), [], apart) for name in (*APART, dense_gpt_oss.NAME)}
    cases |= {name: (str(case.folder), case.keys, {}) for name, case in adapted.items() if name in IN_TEST}
    with_images = str(folders["images"]), ["model.vision=true", "batch={prompts_per_step: 4, prompts_per_update: 4}"]
    cases |= {"images": (*with_images, {}), "images, prompts apart": (*with_images, apart)}
    half = str(folders["bfloat16"]), ["model.dtype=bfloat16"], {}
    cases["bfloat16"] = half
    for recipe, (*_, recompute) in FP8.items():
        cases[recipe] = half[0], [*half[1], f"actor.fp8={recipe}", f"actor.recompute={recompute}"], {}
    return train_all(tmp_path_factory.mktemp("trained"), cases)


@cache
def plain_of(folder: Path) -> Expected[Outcome]:
    """Return the outcome of the update in plain Hugging Face and torch."""
    return plain_training(folder, [GROUPS], kl_coefficient=0.0)


@pytest.mark.parametrize("name", exhaustive_but(sorted(NAMES), *NAMES & IN_TEST))
def test_training_matches_transformers(request, name):
    prefix = "" if name in IN_TEST else "other_"
    folder, result = (request.getfixturevalue(f"{prefix}{what}")[name] for what in ("folders", "trained"))
    assert result.kernels.startswith("Transformer Engine layers, Transformer Engine's FusedAdam")
    assert not result.quantized
    assert_same_training(folder, [result.rank], plain_of(folder))


@pytest.mark.parametrize("name", exhaustive_but([*ADAPTED], "dense", "own factors"))
def test_adapters_match_peft_and_plain_torch(request, adapted, name):
    """Norms are part of Transformer Engine's linear layers, and two modules hold all experts of a rank."""
    result = request.getfixturevalue("trained" if name in IN_TEST else "other_trained")[name]
    assert result.kernels.startswith("Transformer Engine layers")
    case = adapted[name]
    plain = expected(lambda: lora.outcome_of(case.reference(), [GROUPS]))
    lora.assert_same(case.folder, [result.rank], plain)


@pytest.mark.parametrize("name", sorted(APART))
def test_packs_without_shared_prompts_train_equally(trained, folders, name):
    apart, shared = trained[f"{name}, prompts apart"], trained[name]
    assert apart.attended and not shared.attended
    assert_same_training(folders[name], [apart.rank], plain_of(folders[name]))


def test_images_have_positions_of_their_own(trained, folders):
    """Transformer Engine's attention separates documents, but its rotation reads the angles of each token."""
    folder = folders["images"]
    reference = expected(lambda: VisionReference(folder).outcome([groups_of(folder)]))
    shared, apart = trained["images"], trained["images, prompts apart"]
    assert apart.attended and not shared.attended
    for result in (shared, apart):
        assert_same_outcome(folder, [result.rank], reference)


@pytest.mark.parametrize("case", [dense_gpt_oss.NAME, f"{dense_gpt_oss.NAME}, prompts apart"])
def test_windows_and_sinks_use_our_attention(trained, folders, case):
    """Transformer Engine does not support sinks with packed documents, so our attention is used even without shared
    prompts."""
    result, folder = trained[case], folders[dense_gpt_oss.NAME]
    assert result.kernels.startswith("Transformer Engine layers") and not result.attended
    assert_same_training(folder, [result.rank], plain_of(folder))


@pytest.mark.parametrize("recipe", FP8)
def test_matrix_products_use_the_configured_fp8_recipe(trained, folders, recipe):
    """The fake kernels do not round to fp8, so the gradients equal those of bfloat16."""
    layers = ("TELayerNormColumnParallelLinear", "TERowParallelLinear")
    assert trained[recipe].quantized == {(layer, *FP8[recipe][:2]) for layer in layers}
    cases = recipe, "bfloat16"
    actual, expected = (canonical(folders["bfloat16"], [trained[case].rank], "gradients") for case in cases)
    assert all(torch.equal(actual[name], gradient) for name, gradient in expected.items())
