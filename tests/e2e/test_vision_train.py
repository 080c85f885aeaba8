"""GRPO of a vision-language model, from images in the data to the exported model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from megarl.run.diagnosis import diagnose as diagnosis
from megarl.run.diagnosis.comparison import first_different, table
from megarl.run.diagnosis.side import SIDES, Request, compute
from tests.e2e.engine_processes import engine_context
from tests.e2e.series import Series
from tests.e2e.test_train import REWARD, metrics_of
from tests.forked import run_ranks
from tests.paths import BASE
from tests.timing import RUN_S
from tests.tiny_vision import build

pytestmark = pytest.mark.slow

SIZES = ((64, 64), (90, 40), (50, 100))
IMAGES = ([0], [1, 2], [], [2], [0, 0, 1], [1])
"""The images of each row, which share files."""
LIMIT = 1e-5
COMPUTE = diagnosis._compute
FUNCTIONS = """
def num_images(prompt, response, answer, prompt_images):
    return len(prompt_images)

def width(prompts, responses, answers, prompt_images):
    return [sum(image.width for image in images) for images in prompt_images]
"""


def write_recipe(folder: Path, *keys: str) -> Path:
    build(folder / "model", "qwen3_vl")
    (folder / "rewards.py").write_text(FUNCTIONS)
    rng = np.random.default_rng(0)
    for i, (width, height) in enumerate(SIZES):
        Image.fromarray(rng.integers(256, size=(height, width, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    rows = [
        {
            "prompt": "<image>" * len(images) + f"Question {i}?",
            "answer": "",
            "images": [f"{folder}/{k}.png" for k in images],
        }
        for i, images in enumerate(IMAGES)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "base": str(BASE),
                "run": {"folder": str(folder / "runs"), "name": "tiny", "steps": 3},
                "model": {"path": str(folder / "model"), "dtype": "float32", "vision": True},
                "actor": {"optimizer": {"lr": 0.01}, "tokens_per_microbatch": 512, "threads": 1},
                "rollout": {"max_new_tokens": 8, "context_length": 128, "kv_cache_gib": 0.05, "threads": 1},
                "batch": {"prompts_per_step": 6, "samples_per_prompt": 4, "prompts_per_update": 6},
                "data": {"source": str(folder / "data.jsonl"), "image_column": "images"},
                "rewards": {
                    "functions": [
                        {"function": f"{REWARD}:digit_share"},
                        *({"function": f"{folder}/rewards.py:{name}"} for name in ("num_images", "width")),
                    ]
                },
                "logprob_check": {"canaries": "refits"},
                "cluster": {"object_store_mib": 80},
            }
        )
    )
    return recipe


def train(series: Series, recipe: Path, *overrides: str) -> Path:
    series.train(recipe, *overrides)
    name = next((key.removeprefix("run.name=") for key in overrides if key.startswith("run.name=")), "tiny")
    return recipe.parent / "runs" / name


def computed(side: str, request: Request, scratch: Path) -> Mapping[str, np.ndarray]:
    """Compute the outputs of transformers in the process of `megarl diagnose`, and the others in forks, which have the
    imports."""
    if side == "engine":
        with ProcessPoolExecutor(1, mp_context=engine_context()) as pool:
            return pool.submit(compute, side, request, scratch).result(timeout=RUN_S)
    if side == "trainer":
        return run_ranks(1, lambda *_: compute(side, request, scratch))[0]
    return COMPUTE(side, request, scratch)


def test_training_with_images_agrees_with_engines(series, tmp_path: Path, monkeypatch) -> None:
    """The samples of step 3, and the canaries after each refit, have the same log-probs in trainer and engine. For a
    sample without images, all layer outputs also agree, including transformers'."""
    run = train(series, write_recipe(tmp_path), "run.token_samples=24")
    steps = metrics_of(run)
    assert len(steps) == 3
    for step in steps:
        assert step["mismatch/logprob_abs_max"] <= LIMIT
        assert step["reward/num_images"] == pytest.approx(sum(map(len, IMAGES)) / len(IMAGES))
        widths = [SIZES[i][0] for row in IMAGES for i in row]
        assert step["reward/width"] == pytest.approx(sum(widths) / len(IMAGES))
        assert step["mismatch/canary_greedy_abs_mean"] <= LIMIT and step["mismatch/canary_sampled_abs_mean"] <= LIMIT
    before, after = (
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).model.visual.state_dict()
        for folder in (tmp_path / "model", run / "model")
    )
    unchanged = [name for name, value in before.items() if torch.equal(value, after[name])]
    assert not unchanged
    token_ids = diagnosis.find_rollout(run, 3, None).token_ids
    monkeypatch.setattr(diagnosis, "_compute", computed)
    stages = diagnosis.diagnose(
        diagnosis.read_run_config(run), token_ids, dict.fromkeys(SIDES, run / "model"), tmp_path
    )
    assert len(stages) == 7 and first_different(stages) is None, table(stages)
    lines = [json.loads(line) for line in (run / "rollouts" / "step_000003.jsonl").read_text().splitlines()]
    assert len(lines) == 4 * len(IMAGES)
    for line in lines:  # each sample is scored with the images of its row
        images = IMAGES[int(line["prompt"].partition("Question ")[2][0])]
        assert line["parts"]["num_images"] == len(images)
        assert line["parts"]["width"] == sum(SIZES[i][0] for i in images)
    shown = [image["thumbnail"] for line in lines for image in line.get("prompt_images", [])]
    assert len(shown) == 4 * sum(map(len, IMAGES)) and all((run / "rollouts" / name).is_file() for name in shown)


