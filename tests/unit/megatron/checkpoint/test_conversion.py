"""Conversion from Hugging Face to Megatron checkpoints, to other layouts, and back: bit for bit."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.core.errors import UserError
from megarl.megatron.checkpoint import conversion
from megarl.megatron.checkpoint.conversion import Options, huggingface_to_megatron, megatron_to_huggingface, reshape
from megarl.resharding import folder
from megarl.resharding.execute import execute
from megarl.resharding.transports.reused_memory import ReusedMemory
from megarl.run.checkpoints import Checkpoints
from tests.marks import exhaustive_but
from tests.unit.resharding.cases import (
    BIASED,
    GPT_OSS,
    LATENT,
    config_of,
    gated_delta_sizes,
    layout_of,
    random_checkpoint,
    stacked,
)

MIXTRAL = dict(model_type="mixtral", num_key_value_heads=2, num_local_experts=4)
QWEN3_MOE = dict(
    model_type="qwen3_moe",
    num_key_value_heads=2,
    num_experts=4,
    moe_intermediate_size=6,
    mlp_only_layers=[1],
    num_hidden_layers=4,
)
DEEPSEEK = dict(
    **LATENT,
    model_type="deepseek_v3",
    num_key_value_heads=6,
    q_lora_rank=4,
    moe_intermediate_size=6,
    num_hidden_layers=4,
    rms_norm_eps=1e-6,
)
GATED_DELTA = dict(**gated_delta_sizes(6, 2), full_attention_interval=2, num_key_value_heads=6, num_hidden_layers=4)
GATED_DELTA_EXPERTS = GATED_DELTA | dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, shared_expert_intermediate_size=6
)
KIMI = DEEPSEEK | dict(model_type="kimi_k2", rms_norm_eps=1e-5)
GLM = BIASED | dict(
    model_type="glm4_moe", moe_intermediate_size=6, num_hidden_layers=4, attention_bias=True, use_qk_norm=True
)
GPT_OSS_MODEL = dict(model_type="gpt_oss", **GPT_OSS, num_hidden_layers=4)
TIED = dict(tie_word_embeddings=True)
GRID = {
    "Llama: 1 process, TP3": ({}, layout_of(), layout_of(tp=3)),
    "Llama, tied: TP3, PP2 and uneven PP3": (
        TIED | dict(num_hidden_layers=4),
        layout_of(tp=3, pp=2),
        layout_of(pp=3, first=1, last=2),
    ),
    "Llama, all biases: PP2, VPP2 and TP3": (
        dict(attention_bias=True, mlp_bias=True, num_hidden_layers=4, vocab_size=129),
        layout_of(pp=2, vpp=2),
        layout_of(tp=3),
    ),
    "Mistral: TP3 and PP2": (dict(model_type="mistral", vocab_size=257), layout_of(tp=3), layout_of(pp=2)),
    "Phi-3: TP3 and PP2": (dict(model_type="phi3", vocab_size=130), layout_of(tp=3), layout_of(pp=2)),
    "Qwen2, tied: PP2 and TP3": (TIED | dict(model_type="qwen2"), layout_of(pp=2), layout_of(tp=3)),
    "Qwen3: TP3, PP2 and 1 process": (dict(model_type="qwen3"), layout_of(tp=3, pp=2), layout_of()),
    "Mixtral: EP2, ETP2 and EP4, ETP1": (
        MIXTRAL,
        layout_of(tp=2, dp=2, ep=2),
        layout_of(tp=2, dp=2, ep=4, etp=1),
    ),
    "Qwen3 with experts, tied: PP2, EP2, ETP1 and 1 process": (
        QWEN3_MOE | TIED,
        layout_of(tp=2, pp=2, ep=2, etp=1),
        layout_of(),
    ),
    "DeepSeek-V3: TP2, EP2, ETP1 and PP2, VPP2, EP2": (
        DEEPSEEK,
        layout_of(tp=2, ep=2, etp=1),
        layout_of(pp=2, vpp=2, dp=2, ep=2),
    ),
    "DeepSeek-V3, direct queries: EP4 and TP3": (
        DEEPSEEK | dict(q_lora_rank=None, moe_intermediate_size=9),
        layout_of(dp=4, ep=4),
        layout_of(tp=3),
    ),
    "Qwen3.5: TP3, PP2 and TP2": (
        GATED_DELTA | dict(model_type="qwen3_5_text"),
        layout_of(tp=3, pp=2),
        layout_of(tp=2),
    ),
    "Qwen3.5, experts: TP2, EP2, ETP1 and PP2, EP2": (
        GATED_DELTA_EXPERTS | dict(model_type="qwen3_5_moe_text"),
        layout_of(tp=2, ep=2, etp=1),
        layout_of(pp=2, dp=2, ep=2),
    ),
    "Qwen3-Next: TP3 and TP2, PP2": (
        GATED_DELTA_EXPERTS | dict(model_type="qwen3_next", mlp_only_layers=[1]),
        layout_of(tp=3),
        layout_of(tp=2, pp=2),
    ),
    "Kimi K2: PP2, EP4 and TP2, ETP1": (KIMI, layout_of(pp=2, dp=4, ep=4), layout_of(tp=2, dp=2, ep=4, etp=1)),
    "GLM-4.6: TP3, ETP3, EP2 and PP2, VPP2, EP4": (
        GLM,
        layout_of(tp=3, dp=2, ep=2),
        layout_of(pp=2, vpp=2, dp=4, ep=4),
    ),
    "GLM-4.5-Air: TP3, ETP1, EP2 and EP4": (
        GLM | dict(use_qk_norm=False),
        layout_of(tp=3, dp=2, ep=2, etp=1),
        layout_of(dp=4, ep=4),
    ),
    "gpt-oss: TP3, EP2, ETP1 and PP2, VPP2, EP4": (
        GPT_OSS_MODEL,
        layout_of(tp=3, dp=2, ep=2, etp=1),
        layout_of(pp=2, vpp=2, dp=4, ep=4),
    ),
}


def write_model(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Write random weights. Router biases are float32, as in DeepSeek's, and decays, as in Qwen3.5's."""
    tensors = random_checkpoint(config)
    tensors = stacked(tensors) if config["model_type"] == "gpt_oss" else tensors
    tensors = {
        name: tensor if "e_score" in name or "A_log" in name else tensor.to(dtype) for name, tensor in tensors.items()
    }
    return write_tensors(folder, config, tensors)


