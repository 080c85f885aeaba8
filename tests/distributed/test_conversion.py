"""Megatron loads converted checkpoints, and checkpoints of Megatron and of runs convert to Hugging Face folders."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import load_common_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.cluster.groups.ranks import worker_class
from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.megatron.checkpoint.conversion import (
    huggingface_to_megatron,
    layout_of_files,
    megatron_to_huggingface,
    reshape,
)
from megarl.megatron.workers.actor import ActorWorker
from megarl.megatron.workers.critic import CriticWorker
from megarl.models.classifier import as_classifier
from megarl.models.folder import read_config
from megarl.models.value_head import add_value_head
from megarl.run.checkpoints import Checkpoints
from tests.closeness import assert_close, expected, load
from tests.distributed.test_families import DEEPSEEK, DENSE, QWEN3_MOE, transformers_logits
from tests.distributed.test_ppo_parity import PLAIN, ppo_config, train_critic
from tests.forked import run_ranks
from tests.parity import RankResult, canonical, config_of, local_batch, random_groups, rank_batches, whole_tensors
from tests.parity import train as trained
from tests.tiny_model import write_tiny_model

SIZES = DENSE | dict(vocab_size=301, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4)
GROUPS = random_groups(0, SIZES["vocab_size"])
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int], str]] = {
    # The model, the layout of the written checkpoint, and the layout under which it is loaded.
    "Qwen2, tied: PP2, VPP2 and TP2": ("qwen2", dict(tie_word_embeddings=True), dict(pp=2, vpp=2), "tp: 2"),
    "Llama: TP2 and PP2": ("llama", {}, dict(tp=2), "pp: 2, first_stage_layers: 1"),
    "Qwen3 with experts: TP2, EP2, ETP1 and PP2": ("qwen3_moe", QWEN3_MOE, dict(tp=2, ep=2, etp=1), "pp: 2"),
    "DeepSeek-V3: PP2, EP4 and TP2, EP2, ETP1": (
        "deepseek_v3",
        DEEPSEEK | dict(num_hidden_layers=4),
        dict(pp=2, ep=4),
        "tp: 2, sequence_parallel: true, ep: 2, etp: 1",
    ),
}


def write(folder: Path, model_type: str, changes: dict[str, Any]) -> Path:
    sizes = {} if model_type == "deepseek_v3" else SIZES
    return write_tiny_model(folder, model_type, **sizes | changes | dict(vocab_size=SIZES["vocab_size"]))


def logits(store, rank: int, config: Config, folder: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return this rank's part [R, vocabulary share] of each response's logits, by sample id. It is empty except on the
    last stage.
    """
    worker = ActorWorker(config, folder, rank, store, threads=1)
    for weight in worker.parameters().values():
        weight.fill_(torch.nan)
    # Use Megatron's own loader, as a Megatron user would.
    for chunk in worker.chunks:
        state = chunk.module.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        chunk.module.load_state_dict(dist_checkpointing.load({"model": state}, str(checkpoint))["model"])
    captured: list[torch.Tensor] = []

    def capture(head, inputs, keywords):
        weight = head.weight if keywords.get("weight") is None else keywords["weight"]
        hidden = inputs[0][:, 0]
        if head.sequence_parallel:
            parts = [torch.empty_like(hidden) for _ in range(head.tp_group.size())]
            torch.distributed.all_gather(parts, hidden, group=head.tp_group)
            hidden = torch.cat(parts)
        captured.append(hidden[head.request.rows] @ weight.T)

    if worker.chunks[-1].module.post_process:
        worker.chunks[-1].module.output_layer.register_forward_pre_hook(capture, with_kwargs=True)
    batch = local_batch(*rank_batches(config, worker.packing, [GROUPS[0]]))
    worker.keep_log_probs("old", batch)
    order = [item.sample for members in batch.members for item in members] if captured else []
    sizes = [len(sample.response_ids) for sample in order]
    parts = torch.cat(captured).split(sizes) if captured else ()
    return {sample.id: part for sample, part in zip(order, parts, strict=True)}


@pytest.mark.parametrize("case", CASES)
def test_converted_checkpoint_in_megatron_has_hf_logits(tmp_path, case):
    model_type, changes, written, loaded = CASES[case]
    folder = write(tmp_path / "hf", model_type, changes)
    huggingface_to_megatron(folder, tmp_path / "checkpoint", layout_of_files(**written))
    config = config_of(folder, f"actor.layout={{{loaded}}}", "batch.prompts_per_step=1", "batch.prompts_per_update=1")
    ranks = run_ranks(config.actor.layout.world_size, logits, config, folder, tmp_path / "checkpoint")
    last = ranks[-config.actor.layout.tp :]
    samples = [sample for sample, _ in GROUPS[0]]
    actual = {s.id: torch.cat([part[s.id] for part in last], -1)[:, : SIZES["vocab_size"]] for s in samples}
    assert_close(actual, *expected(lambda: transformers_logits(folder, GROUPS[:1])), "logits")


