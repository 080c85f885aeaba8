"""Whole runs of an image model: they are reproducible, resume bit-identically after all processes are killed, and train
with and without log-probs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from megarl.run.checkpoints import Checkpoints
from tests.e2e.run import MEGARL, Run
from tests.e2e.test_resume import kill
from tests.metrics import MEASURED
from tests.paths import ROOT
from tests.timing import RUN_S, START_S
from tests.tiny_image_model import load_pipeline, write_tiny_image_model

pytestmark = [pytest.mark.slow, pytest.mark.one_part]
STEPS = 4
RECIPE = """
base: {base}
run: {{name: tiny, steps: {steps}}}
model: {{path: {folder}/model, dtype: float32}}
actor:
  layout: {{pp: 2}}
  threads: 1
  optimizer: {{lr: 1.0e-3}}
  tokens_per_microbatch: 1024
rollout:
  engine: diffusers
  threads: 1
  denoising: {{height: 16, width: 24, num_steps: 5, guidance: 2.0, sde_steps: 2, sde_within: [0, 4]}}
algorithm: {{kl: {{coefficient: 0.01}}, objective: {{clip_low: 1.0e-3, clip_high: 1.0e-3}}}}
batch: {{prompts_per_step: 4, samples_per_prompt: 3, prompts_per_update: 2}}
data: {{source: {folder}/captions.jsonl}}
rewards:
  functions: [{{function: "{folder}/reward.py:brightness"}}]
  processes: 2
evaluation:
  sets: [{{name: ode, source: "{folder}/captions.jsonl", size: 2}}]
  every_steps: 2
checkpoint: {{every_steps: 1}}
cluster: {{object_store_mib: 80}}
"""
REWARD = """
import time
from pathlib import Path

HOLD = Path(__file__).with_name("hold")
calls = 0


def brightness(prompt, response, answer):
    global calls
    calls += 1
    # Each of two processes may score as many images as a step has, so at least one step ends, and at most two.
    while calls > 12 and HOLD.exists():
        time.sleep(0.02)
    return response.mean() / 255
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    write_tiny_image_model(folder / "model")
    captions = [{"prompt": f"{number} red cats", "answer": number} for number in range(6)]
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in captions))
    (folder / "reward.py").write_text(REWARD)
    (folder / "tiny.yaml").write_text(RECIPE.format(base=ROOT / "configs" / "base.yaml", folder=folder, steps=STEPS))
    return folder / "tiny.yaml"


