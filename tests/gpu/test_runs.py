"""Complete runs on one shared GPU, on two, and on eight, started as a user starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.cluster.machine import check_machine
from megarl.config.load import load
from megarl.core import device
from tests.e2e.run import Run
from tests.e2e.run import write_recipe as write_endless_recipe
from tests.e2e.test_train import metrics_of, turns_of, write_recipe
from tests.gpu.gpus import needs_gpus
from tests.gpu.models import write_model
from tests.timing import GPU_RUN_S, RUN_S
from tests.tiny_model import write_tiny_model

NEAR, NEAR_IN_FP8 = 0.05, 0.6
"""Upper bounds on the mean difference between trainer and engine log-probs, in nats per token, with bfloat16 and with
fp8 engines."""

COLOCATED = ("cluster.placement=colocated", "rollout.sleep=true")
MIB = 2**20
OF_8B = (
    *("model.dtype=bfloat16", "actor.optimizer.lr=1.0e-6", "actor.tokens_per_microbatch=8192"),
    *("actor.recompute=selective", "actor.offload=[parameters, gradients, optimizer]"),
    *("rollout.context_length=2048", "rollout.max_new_tokens=1024", "rollout.kv_cache_gib=20", "rollout.tp=2"),
    *("rollout.replicas=4", "checkpoint.every_steps=5", "rollout.verify_refit=always"),
)
RUNS = {
    "in turns": (1, (*COLOCATED,)),
    "in turns, rollouts ahead": (1, (*COLOCATED, "rollout.max_staleness=1", "rollout.kv_cache_on_update=recompute")),
    "fp8 blocks": (1, (*COLOCATED, "model.dtype=bfloat16", "rollout.quantization=fp8_block")),
    "an engine over two": (2, (*COLOCATED, "actor.layout.dp=2", "rollout.tp=2")),
    "sent": (2, ("cluster.placement=disaggregated",)),
    "killed": (2, (*COLOCATED, "actor.layout={pp: 1, dp: 2}", "rollout.replicas=2")),
    "8B": (8, (*COLOCATED, *OF_8B, "actor.layout={tp: 2, sequence_parallel: true, dp: 4}")),
    "8B, another layout": (8, (*COLOCATED, *OF_8B, "actor.layout={tp: 4, sequence_parallel: true, pp: 2}")),
}
"""Number of GPUs and config overrides of each run."""


@pytest.mark.parametrize("name", RUNS)
def test_gpu_rules_accept_these_runs(tmp_path, monkeypatch, name):
    """This test needs no GPU. It covers the rules for GPUs, which a rehearsal on CPU does not check."""
    count, keys = RUNS[name]
    monkeypatch.setattr(device, "on_cuda", lambda: True)
    monkeypatch.setattr(device, "num_gpus", lambda: count)
    recipe = write_endless_recipe(tmp_path) if name == "killed" else write_recipe(tmp_path, tmp_path)
    check_machine(load(recipe, keys))


def train(folder: Path, model: Path, *overrides: str, seconds: float = RUN_S) -> Path:
    """Run `megarl train` until it finishes. Return the run folder."""
    command = [sys.executable, "-m", "megarl.cli", "train", str(write_recipe(folder, model)), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return folder / "runs" / "tiny"


def train_verified(folder: Path, name: str, *overrides: str, near: float = NEAR) -> list[dict]:
    """Train three steps in bfloat16, each with a refit verified by checksums. Return their metrics."""
    keys = ("run.steps=3", "model.dtype=bfloat16", "rollout.verify_refit=always", *overrides)
    steps = metrics_of(train(folder, write_model(folder / "model", name), *keys))
    assert [step["weights/version"] for step in steps] == [1, 2, 3]
    assert all(step["mismatch/logprob_abs_mean"] <= near for step in steps)
    return steps


@pytest.mark.parametrize(
    ("name", "offload", "eager"),
    [
        ("dense", "[]", True),
        ("dense", "[gradients, optimizer]", False),
        ("dense", "[parameters, gradients, optimizer]", False),
        ("experts", "[parameters, gradients, optimizer]", False),
        ("latent", "[parameters, gradients, optimizer]", False),
    ],
)
@needs_gpus(1, can_rehearse=False)
def test_engine_and_trainer_share_a_gpu(tmp_path, name, offload, eager):
    """The engine sleeps, wakes, receives weights and samples.

    Unless eager, it uses CUDA graphs, which refer to the initial addresses of the weights. The trainer publishes
    parameters again if offloading has moved them.
    """
    steps = train_verified(
        *(tmp_path, name, *RUNS["in turns"][1]),
        *(f"actor.offload={offload}", f"rollout.vllm_overrides={{enforce_eager: {eager}}}"),
    )
    assert all(step["refit/gb"] > 0 and step["refit/staging_mib"] == 0 for step in steps)
    parts = offload.strip("[]").split(", ") if offload != "[]" else []
    assert all(steps[-1][f"memory/actor_{part}_offloaded_gb"] > 0 for part in parts)
    # The listed parts are offloaded during rollouts, none during updates, and all but parameters during refits.
    offloads, onloads = (["offload"], ["onload"]) if parts else ([], [])
    before_refit = [*offloads, *(onloads if "parameters" in parts else [])]
    step = [*offloads, "generate", "sleep", *onloads, "update", *before_refit, "refit"]
    canaries = [*offloads, "generate", "sleep", *(onloads if "parameters" in parts else [])]
    begin = ["refit", *canaries]
    assert turns_of(tmp_path / "runs" / "tiny")[: len(begin) + 3 * len(step)] == [*begin, *step, *step, *step]


@needs_gpus(1, can_rehearse=False)
def test_rollouts_ahead_survive_engine_sleep(tmp_path):
    """Unfinished rollouts lose their keys and values when the engine sleeps, and continue after recomputing them."""
    few = "rollout.vllm_overrides={max_num_seqs: 16}"
    keys = ("run.steps=4", "model.dtype=bfloat16", "rollout.verify_refit=always", few)
    run = train(tmp_path, write_model(tmp_path / "model", "dense"), *keys, *RUNS["in turns, rollouts ahead"][1])
    steps = metrics_of(run)
    assert [step["weights/version"] for step in steps] == [1, 2, 3, 4]
    assert max(step["weights/staleness_max"] for step in steps) == 1
    assert sum(step["weights/mixed_frac"] for step in steps) > 0


@pytest.mark.parametrize("name", ["dense", "experts"])
@needs_gpus(1, can_rehearse=False)
def test_fp8_block_engine_receives_weights_in_place(tmp_path, name):
    """vLLM's kernels use the received tensors without repacking."""
    steps = train_verified(tmp_path, name, *RUNS["fp8 blocks"][1], near=NEAR_IN_FP8)
    assert all(step["refit/gb"] > 0 and step["refit/staging_mib"] == 0 for step in steps), (
        "weights were staged by vLLM's loader"
    )