def save_with_megatron(store, rank: int, config: Config, model: Path, out: Path) -> None:
    """Save with Megatron's defaults, which store all layers as slices of one tensor."""
    worker = ActorWorker(config, model, rank, store, threads=1)
    dist_checkpointing.save({"model": worker.chunks[0].module.sharded_state_dict()}, str(out))
    for child in psutil.Process().children(recursive=True):
        child.kill()  # ranks skip their exit handlers, so the process of Megatron's queue would keep running


def test_checkpoint_from_megatrons_own_writer_converts(tmp_path):
    folder = write(tmp_path / "hf", "qwen3", {})
    (tmp_path / "checkpoint").mkdir()
    config = config_of(folder, "actor.layout={tp: 2}")
    run_ranks(2, save_with_megatron, config, folder, tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"has no model description. Fix: pass --hf"):
        megatron_to_huggingface(tmp_path / "checkpoint", tmp_path / "back")
    megatron_to_huggingface(tmp_path / "checkpoint", tmp_path / "back", folder)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def train_and_save(store, rank: int, config: Config, model: Path, folder: Path):
    """Run one update and save a checkpoint of the result."""
    worker: list[ActorWorker] = []
    inner = ActorWorker.end_step

    def end_step(self: ActorWorker) -> None:
        inner(self)
        worker.append(self)

    ActorWorker.end_step = end_step
    result = trained(store, rank, config, model, [GROUPS])
    worker[0].save_checkpoint(folder)
    return result, worker[0].finish_checkpoint(folder)