@pytest.fixture(scope="module")
def uninterrupted(series, recipe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    series.train(recipe, f"run.folder={folder}")
    return folder / "tiny"


@pytest.fixture(scope="module")
def resumed(recipe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resumed")
    hold = recipe.with_name("hold")
    hold.touch()
    with Run(recipe, folder, vllm=True) as run:
        run.wait_until(lambda: Checkpoints(run.folder / "checkpoints").latest() is not None)
        kill(run)
    hold.unlink()
    checkpoint = Checkpoints(run.folder / "checkpoints").latest()
    assert checkpoint is not None and int(checkpoint.name.removeprefix("step_")) < STEPS
    with Run(recipe, folder, "resume=auto", vllm=True) as run:
        assert run.end(START_S) == 0, run.errors
    return run.folder


@pytest.fixture(scope="module")
def noised(recipe, tmp_path_factory) -> Path:
    """Return the folder of a run that trains on images with new noise. Two engines have their own CPU cores."""
    keys = (
        *("run.steps=2", "algorithm.objective={name: diffusion_nft}", "logprob_check.canaries=refits"),
        *("actor.layout={tp: 2}", "rollout.replicas=2", "cluster.placement=disaggregated"),
    )
    with Run(recipe, tmp_path_factory.mktemp("noised"), *keys, vllm=True) as run:
        assert run.end(START_S) == 0, run.errors
    return run.folder


def metrics(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def files(run: Path) -> dict[str, bytes]:
    paths = (path for part in ("rollouts", "evaluations", "model") for path in (run / part).rglob("*"))
    return {str(path.relative_to(run)): path.read_bytes() for path in paths if path.is_file()}


@pytest.mark.exhaustive
def test_resumed_run_is_equal(uninterrupted, resumed):
    assert metrics(resumed) == metrics(uninterrupted)
    assert files(resumed) == files(uninterrupted)


def test_trainer_agrees_with_the_engine(uninterrupted):
    """The limit is a tenth of the clip range."""
    lines = [line for line in metrics(uninterrupted) if "mismatch/logprob_abs_mean" in line]
    assert len(lines) == STEPS
    assert max(line["mismatch/logprob_abs_mean"] for line in lines) < 1e-4
    assert all(line["kl/loss_token_gaussian"] >= 0 for line in lines)


def test_rollouts_have_images_and_windows(uninterrupted):
    windows = set()
    for step in range(1, STEPS + 1):
        file = uninterrupted / "rollouts" / f"step_{step:06d}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(rows) == 12
        [window] = {tuple(row["trained_denoising_steps"]) for row in rows}
        windows.add(window)
        for row in rows:
            image = np.asarray(Image.open(file.parent / row["image"]))
            assert image.shape == (16, 24, 3)
            assert row["reward"] == pytest.approx(image.mean() / 255)
    assert len(windows) > 1


@pytest.mark.exhaustive
def test_diffusion_nft_trains_without_log_probs(noised):
    """Each image is trained at noise levels of its own, and canaries compare the engine's velocities after each
    refit."""
    lines = [line for line in metrics(noised) if "policy/loss" in line]
    assert len(lines) == 2 and all(line["policy/grad_norm"] > 0 for line in lines)
    assert all(line["policy/velocity_change"] > 0 and line["kl/loss_token_velocity"] >= 0 for line in lines)
    assert max(line["mismatch/canary_velocity"] for line in lines) < 1e-4
    assert not [name for line in lines for name in line if name.startswith(("mismatch/logprob", "policy/ratio"))]
    rows = [json.loads(line) for line in (noised / "rollouts" / "step_000002.jsonl").read_text().splitlines()]
    drawn = [tuple(row["trained_denoising_steps"]) for row in rows]
    assert len(rows) == 12 and {len({*steps}) for steps in drawn} == {2} and len({*drawn}) > 1
    assert all(row["rollout_logprobs"] == [] and row["advantage"] is not None for row in rows)


@pytest.fixture(scope="module")
def ahead(recipe, tmp_path_factory) -> Path:
    """A run that trains adapters of Stable Diffusion 3, whose engine samples a step ahead, with weights of the previous
    step."""
    write_tiny_image_model(recipe.parent / "sd3", "SD3.5")
    keys = (
        *("rollout.max_staleness=1", "algorithm.correction.old=rollout", "algorithm.kl.coefficient=0"),
        *(f"model.path={recipe.parent / 'sd3'}", "actor.lora={rank: 4, export: adapters}"),
    )
    with Run(recipe, tmp_path_factory.mktemp("ahead"), *keys, vllm=True) as run:
        assert run.end(START_S) == 0, run.errors
    return run.folder


@pytest.mark.exhaustive
def test_images_sampled_ahead_are_trained(ahead):
    """Ratios are relative to the engine's log-probs, and each denoising step records its weight version."""
    lines = [line for line in metrics(ahead) if line["step"] > 0]
    assert len(lines) == STEPS
    assert lines[0]["weights/staleness_max"] == 0 and lines[-1]["weights/staleness_1_share"] > 0
    for step in range(1, STEPS + 1):
        rows = [json.loads(line) for line in (ahead / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]
        versions = {run["version"] for row in rows for run in row["version"]}
        assert versions <= {max(0, step - 2), step - 1}
        assert all(sum(run["count"] for run in row["version"]) == row["num_denoising_steps"] for row in rows)
        stale = [run for row in rows for run in row["version"] if run["version"] < step - 1]
        assert bool(stale) == (lines[step - 1]["weights/staleness_max"] > 0)
    assert all(np.isfinite(line["policy/loss"]) for line in lines)


@pytest.mark.filterwarnings("error:While injecting the PEFT adapters")  # peft warns about targets without adapters
@pytest.mark.exhaustive
def test_exported_adapters_change_the_images_of_diffusers(recipe, ahead):
    pipeline = load_pipeline(recipe.parent / "sd3")
    options = {"height": 16, "width": 24, "num_inference_steps": 2, "output_type": "np"}
    images = []
    for _ in range(2):
        images.append(pipeline("a red cat", generator=torch.manual_seed(0), **options).images)
        pipeline.load_lora_weights(ahead / "model")
    assert 1e-4 < np.abs(images[1] - images[0]).max() < 1


@pytest.mark.exhaustive
def test_exported_model_is_evaluated_like_the_run(recipe, uninterrupted, tmp_path):
    """The last step is evaluated with the same weights and the same noise."""
    command = [*MEGARL, "evaluate", uninterrupted / "model", recipe, "--out", tmp_path / "evaluation"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=RUN_S)
    found = json.loads((tmp_path / "evaluation" / "results.json").read_text())["sets"]["ode"]
    assert found["estimates"]["avg@1"]["value"] == metrics(uninterrupted)[-1]["evaluation/ode/avg@1"]
    assert not {"length_mean", "truncated_frac"} & found.keys()


def test_exported_model_is_a_trained_diffusers_folder(recipe, uninterrupted):
    initial, trained = recipe.parent / "model", uninterrupted / "model"
    assert load_pipeline(trained).transformer.config["dim"] == load_pipeline(initial).transformer.config["dim"]
    for part in ("vae", "text_encoder"):
        [before], [after] = ((folder / part).glob("*.safetensors") for folder in (initial, trained))
        assert before.read_bytes() == after.read_bytes()
    [before], [after] = ((folder / "transformer").glob("*.safetensors") for folder in (initial, trained))
    changed = {name: bool((load_file(after)[name] != weight).any()) for name, weight in load_file(before).items()}
    assert all(changed.values()), [name for name, moved in changed.items() if not moved]