def write_tensors(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Write a folder like one from the hub, with several weight files."""
    folder.mkdir()
    names = list(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return tensors


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [n for n in expected if actual[n].dtype != expected[n].dtype or not torch.equal(actual[n], expected[n])]
    assert not different


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    "case",
    exhaustive_but(
        GRID,
        "Llama, tied: TP3, PP2 and uneven PP3",
        "Mixtral: EP2, ETP2 and EP4, ETP1",
        "DeepSeek-V3: TP2, EP2, ETP1 and PP2, VPP2, EP2",
        "GLM-4.6: TP3, ETP3, EP2 and PP2, VPP2, EP4",
        "gpt-oss: TP3, EP2, ETP1 and PP2, VPP2, EP4",
    ),
)
def test_round_trip_through_two_layouts_is_bit_exact(tmp_path, case):
    changes, first, second = GRID[case]
    tensors = write_model(tmp_path / "hf", config_of(**changes))
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "first", first)
    reshape(tmp_path / "first", tmp_path / "second", second)
    written = megatron_to_huggingface(tmp_path / "second", tmp_path / "back", shard_bytes=2000)
    assert_same(weights_of(tmp_path / "back"), tensors)
    assert written == sum(tensor.nbytes for tensor in tensors.values())
    assert names_in(tmp_path) == {"hf", "first", "second", "back"}
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == json.loads((tmp_path / "hf" / "config.json").read_text()) | {"dtype": "bfloat16"}


WIDE = dict(
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=24,
    moe_intermediate_size=8,
    vocab_size=131,
)
FAMILIES = {
    "Llama, tied": TIED,
    "Llama, all biases": dict(attention_bias=True, mlp_bias=True),
    "Mistral": dict(model_type="mistral"),
    "Phi-3, tied": TIED | dict(model_type="phi3"),
    "Qwen2": dict(model_type="qwen2"),
    "Qwen3, tied": TIED | dict(model_type="qwen3"),
    "Mixtral, tied": TIED | MIXTRAL,
    "Qwen3 with experts": QWEN3_MOE,
    "DeepSeek-V3, tied": TIED | DEEPSEEK,
    "DeepSeek-V3, direct queries": DEEPSEEK | dict(q_lora_rank=None),
    "Kimi K2": KIMI,
    "GLM-4.6": GLM,
    "GLM-4.5-Air, tied": TIED | GLM | dict(use_qk_norm=False),
    "gpt-oss": GPT_OSS_MODEL,
}
LAYOUTS = (layout_of(tp=2, pp=2), layout_of(pp=2, vpp=2), layout_of(tp=4), layout_of(tp=2, pp=3, first=2))
EXPERT_LAYOUTS = (
    layout_of(tp=2, ep=2, etp=1),
    layout_of(tp=2, dp=2, ep=2),
    layout_of(tp=4, dp=2, pp=2, vpp=2, ep=4, etp=2),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_survives_all_layouts_bit_exactly(tmp_path, family):
    """The checkpoint is converted from each layout to the next. In all of them torch reads the same tensors, apart from
    padding."""
    config = config_of(**FAMILIES[family] | WIDE)
    tensors = write_model(tmp_path / "hf", config)
    first, *others = LAYOUTS + (EXPERT_LAYOUTS if has_experts(config) else ())
    if config["model_type"] == "gpt_oss":
        first, *others = (layout_of(pp=2, vpp=2), EXPERT_LAYOUTS[0], layout_of(tp=4, dp=2, pp=2, ep=4, etp=1))
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "0", first)
    global_tensors = whole_tensors(tmp_path / "0", config["vocab_size"])
    for i, layout in enumerate(others):
        reshape(tmp_path / f"{i}", tmp_path / f"{i + 1}", layout, options=Options(verify=False))
        assert_same(whole_tensors(tmp_path / f"{i + 1}", config["vocab_size"]), global_tensors)
    megatron_to_huggingface(tmp_path / f"{len(others)}", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), tensors)


def has_experts(config: dict[str, Any]) -> bool:
    return any(key in config for key in ("num_local_experts", "num_experts", "n_routed_experts"))


def whole_tensors(checkpoint: Path, vocabulary: int) -> dict[str, torch.Tensor]:
    """Return the tensors as torch reads them, without vocabulary padding."""
    metadata = torch_checkpoint.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {k: torch.empty(e.size, dtype=e.properties.dtype) for k, e in metadata.items() if hasattr(e, "chunks")}
    torch_checkpoint.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    padded = ("word_embeddings.weight", "output_layer.weight")
    return {k: tensor[:vocabulary] if k.endswith(padded) else tensor for k, tensor in tensors.items()}


def test_torch_reads_unsharded_model_tensors(tmp_path):
    """Tensors are unsharded in any layout; queries, keys and values are interleaved by query group; padding is zero."""
    config = config_of(vocab_size=130)
    tensors = write_model(tmp_path / "hf", config, torch.float32)
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "out", layout_of(tp=3, pp=2))
    metadata = torch_checkpoint.FileSystemReader(tmp_path / "out").read_metadata()
    entries = {k: e for k, e in metadata.state_dict_metadata.items() if not k.split("/")[0].endswith("_extra_state")}
    read = {key: torch.full(entry.size, torch.nan) for key, entry in entries.items()}
    torch_checkpoint.load(read, checkpoint_id=tmp_path / "out", no_dist=True)
    assert (
        sum(tensor.numel() for tensor in read.values())
        == sum(tensor.numel() for tensor in tensors.values()) + 2 * (384 - 130) * config["hidden_size"]
    )
    embedding = read["embedding.word_embeddings.weight"]
    assert embedding.shape == (384, 12) and not embedding[130:].any()
    assert torch.equal(embedding[:130], tensors["model.embed_tokens.weight"])
    layer = "model.layers.1."
    parts = [tensors[f"{layer}self_attn.{x}_proj.weight"].reshape(3, -1, 2, 12) for x in "qkv"]
    qkv = torch.cat(parts, dim=1).reshape(-1, 12)
    assert torch.equal(read["decoder.layers.1.self_attention.linear_qkv.weight"], qkv)
    halves = [tensors[f"{layer}mlp.{x}_proj.weight"] for x in ("gate", "up")]
    assert torch.equal(read["decoder.layers.1.mlp.linear_fc1.weight"], torch.cat(halves))
    norm = tensors[f"{layer}post_attention_layernorm.weight"]
    assert torch.equal(read["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"], norm)


def test_each_rank_has_a_file_with_its_shard(tmp_path):
    write_model(tmp_path / "hf", config_of(vocab_size=128 * 3), torch.float32)
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "out", layout_of(tp=3, pp=2))
    metadata = torch_checkpoint.FileSystemReader(tmp_path / "out").read_metadata()
    places: dict[str, set[tuple[str, int]]] = {}
    for index, info in metadata.storage_data.items():
        if index.fqn.endswith("linear_qkv.weight"):
            places.setdefault(info.relative_path, set()).add((index.fqn, index.offset[0]))
    rows = (6 + 3 + 3) * 2 // 3  # rows of queries, keys and values on one of three ranks
    key = "decoder.layers.{}.self_attention.linear_qkv.weight"
    assert places == {f"__{rank}_0.distcp": {(key.format(rank // 3), rank % 3 * rows)} for rank in range(6)}


def test_dtype_is_cast_only_on_request(tmp_path):
    tensors = write_model(tmp_path / "hf", config_of(), torch.float32)
    bfloat16 = Options(dtype="bfloat16")
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "cast", layout_of(tp=3), bfloat16)
    megatron_to_huggingface(tmp_path / "cast", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), {name: tensor.bfloat16() for name, tensor in tensors.items()})
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "kept", layout_of(tp=3))
    megatron_to_huggingface(tmp_path / "kept", tmp_path / "cast back", options=bfloat16)
    assert_same(weights_of(tmp_path / "cast back"), weights_of(tmp_path / "back"))
    assert json.loads((tmp_path / "cast back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_mxfp4_is_exported_as_bfloat16_in_several_files(tmp_path):
    """The exported config is that of a model without quantization, and transformers loads the folder."""
    config = GPT_OSS_MODEL | dict(hidden_size=32, intermediate_size=64)
    config = config_of(**config, quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]))
    plain = {name: tensor.bfloat16() for name, tensor in stacked(random_checkpoint(config)).items()}
    packed, expected = dict(plain), dict(plain)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = packed.pop(name).shape
        blocks, scales = (experts, rows, columns // 32, 16), (experts, rows, columns // 32)
        packed[f"{name}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8, generator=generator)
        packed[f"{name}_scales"] = torch.randint(120, 130, scales, dtype=torch.uint8, generator=generator)
        expected[name] = convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"])
    write_tensors(tmp_path / "hf", config, packed)
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "out", layout_of(dp=2, ep=2))
    megatron_to_huggingface(tmp_path / "out", tmp_path / "back", shard_bytes=20000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert_same(weights_of(tmp_path / "back"), expected)
    exported = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in exported and exported["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert_same(dict(loaded), expected)


def test_mixed_dtypes_in_a_parameter_require_a_cast(tmp_path):
    tensors = write_model(tmp_path / "hf", config_of(), torch.float32)
    name = "model.layers.0.self_attn.k_proj.weight"
    for path in (tmp_path / "hf").glob("*.safetensors"):
        members = load_file(path)
        save_file({n: t.half() if n == name else t for n, t in members.items()}, path)
    with pytest.raises(
        ValueError, match=r"k_proj.weight: the tensor is float16, but other tensors .* are float32. Fix: pass --dtype"
    ):
        huggingface_to_megatron(tmp_path / "hf", tmp_path / "out", layout_of())
    assert names_in(tmp_path) == {"hf"}
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "out", layout_of(), Options(dtype="float32"))
    megatron_to_huggingface(tmp_path / "out", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), tensors | {name: tensors[name].half().float()})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (TIED, ["lm_head.weight"]),
        ({}, ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
        (DEEPSEEK | dict(num_nextn_predict_layers=1), ["model.layers.4.eh_proj.weight", "model.layers.4.enorm.weight"]),
        (
            GLM | dict(num_nextn_predict_layers=1),
            [f"model.layers.4.{name}.weight" for name in ("eh_proj", "self_attn.q_norm", "shared_head.norm")],
        ),
    ],
    ids=["a copy of the tied head", "constants", "MTP layers", "GLM's MTP layers"],
)
def test_unused_tensors_are_dropped(tmp_path, changes, names):
    config = config_of(**changes)
    tensors = {name: tensor.bfloat16() for name, tensor in random_checkpoint(config).items()}
    write_tensors(tmp_path / "hf", config, tensors | {name: torch.ones(2) for name in names})
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "out", layout_of())
    megatron_to_huggingface(tmp_path / "out", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), tensors)
    assert not json.loads((tmp_path / "back" / "config.json").read_text()).get("num_nextn_predict_layers")


@pytest.mark.parametrize(
    ("kind", "labels", "bias"),
    [("Sequence", 2, False), ("Sequence", 1, False), ("Token", 1, True)],
    ids=["two labels", "a critic", "a token classifier"],
)
def test_classifier_keeps_its_head(tmp_path, kind, labels, bias):
    config = config_of(
        architectures=[f"LlamaFor{kind}Classification"], id2label={str(i): f"LABEL_{i}" for i in range(labels)}
    )
    tensors = random_checkpoint(config)
    tensors["score.weight"] = tensors.pop("lm_head.weight")[:labels].clone()
    tensors |= {"score.bias": tensors["model.norm.weight"][:labels].clone()} if bias else {}
    write_tensors(tmp_path / "hf", config, tensors)
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "first", layout_of(tp=3, pp=2))
    reshape(tmp_path / "first", tmp_path / "second", layout_of())
    megatron_to_huggingface(tmp_path / "second", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), tensors)


def change_tensors(folder: Path, change) -> None:
    tensors = weights_of(folder)
    for name in ("a.safetensors", "b.safetensors", "model.safetensors.index.json"):
        (folder / name).unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "the checkpoint has no tensor model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight has shape \(3,\), but config"),
        (
            lambda t: t.update({"model.x": torch.zeros(3), "model.y": torch.zeros(3)}),
            "does not define the stored tensor model.x and 1 more",
        ),
    ],
)
def test_folder_that_contradicts_its_config_is_rejected(tmp_path, change, message):
    write_model(tmp_path / "hf", config_of())
    change_tensors(tmp_path / "hf", change)
    with pytest.raises(ValueError, match=message):
        huggingface_to_megatron(tmp_path / "hf", tmp_path / "out", layout_of(tp=3))
    assert names_in(tmp_path) == {"hf"}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    write_model(tmp_path / "hf", config_of())
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "checkpoint", layout_of(pp=2))
    return tmp_path / "checkpoint"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(num_hidden_layers=3),
            r"config.json requires decoder.layers.2.\S+, but the checkpoint does not contain it",
        ),
        (dict(num_hidden_layers=1), r"does not define the stored tensor decoder.layers.1.\S+ and 5 more"),
        (dict(intermediate_size=24), r"linear_fc1.weight has shape \(36, 12\), but config.json requires \(48, 12\)"),
        (dict(vocab_size=129), r"word_embeddings.weight has shape \(128, 12\), but config.json requires \(256, 12\)"),
    ],
)
def test_checkpoint_of_another_model_is_rejected(tmp_path, checkpoint, changes, message):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config_of(**changes)))
    with pytest.raises(ValueError, match=message):
        megatron_to_huggingface(checkpoint, tmp_path / "out", other)
    with pytest.raises(ValueError, match=message):
        reshape(checkpoint, tmp_path / "out", layout_of(), other)
    assert names_in(tmp_path) == {"hf", "checkpoint", "other"}


def test_existing_output_folder_is_not_overwritten(tmp_path, checkpoint):
    for convert in (
        lambda out: huggingface_to_megatron(tmp_path / "hf", out, layout_of()),
        lambda out: megatron_to_huggingface(checkpoint, out),
        lambda out: reshape(checkpoint, out, layout_of()),
    ):
        with pytest.raises(ValueError, match=r"hf already exists\. Fix: choose a new folder or remove this folder"):
            convert(tmp_path / "hf")
    assert names_in(tmp_path / "hf") >= {"config.json", "a.safetensors", "b.safetensors"}


class Call:
    """Calls a function when unpickled."""

    def __init__(self, *call):
        self._call = call

    def __reduce__(self):
        function, *arguments = self._call
        return function, tuple(arguments)


def test_malicious_metadata_runs_no_code(checkpoint, tmp_path):
    called = tmp_path / "called"
    for number, call in enumerate([Call(called.touch), Call(os.system, f"touch {called}"), Call(exec, "1 / 0")]):
        copy = shutil.copytree(checkpoint, tmp_path / f"copy {number}")
        metadata = torch_checkpoint.FileSystemReader(copy).read_metadata()
        metadata.planner_data = call
        (copy / ".metadata").write_bytes(pickle.dumps(metadata))
        megatron_to_huggingface(copy, tmp_path / f"out {number}")
    assert not called.exists()


def test_damaged_checkpoints_are_rejected(tmp_path, checkpoint):
    def error(damage) -> str:
        copy = shutil.copytree(checkpoint, tmp_path / "copy")
        damage(copy)
        with pytest.raises(ValueError) as raised:
            megatron_to_huggingface(copy, tmp_path / "out")
        shutil.rmtree(copy)
        assert names_in(tmp_path) == {"hf", "checkpoint"}
        return str(raised.value)

    def remove_chunks(copy: Path) -> None:
        metadata = torch_checkpoint.FileSystemReader(copy).read_metadata()
        entry = metadata.state_dict_metadata["decoder.layers.0.mlp.linear_fc2.weight"]
        entry.chunks = []
        (copy / ".metadata").write_bytes(pickle.dumps(metadata))

    assert "contains no .metadata. Fix: pass a run's checkpoint" in error(lambda copy: (copy / ".metadata").unlink())
    assert ".metadata is corrupt or incomplete" in error(lambda copy: (copy / ".metadata").write_bytes(b""))
    assert ".metadata lists __1_0.distcp, but the file does not exist" in error(
        lambda copy: (copy / "__1_0.distcp").unlink()
    )
    assert "__0_0.distcp is truncated: it has 100 of " in error(lambda copy: os.truncate(copy / "__0_0.distcp", 100))
    overwritten = error(lambda copy: (file := copy / "__0_0.distcp").write_bytes(b"?" * file.stat().st_size))
    assert "__0_0.distcp is corrupt: " in overwritten and "cannot be loaded (" in overwritten
    assert "has no model description. Fix: pass --hf" in error(lambda copy: shutil.rmtree(copy / "huggingface"))
    assert "model.layers.0.mlp.down_proj.weight: no source has" in error(remove_chunks)


def test_corrupted_write_is_detected(tmp_path, monkeypatch):
    """The bytes of one tensor are changed while they are written."""
    write_model(tmp_path / "hf", config_of())
    save = torch.save

    def faulty(tensor, stream):
        save(tensor + 1 if isinstance(tensor, torch.Tensor) and tensor.shape == (12, 18) else tensor, stream)

    monkeypatch.setattr(torch, "save", faulty)
    with pytest.raises(ValueError, match=r"mlp.linear_fc2.weight\[0, 0\] differs from the data that megarl wrote"):
        huggingface_to_megatron(tmp_path / "hf", tmp_path / "out", layout_of())
    assert names_in(tmp_path) == {"hf"}
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "out", layout_of(), Options(verify=False))


@pytest.mark.parametrize("moment", ["written", "verified"])
def test_interruption_leaves_no_partial_output(tmp_path, checkpoint, moment):
    def interrupt(done: str, num_bytes: int, total: int) -> None:
        if done == moment:
            raise KeyboardInterrupt

    options = Options(progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        reshape(checkpoint, tmp_path / "out", layout_of(tp=3), options=options)
    with pytest.raises(KeyboardInterrupt):
        megatron_to_huggingface(checkpoint, tmp_path / "out", options=options)
    with pytest.raises(KeyboardInterrupt):
        huggingface_to_megatron(tmp_path / "hf", tmp_path / "out", layout_of(), options)
    assert names_in(tmp_path) == {"hf", "checkpoint"}


def test_full_disk_is_rejected_before_writing(tmp_path, monkeypatch):
    write_model(tmp_path / "hf", config_of())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(ValueError, match=r"out: its disk has 0.00 GB free, but 0.00 GB are needed"):
        huggingface_to_megatron(tmp_path / "hf", tmp_path / "out", layout_of())
    assert names_in(tmp_path) == {"hf"}


def test_at_most_one_tensor_is_in_memory(tmp_path, monkeypatch, checkpoint):
    """All tensors are assembled in the same buffer."""
    sizes: dict[int, list[int]] = {}
    requested: list[int] = []

    def recorded(writes, parameters, transport):
        for tensor in parameters.values():
            storage = tensor.untyped_storage()
            sizes.setdefault(storage.data_ptr(), []).append(storage.nbytes())
            assert storage.nbytes() == tensor.nbytes, "torch would save more than the tensor"
        return execute(writes, parameters, transport)

    def reused(num_bytes):
        requested.append(num_bytes)
        return ReusedMemory(num_bytes)

    for module in (conversion, folder):
        monkeypatch.setattr(module, "execute", recorded)
        monkeypatch.setattr(module, "ReusedMemory", reused)
    for convert, count in (
        (lambda: reshape(checkpoint, tmp_path / "reshaped", layout_of(tp=3)), 36),
        (lambda: megatron_to_huggingface(checkpoint, tmp_path / "back"), 21),
    ):
        sizes.clear()
        convert()
        [storage_sizes] = sizes.values()
        assert len(storage_sizes) >= count and max(storage_sizes) == requested[-1]


def store_common_state(checkpoint: Path, content: bytes) -> None:
    """Store the unsharded state as Megatron does: among the tensors, without a file of its own."""
    (checkpoint / "__9_0.distcp").write_bytes(b"something" + content)
    key = "common_state/shard_0_1"
    metadata = torch_checkpoint.FileSystemReader(checkpoint).read_metadata()
    info = next(iter(metadata.storage_data.values()))
    metadata.state_dict_metadata[key] = torch_checkpoint.BytesStorageMetadata()
    metadata.storage_data[torch_checkpoint.metadata.MetadataIndex(key)] = type(info)(
        "__9_0.distcp", len(b"something"), len(content)
    )
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    (checkpoint / "common.pt").unlink()


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_common_state_among_the_tensors_is_read(tmp_path, checkpoint):
    store_common_state(checkpoint, saved([{"iteration": 7}]))
    reshape(checkpoint, tmp_path / "out", layout_of(tp=3))
    assert torch.load(tmp_path / "out" / "common.pt") == {"iteration": 7}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"?" * 400, "__9_0.distcp is corrupt: common_state/shard_0_1 cannot be loaded (UnpicklingError). Fix: "),
        (saved([pickle.Pickler]), "__9_0.distcp is corrupt: common_state/shard_0_1 cannot be loaded (UnpicklingErr"),
        (
            saved({"iteration": 7}),
            "common_state/shard_0_1 is {'iteration': 7} instead of a list with one object. Fix: ",
        ),
    ],
)
def test_damaged_common_state_is_rejected(tmp_path, checkpoint, content, message):
    store_common_state(checkpoint, content)
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        reshape(checkpoint, tmp_path / "out", layout_of(tp=3))
    assert "weights_only" not in str(raised.value)
    assert names_in(tmp_path) == {"hf", "checkpoint"}


def test_missing_common_state_is_rejected(tmp_path, checkpoint):
    (checkpoint / "common.pt").unlink()
    with pytest.raises(UserError, match=r"checkpoint: contains no common\.pt\. Fix: copy the checkpoint again"):
        reshape(checkpoint, tmp_path / "out", layout_of(tp=3))
    (checkpoint / "common.pt").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"common\.pt: a symbolic link"):
        reshape(checkpoint, tmp_path / "out", layout_of(tp=3))
    assert names_in(tmp_path) == {"hf", "checkpoint"}


@pytest.mark.parametrize("verify", [True, False])
def test_progress_sums_to_the_total(tmp_path, verify):
    tensors = write_model(tmp_path / "hf", config_of(**TIED))
    done: dict[str, int] = {}
    totals = set()

    def progress(what: str, num_bytes: int, total: int) -> None:
        done[what] = done.get(what, 0) + num_bytes
        totals.add(total)

    written = huggingface_to_megatron(
        tmp_path / "hf", tmp_path / "out", layout_of(tp=3), Options(verify=verify, progress=progress)
    )
    padding = (384 - 37) * 12 * 2
    assert written == sum(tensor.nbytes for tensor in tensors.values()) + padding
    assert done == dict.fromkeys(("written", "verified") if verify else ("written",), written)
    assert totals == {written}


def test_indivisible_layout_is_rejected(tmp_path):
    write_model(tmp_path / "hf", config_of())
    with pytest.raises(ValueError, match="tp=2: 3 KV heads are not divisible by 2"):
        huggingface_to_megatron(tmp_path / "hf", tmp_path / "out", layout_of(tp=2))
    assert names_in(tmp_path) == {"hf"}


def test_model_description_can_come_from_the_hub(tmp_path, monkeypatch):
    """The tokenizer is included."""
    tensors = write_model(tmp_path / "hf", config_of())
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "checkpoint", layout_of())
    shutil.rmtree(tmp_path / "checkpoint" / "huggingface")
    monkeypatch.setattr(
        "megarl.models.folder._from_hub", lambda key, name, revision: {"org/tiny": tmp_path / "hf"}[name]
    )
    megatron_to_huggingface(tmp_path / "checkpoint", tmp_path / "back", Path("org/tiny"))
    assert_same(weights_of(tmp_path / "back"), tensors)
    assert (tmp_path / "back" / "tokenizer.json").exists()


@pytest.mark.parametrize("place", ["runs/a/megatron", "runs/a/actor", "runs/a"])
def test_run_folder_can_contain_converted_checkpoints(tmp_path, place):
    """The manifest.json of a run folder is not a checkpoint's."""
    tensors = write_model(tmp_path / "hf", config_of())
    out = tmp_path / place
    huggingface_to_megatron(tmp_path / "hf", out, layout_of())
    (tmp_path / "runs" / "a" / "manifest.json").write_text(json.dumps({"name": "a", "versions": {}}))
    megatron_to_huggingface(out, tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), tensors)


def test_pointer_to_a_checkpoint_is_not_a_checkpoint(tmp_path):
    (tmp_path / "latest").write_text("step_000001\n")
    with pytest.raises(ValueError, match=r"latest: not a directory\. Fix: pass a checkpoint's directory"):
        megatron_to_huggingface(tmp_path / "latest", tmp_path / "out")


def test_run_checkpoint_can_contain_a_converted_one(tmp_path):
    tensors = write_model(tmp_path / "hf", config_of())
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.begin(1)
    checkpoint_path = checkpoints.commit(1, {}, []).path
    huggingface_to_megatron(tmp_path / "hf", checkpoint_path / "megatron", layout_of())
    megatron_to_huggingface(checkpoint_path / "megatron", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), tensors)
    shutil.rmtree(checkpoint_path / "megatron" / "huggingface")
    with pytest.raises(ValueError, match=r"has no model description. Fix: pass --hf"):
        megatron_to_huggingface(checkpoint_path / "megatron", tmp_path / "again")