def test_run_checkpoint_exports_and_changes_layout(tmp_path):
    """Covers the trained weights, the optimizer state and the update count."""
    folder = write(tmp_path / "hf", "qwen2", dict(tie_word_embeddings=True))
    config = config_of(folder, "actor.layout={pp: 2}", "actor.frozen=[model.layers.1.*]")
    checkpoints = Checkpoints(tmp_path / "run")
    hidden = checkpoints.begin(1)
    (hidden / "actor").mkdir()
    ranks = run_ranks(2, train_and_save, config, folder, hidden)
    records = [record for _, files in ranks for record in files]
    checkpoint = checkpoints.commit(1, {"config": config.model_dump()}, records).path
    weights = canonical(folder, [result for result, _ in ranks], "weights")

    check_corruption_is_reported(checkpoint, tmp_path / "export")
    megatron_to_huggingface(checkpoint, tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == weights.keys() and all(torch.equal(exported[name], weights[name]) for name in weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert torch.equal(model.state_dict()["model.norm.weight"], weights["model.norm.weight"])
    original = load_file(folder / "model.safetensors")
    moved = [name for name in weights if not torch.equal(original[name], weights[name])]
    assert moved and not [name for name in moved if name.startswith("model.layers.1.")]

    reshape(checkpoint / "actor", tmp_path / "reshaped", layout_of_files(tp=2))
    assert load_common_state_dict(tmp_path / "reshaped") == load_common_state_dict(checkpoint / "actor") != {}
    before, after = (read_whole(path) for path in (checkpoint / "actor", tmp_path / "reshaped"))
    embeddings = {key for key in before if key.endswith("word_embeddings.weight")}
    assert before.keys() == after.keys() and len(embeddings) == 4
    for key in before:
        rows = SIZES["vocab_size"] if key in embeddings else None
        assert torch.equal(before[key][:rows], after[key][:rows]), key
    megatron_to_huggingface(tmp_path / "reshaped", tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def check_corruption_is_reported(checkpoint: Path, out: Path) -> None:
    """Flip a bit in a rank's data file and in its index, and expect an error each time. Restore both files."""
    for name in ("__1_0.distcp", ".metadata"):
        file = checkpoint / "actor" / name
        whole = file.read_bytes()
        file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        for convert in (megatron_to_huggingface, partial(reshape, layout=layout_of_files(tp=2))):
            with pytest.raises(ValueError, match=rf"actor/{name} is corrupt: its SHA-256 is \w+…, expected \w+…"):
                convert(checkpoint, out)
            assert sorted(path.name for path in out.parent.iterdir()) == ["hf", "run"]
        file.write_bytes(whole)


def train_and_save_critic(store, rank: int, config: Config, model: Path, folder: Path):
    """Run one update, save a checkpoint, and compute the values with its weights."""
    saved: list[list] = []
    inner = CriticWorker.end_step

    def end_step(self: CriticWorker) -> None:
        inner(self)
        self.save_checkpoint(folder)
        saved.append(self.finish_checkpoint(folder))
        batch = local_batch(*rank_batches(config, self.packing, GROUPS, "critic"))
        saved.append(self.score_tokens(batch))

    CriticWorker.end_step = end_step
    result, _ = train_critic(store, rank, config, model, [[GROUPS]], {})
    return result, *saved


@torch.no_grad()
def transformers_values(folder: Path) -> dict[str, torch.Tensor]:
    model, by_sample = load(AutoModelForSequenceClassification, folder), {}
    for sample, _ in GROUPS[0]:
        ids = sample.token_ids.tolist()
        ends = range(len(sample.prompt.token_ids), len(ids))
        by_sample[sample.id] = torch.stack([model(torch.tensor([ids[:end]])).logits[0, 0] for end in ends])
    return by_sample


@pytest.mark.exhaustive
def test_exported_critic_reproduces_its_values(tmp_path):
    folder = write(tmp_path / "hf", "qwen2", dict(tie_word_embeddings=True))
    config = ppo_config(folder, None, ("{}", "{tp: 2}"), PLAIN)
    checkpoints = Checkpoints(tmp_path / "run")
    hidden = checkpoints.begin(1)
    (hidden / "critic").mkdir()
    ranks = run_ranks(2, train_and_save_critic, config, folder, hidden)
    records = [record for _, files, _ in ranks for record in files]
    checkpoint = checkpoints.commit(1, {"config": config.model_dump()}, records).path
    weights = whole_tensors(as_classifier(read_config(folder)), [result for result, _, _ in ranks], "weights")

    megatron_to_huggingface(checkpoint / "critic", tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == weights.keys() and all(torch.equal(exported[name], weights[name]) for name in weights)
    assert exported["score.weight"].any()
    values = {name: value for _, _, own in ranks for name, value in own.items()}
    assert_close(values, *expected(lambda: transformers_values(tmp_path / "export")), "values")

    huggingface_to_megatron(tmp_path / "export", tmp_path / "imported", layout_of_files(pp=2))
    reshape(checkpoint / "critic", tmp_path / "reshaped", layout_of_files(pp=2))
    imported, reshaped = (read_whole(tmp_path / name) for name in ("imported", "reshaped"))
    assert imported.keys() < reshaped.keys()
    assert all(torch.equal(imported[key], reshaped[key]) for key in imported)


PAIRS = ["data={source: pairs.jsonl, format: preferences}", "rollout.temperature=1", "actor.tokens_per_microbatch=128"]
RUNS: dict[str, tuple[Role, list[str]]] = {
    "a reward model": ("actor", ["algorithm.objective={name: reward_model}", *PAIRS]),
    "a process reward model": (
        "actor",
        ["algorithm.objective={name: process_reward_model}", *PAIRS, "data.format=labels"],
    ),
    "DPO": ("actor", ["algorithm.objective={name: dpo}", *PAIRS]),
    "a reference that follows": ("actor", ["algorithm.kl={coefficient: 0.1, renew_steps: 1, renew_share: 0.5}"]),
    "an actor with values": ("actor", ["algorithm.advantage.estimator=gae", "critic.shared_backbone=true"]),
    "an implicit reward": ("implicit_reward", ["implicit_reward.coefficient=1.0"]),
}


def change_and_save(store, rank: int, config: Config, model: Path, folder: Path, role: Role):
    """Change the weights from those in the model's folder and save a checkpoint."""
    worker = worker_class(config, role)(config, model, rank, store, threads=1)
    generator = torch.Generator().manual_seed(rank)
    for weight in worker.parameters().values():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    worker.save_checkpoint(folder)
    weights = {name: weight.clone() for name, weight in worker.parameters().items()}
    return RankResult(worker.holder, {}, weights, {}), worker.finish_checkpoint(folder)


@pytest.mark.parametrize(("run", "tied"), [*((run, True) for run in RUNS), ("a reward model", False)])
def test_checkpoints_of_all_roles_export_and_change_layout(tmp_path, run, tied):
    role, overrides = RUNS[run]
    folder = write(tmp_path / "hf", "qwen2", dict(tie_word_embeddings=tied))
    config = config_of(folder, *overrides)
    checkpoints = Checkpoints(tmp_path / "run")
    hidden = checkpoints.begin(1)
    (hidden / role).mkdir()
    [(result, records)] = run_ranks(1, change_and_save, config, folder, hidden, role)
    checkpoint = checkpoints.commit(1, {"config": config.model_dump()}, records).path

    hf_config = read_config(folder)
    kind = config.algorithm.objective.spec.classifier
    exported_config = hf_config if kind is None else as_classifier(hf_config, kind)
    with_heads = add_value_head(exported_config) if run == "an actor with values" else exported_config
    weights = whole_tensors(with_heads, [result], "weights")
    megatron_to_huggingface(checkpoint / role, tmp_path / "export")
    reshape(checkpoint / role, tmp_path / "reshaped", layout_of_files(pp=2))
    megatron_to_huggingface(tmp_path / "reshaped", tmp_path / "again")
    for name in ("export", "again"):
        exported = load_file(tmp_path / name / "model.safetensors")
        assert exported.keys() == {name for name in weights if not name.startswith("value_head.")}
        assert all(torch.equal(exported[name], weights[name]) for name in exported)
        assert read_config(tmp_path / name)["architectures"] == exported_config["architectures"]
    assert ("score.weight" in exported) == (kind is not None)
    assert ("score.bias" in exported) == (kind == "token")


def read_whole(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a checkpoint with torch."""
    entries = torch.distributed.checkpoint.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if hasattr(entry, "chunks")
    }
    torch.distributed.checkpoint.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    return tensors
