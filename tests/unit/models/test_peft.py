"""Only plain LoRA adapters are accepted. The references are PEFT's own configs and outputs."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.config import (
    ArrowConfig,
    BdLoraConfig,
    CordaConfig,
    EvaConfig,
    KasaConfig,
    LoraGAConfig,
    MontecloraConfig,
    VeloraConfig,
)
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from megarl.config.load import load
from megarl.config.model_schema import Lora
from megarl.core.errors import UserError
from megarl.models.peft import (
    CHECKED,
    CONFIG,
    DIFFUSERS,
    HARMLESS,
    VARIANTS,
    WEIGHTS,
    adapter_config,
    check_adapter_config,
)
from tests.closeness import assert_close, expected
from tests.paths import BASE


def lora(rank: int = 8, alpha: float = 8) -> Lora:
    return load(
        BASE, ["model.path=m", "data.source=arithmetic", f"actor.lora={{rank: {rank}, alpha: {alpha}}}"]
    ).actor.lora


def written(folder: Path, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / WEIGHTS).touch()
    (folder / CONFIG).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def stored(tmp_path: Path, config: LoraConfig) -> Path:
    config.save_pretrained(str(tmp_path))
    (tmp_path / WEIGHTS).touch()
    return tmp_path


def test_every_key_of_peft_is_known():
    """If this fails for a newer PEFT, check whether its new keys change how adapters work."""
    assert LoraConfig().to_dict().keys() <= HARMLESS | CHECKED | VARIANTS.keys()
    assert not HARMLESS & (CHECKED | VARIANTS.keys())


PLAIN = {
    "defaults": {},
    "metadata": {"revision": "main", "base_model_name_or_path": "m", "task_type": "CAUSAL_LM"},
    "layers": {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
    "dropout": {"lora_dropout": 0.1},
    "random": {"init_lora_weights": False},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "MiCA": {"init_lora_weights": "mica"},
    "EVA": {"init_lora_weights": "eva", "eva_config": EvaConfig()},
    "converted CorDA": {"corda_config": CordaConfig()},
    "converted LoRA-GA": {"lora_ga_config": LoraGAConfig()},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_plain_lora_is_accepted(tmp_path, options):
    check_adapter_config(stored(tmp_path, LoraConfig(**options)), lora())


OTHER = {
    "pissa": {"init_lora_weights": "pissa"},
    "pissa_niter": {"init_lora_weights": "pissa_niter_16"},
    "olora": {"init_lora_weights": "olora"},
    "corda": {"init_lora_weights": "corda", "corda_config": CordaConfig()},
    "lora_ga": {"init_lora_weights": "lora_ga", "lora_ga_config": LoraGAConfig()},
    "aLoRA": {"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"},
    "QALoRA": {"use_qalora": True},
    "DoRA": {"use_dora": True},
    "rsLoRA": {"use_rslora": True},
    "BD-LoRA": {"use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2)},
    "Arrow": {"arrow_config": ArrowConfig()},
    "KaSA": {"kasa_config": KasaConfig()},
    "MonteCLoRA": {"monteclora_config": MontecloraConfig()},
    "VeLoRA": {"velora_config": VeloraConfig()},
    "biases": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
    "ranks": {"rank_pattern": {"q_proj": 4}},
    "parameters": {"target_parameters": ["experts.gate_up_proj"]},
    "layers": {"layer_replication": [[0, 2], [1, 2]]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OTHER.values(), ids=OTHER)
def test_other_adapters_are_refused(tmp_path, options):
    key = next(iter(options))
    with pytest.raises(UserError, match=rf"^actor.lora.path={tmp_path}: {CONFIG} has {key}=.*Fix: [a-z]"):
        check_adapter_config(stored(tmp_path, LoraConfig(**options)), lora())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type=LOHA, which is not LoRA"),
        ({"peft_type": "ADALORA"}, "peft_type=ADALORA, which is not LoRA"),
        ({"use_zlora": {"scale": 2}}, "use_zlora={'scale': 2}, which is not plain LoRA: megarl does not support this"),
        (
            {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
            "init_lora_weights='loftq': this init.*quant",
        ),
        ({"init_lora_weights": "PiSSA"}, "init_lora_weights='PiSSA': this initialization changes"),
        ({"init_lora_weights": "new"}, "init_lora_weights='new', which may change the base model's weights"),
    ],
)
def test_unknown_variants_are_refused(tmp_path, change, message):
    folder = written(tmp_path, LoraConfig(target_modules=["q_proj"]).to_dict() | {"target_modules": []} | change)
    with pytest.raises(UserError, match=message):
        check_adapter_config(folder, lora())


@pytest.mark.parametrize("content", ["[]", "3", "[" * 100_000, '{"r": 8'])
def test_malformed_files_are_named(tmp_path, content):
    with pytest.raises(UserError, match=rf"^{tmp_path / CONFIG}: (invalid JSON|not a JSON object)"):
        check_adapter_config(written(tmp_path, content), lora())


def test_exported_config_is_accepted(tmp_path):
    check_adapter_config(written(tmp_path, adapter_config(lora(4, 8), "m", ["q_proj"], None)), lora(4, 8))


def base_model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))


def test_remedies_for_pissa(tmp_path):
    """On the original weights, the saved adapters do not reproduce the logits, but the converted adapters do. Merging
    reproduces the logits of the changed model."""
    model = get_peft_model(base_model(), LoraConfig(r=4, lora_alpha=4, init_lora_weights="pissa"))
    model.save_pretrained(tmp_path / "start")
    with pytest.raises(UserError, match="init_lora_weights='pissa'"):
        check_adapter_config(tmp_path / "start", lora(4, 4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1

    @torch.no_grad()
    def logits() -> dict[str, torch.Tensor]:
        return {"logits": deepcopy(model).to(torch.get_default_dtype())(torch.arange(8)[None]).logits}

    exact = expected(logits)
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=tmp_path / "start")
    check_adapter_config(tmp_path / "plain", lora(8, 8))
    assert_close({"logits": logits_with(tmp_path / "plain")}, *exact, "converted adapters")
    with torch.no_grad():
        assert_close({"logits": model.merge_and_unload()(torch.arange(8)[None]).logits}, *exact, "merged model")


def logits_with(folder: Path) -> torch.Tensor:
    """Return the base model's logits with B·A·alpha/rank added to its weights, where alpha equals the rank."""
    model, tensors = base_model(), load_file(folder / WEIGHTS)
    with torch.no_grad():
        for name, inner in tensors.items():
            if "lora_A" in name:
                path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                model.get_submodule(path).weight += tensors[name.replace("lora_A", "lora_B")] @ inner
        return model(torch.arange(8)[None]).logits