ENVIRONMENT = """
import io
import numpy as np
from PIL import Image
from megarl.environments import Environment, Step

def picture(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (40 + 8 * (seed % 5), 64, 3), np.uint8)
    return {"type": "image", "image": Image.fromarray(pixels)}

class Screens(Environment):
    def reset(self, task):
        self.seed = task.seed % 1000
        if self.seed % 2:
            return None
        return [*task.messages, {"role": "user", "content": [{"type": "text", "text": "now "}, picture(self.seed)]}]

    def step(self, turn):
        reward = turn.text.count("e") / 8
        if turn.number == 2:
            return Step(reward=reward, done=True)
        content = [picture(self.seed + turn.number + len(turn.text)), {"type": "text", "text": "and?"}]
        return Step([{"role": "user", "content": content}], reward)
"""


def screens(folder: Path, more: str = "", name: str = "Screens") -> list[str]:
    """Write the environment, followed by more code, and return the keys for the class with this name."""
    (folder / "screens.py").write_text(ENVIRONMENT + more)
    return [
        f"environment={{class: '{folder}/screens.py:{name}', max_turns: 4, turn_tokens: 5, processes: 1}}",
        "rollout={max_new_tokens: 200, context_length: 320}",
        "rewards.functions=[]",
    ]


@pytest.mark.exhaustive
def test_environment_with_images_agrees_with_engines(series, tmp_path: Path) -> None:
    """Rollouts have images in the prompt and in observations, which also have thumbnails."""
    recipe = write_recipe(tmp_path)
    run = train(series, recipe, *screens(tmp_path), "run.steps=2", "checkpoint.every_steps=1")
    steps = metrics_of(run)
    assert len(steps) == 2 and all(step["mismatch/logprob_abs_max"] <= LIMIT for step in steps)
    rows = list(map(json.loads, (run / "rollouts" / "step_000002.jsonl").read_text().splitlines()))
    assert len(rows) == 24 and all(row["failure"] is None for row in rows)
    assert all(1 <= len(row["observation_images"]) <= 2 for row in rows)  # two observations may be equal
    assert any("thumbnail" in image for row in rows for image in row["observation_images"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("keys", [[], ["actor.layout={pp: 2}", "rollout.tp=2"]], ids=["one process", "pp2, engine tp2"])
def test_resumed_run_with_images_is_bitwise_equal(series, tmp_path: Path, keys: list[str]) -> None:
    """Checkpoints contain the tower and its optimizer states. An evaluation set has images of its own."""
    held = f"{{name: held, source: {tmp_path}/data.jsonl, image_column: images, samples_per_prompt: 2, temperature: 1}}"
    recipe = write_recipe(tmp_path)
    overrides = [*keys, "checkpoint.every_steps=1", f"evaluation.sets=[{held}]"]
    whole = train(series, recipe, *overrides, "run.name=whole")
    train(series, recipe, *overrides, "run.steps=1")
    parts = train(series, recipe, *overrides, "resume=auto")
    learned = {name for name in metrics_of(whole)[-1] if name.partition("/")[0] in ("reward", "policy", "evaluation")}
    assert any(name.startswith("evaluation/held/") for name in learned)
    first, second = metrics_of(whole)[-1], metrics_of(parts)[-1]
    assert {name: first[name] for name in learned} == {name: second[name] for name in learned}
    exported = [load_file(run / "model" / "model.safetensors") for run in (whole, parts)]
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items())
