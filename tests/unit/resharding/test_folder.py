"""Hugging Face folders as sources and destinations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.models.folder import read_config
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, megatron_holder
from megarl.resharding.folder import write_folder
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.local import LocalMemory
from megarl.resharding.transports.safetensors import SafetensorsFolder
from tests.tiny_model import write_tiny_llama
from tests.unit.resharding.cases import layout_of


@pytest.fixture(scope="module", params=["tied", "untied"])
def source(request, tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("source"), model_type="qwen2", tied=request.param == "tied")


def loaded_ranks(source: Path) -> tuple[list, LocalMemory]:
    """Load the folder's weights into two pipeline stages."""
    config = read_config(source)
    ranks = [megatron_holder(config, layout_of(pp=2), rank) for rank in range(2)]
    weights = {}
    with SafetensorsFolder(source) as transport:
        plan = make_plan([transport.with_file_dtypes(huggingface_holder(config))], ranks)
        for rank in ranks:
            weights[rank.name] = {name: torch.full(shape, torch.nan) for name, shape in rank.shapes.items()}
            execute(plan.into(rank.name), weights[rank.name], transport)
    return ranks, LocalMemory(weights)


def export(source: Path, out: Path, dtype: str | None = None, **options) -> int:
    ranks, transport = loaded_ranks(source)
    config = read_config(source)
    plan = make_plan(ranks, [huggingface_holder(config, dtype)])
    return write_folder(plan, transport, config, source, out, **options)


def test_export_keeps_the_dtype_of_each_tensor(tmp_path):
    """A router's bias stays float32 in a bfloat16 model. config.json does not announce layers that are not exported."""
    config = {
        **dict(model_type="deepseek_v3", vocab_size=32, hidden_size=8, num_attention_heads=2, num_hidden_layers=1),
        **dict(num_key_value_heads=2, intermediate_size=8, q_lora_rank=4, kv_lora_rank=4, first_k_dense_replace=0),
        **dict(qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2, moe_intermediate_size=4, n_routed_experts=4),
        **dict(num_experts_per_tok=2, n_group=1, topk_group=1, num_nextn_predict_layers=1),
    }
    rank, folder = megatron_holder(config, layout_of(), 0, "bfloat16"), huggingface_holder(config, "bfloat16")
    weights = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in rank.shapes.items()}
    [bias] = [name for name in weights if name.endswith("expert_bias")]
    weights[bias] = torch.randn(rank.shapes[bias])
    (tmp_path / "source").mkdir()
    transport = LocalMemory({rank.name: weights})
    write_folder(make_plan([rank], [folder]), transport, config, tmp_path / "source", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    assert torch.equal(written.pop(name), weights[bias])
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    exported = read_config(tmp_path / "out")
    assert (exported["dtype"], exported["num_nextn_predict_layers"]) == ("bfloat16", 0)


def test_export_of_an_imported_folder_is_bit_exact(source, tmp_path):
    out = tmp_path / "new" / "out"
    written = export(source, out)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert written == sum(tensor.nbytes for tensor in after.values())
    assert {path.name for path in out.iterdir()} == {path.name for path in source.iterdir()}
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_transformers_loads_exported_shards(source, tmp_path):
    out = tmp_path / "out"
    export(source, out, shard_bytes=50_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = {path.name: path for path in out.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == set(files) and len(files) > 2
    contents = {name: load_file(path) for name, path in files.items()}
    assert all(name in contents[file] for name, file in index["weight_map"].items())
    assert all(len(c) == 1 or sum(t.nbytes for t in c.values()) <= 50_000 for c in contents.values())

    tokens = torch.tensor([AutoTokenizer.from_pretrained(out).encode("7+5?")])
    original, exported = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, out))
    assert torch.equal(exported(tokens).logits, original(tokens).logits)

    export(out, tmp_path / "again")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_export_casts_to_another_dtype(source, tmp_path):
    export(source, tmp_path / "out", dtype="bfloat16")
    assert read_config(tmp_path / "out")["dtype"] == "bfloat16"
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)


def test_export_does_not_overwrite_a_folder(source, tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} already exists"):
        export(source, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_failed_export_leaves_no_files(source, tmp_path):
    ranks, transport = loaded_ranks(source)
    config = read_config(source)
    plan = make_plan(ranks, [huggingface_holder(config)])
    stray = replace(plan, holders=(ranks[0].name, "megarl:2", *plan.destinations))
    with pytest.raises(ValueError, match="megarl:2 has no parameter"):
        write_folder(stray, transport, config, source, tmp_path / "out", shard_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_incomplete_folders_are_rejected(source, tmp_path):
    with pytest.raises(ValueError, match=r"contains neither model.safetensors nor model.safetensors.index.json"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ValueError, match=r"lists model-1.safetensors, but the file does not exist"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"the checkpoint has no tensor model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight has shape \(3,\), but config"),
    ],
)
def test_tensors_that_contradict_config_json_are_rejected(source, tmp_path, change, message):
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsFolder(tmp_path) as folder, pytest.raises(ValueError, match=message):
        folder.with_file_dtypes(huggingface_holder(read_config(source)))


def test_integer_weights_are_rejected(tmp_path):
    save_file({"w": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with (
        SafetensorsFolder(tmp_path) as folder,
        pytest.raises(ValueError, match=r"w has the unsupported dtype I8\. Supported dtypes: F64, F32"),
    ):
        folder.dtype("huggingface", "w")