@needs_gpus(2)
def test_tp2_engine_reads_weights_of_both_gpus(tmp_path):
    steps = train_verified(tmp_path, "dense", *RUNS["an engine over two"][1])
    assert all(step["refit/gb"] > 0 for step in steps)


@needs_gpus(2)
def test_weights_are_sent_to_another_gpu(tmp_path):
    steps = train_verified(tmp_path, "experts", *RUNS["sent"][1])
    assert all(step["refit/sent_gb"] > 0 for step in steps)


@needs_gpus(2)
def test_killed_rank_ends_run_and_frees_gpus(tmp_path):
    recipe = write_endless_recipe(tmp_path)
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
    with Run(recipe, tmp_path, *RUNS["killed"][1]) as run:
        run.wait_for_step(2)
        run.named("trainer-1").kill()
        assert run.end() == 1
        assert "trainer-1 died" in run.errors[-1]
    after = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
    assert all(now >= before - 64 * MIB for now, before in zip(after, free, strict=True))


@needs_gpus(8, can_rehearse=False)
@pytest.mark.timeout(3600)
def test_8b_model_resumes_in_another_layout_on_eight_gpus(tmp_path):
    """The model has Qwen3-8B's sizes and random weights. The test prints the times and peak memory of each step."""
    sizes = dict(
        vocab_size=151936,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=36,
        intermediate_size=12288,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    model = write_tiny_model(tmp_path / "model", "qwen3", **sizes)
    first, other = (RUNS[name][1] for name in ("8B", "8B, another layout"))
    run = train(tmp_path, model, *first, "run.steps=5", seconds=GPU_RUN_S)
    for step in metrics_of(run):
        print(json.dumps({name: value for name, value in step.items() if name.startswith(("time/", "memory/"))}))
        assert step["mismatch/logprob_abs_mean"] <= NEAR
    steps = metrics_of(train(tmp_path, model, *other, "run.steps=6", "resume=auto", seconds=GPU_RUN_S))
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["mismatch/logprob_abs_mean"] <= NEAR