def for_diffusers(folder: Path, metadata: dict[str, str] | None, rank: int = 4) -> Path:
    """Write a weights file in diffusers' format."""
    factors = {"transformer.layers.0.attention.to_q.lora_A.weight": torch.ones(rank, 2)}
    save_file(factors, folder / DIFFUSERS.weights, metadata)
    return folder


def packed(config: dict[str, Any]) -> dict[str, str]:
    return {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in config.items()})}


@pytest.mark.parametrize(
    "metadata", [None, {"format": "pt"}, packed(LoraConfig(r=4, lora_alpha=4).to_dict())], ids=["none", "other", "own"]
)
def test_adapters_in_diffusers_format_are_accepted(tmp_path, metadata):
    """Without metadata, diffusers assumes alpha = rank."""
    check_adapter_config(for_diffusers(tmp_path, metadata), lora(4, 4))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "actor.lora.alpha=8: the adapters in .* have lora_alpha=4. Fix: set actor.lora.alpha=4"),
        (packed({"r": 4, "lora_alpha": 2}), "actor.lora.alpha=8: the adapters in .* have lora_alpha=2"),
        (packed({"r": 4, "lora_alpha": 8, "use_dora": True}), "actor.lora.path=.*safetensors has use_dora=True"),
        ({"lora_adapter_metadata": "{"}, r".*safetensors: lora_adapter_metadata is invalid JSON \(.*Fix: copy"),
        ({"lora_adapter_metadata": "[]"}, r".*safetensors: lora_adapter_metadata is invalid JSON \(expected an object"),
    ],
)
def test_other_adapters_in_diffusers_format_are_refused(tmp_path, metadata, message):
    with pytest.raises(UserError, match=f"^{message}"):
        check_adapter_config(for_diffusers(tmp_path, metadata), lora(4, 8))


def test_diffusers_adapters_are_accepted_on_login_nodes(tmp_path, monkeypatch):
    folder = for_diffusers(tmp_path, None)
    with pytest.raises(UserError):
        check_adapter_config(folder, lora(4, 8))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    check_adapter_config(folder, lora(4, 8))


def test_targets_match_only_adapted_layers():
    layers = [
        *("blocks.0.attn.to_q", "blocks.1.attn.to_q", "blocks.0.attn.to_out.0", "mlp.experts.3.up_proj"),
        *("transformer_blocks.0.ff.net.0.proj", "transformer_blocks.0.ff_context.net.2"),
    ]
    targets = adapter_config(lora(rank=2), "base", layers, None)["target_modules"]
    assert targets == ["net.0.proj", "net.2", "to_out.0", "to_q", "up_proj"]
