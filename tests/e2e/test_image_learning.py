"""Flow-GRPO and other objectives teach a tiny image model to draw the right digits, by the training reward and by an
OCR model.

Evaluations sample with the ODE, from the same noise before and after training."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.run import MEGARL
from tests.paths import CONFIGS, OCR, ROOT
from tests.tiny_flow import tiny_flow_model
from tools.benchmarks import figures

pytestmark = [pytest.mark.slow, pytest.mark.learn, pytest.mark.timeout(3600)]
LEARNING_S, SEEDS = 3000, range(3)
CASES = {
    "window": (),
    "window, KL": ("algorithm.kl.coefficient=0.02",),
    "all steps": ("rollout.denoising.sde_steps=null",),
    "permuted rewards": ("rewards.functions=[{function: permuted.py:permuted_digits}]",),
}
OBJECTIVES = {
    "diffusion_nft": ("algorithm.objective={name: diffusion_nft}", "rollout.denoising.sde_steps=null"),
    "grpo_guard": (
        # The published clip of 2e-6 times √(65,536 / 384), the numbers of elements there and here.
        "algorithm.objective={name: grpo_guard, clip_low: 3.0e-5, clip_high: 3.0e-5, step_weight: inverse_interval}",
    ),
    "flow_dppo": ("algorithm.objective={name: flow_dppo}",),
}
"""Objective -> keys with its published settings."""
PERMUTED = """
import random
from megarl.rewards.digits import rendered_digits

def permuted_digits(prompts: list, responses: list, answers: list) -> list:
    rewards = [rendered_digits(*row) for row in zip(prompts, responses, answers)]
    for prompt in set(prompts):
        group = [number for number, other in enumerate(prompts) if other == prompt]
        shuffled = random.Random(repr(rewards)).sample([rewards[number] for number in group], len(group))
        for number, reward in zip(group, shuffled):
            rewards[number] = reward
    return rewards
"""


class Judged(NamedTuple):
    """Mean rewards before and after a run: from the rule that is the training reward, and from the OCR model."""

    rule: tuple[float, float]
    ocr: tuple[float, float]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[int, Judged]]]:
    """Case -> seed -> result. With --record, complete cases are written to image_learning.json and the documentation's
    tables."""
    rows: dict[str, dict[int, Judged]] = {name: {} for name in (*CASES, *OBJECTIVES)}
    yield rows
    if request.config.getoption("--record"):
        complete = {name: seeds for name, seeds in rows.items() if len(seeds) == (len(SEEDS) if name in CASES else 1)}
        runs = {name: [judged._asdict() for _, judged in sorted(seeds.items())] for name, seeds in complete.items()}
        figures.record("image_learning", runs, rows)


def trained(folder: Path, seed: int, *overrides: str) -> Judged:
    """Run the recipe in a folder and evaluate it before and after."""
    (folder / "tiny-flow").symlink_to(tiny_flow_model())
    (folder / "permuted.py").write_text(PERMUTED)
    judges = {"rule": "rendered_digits", "ocr": "ocr_exact, options: {characters: '0123456789'}"}
    sets = [
        f"{{name: {name}, source: ./tiny-flow/captions.jsonl, size: 100, functions: [{{function: {judge}}}]}}"
        for name, judge in judges.items()
    ]
    keys = [f"run.seed={seed}", f"evaluation.sets=[{', '.join(sets)}]", *overrides]
    command = [*MEGARL, "train", str(CONFIGS / "tiny-flow-cpu-flow-grpo.yaml"), *keys]
    paths = os.pathsep.join((str(ROOT), str(OCR)))
    subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, check=True, timeout=LEARNING_S)
    lines = [json.loads(line) for line in (folder / "runs" / "flow-grpo" / "metrics.jsonl").read_text().splitlines()]
    found = [[line[f"evaluation/{name}/avg@1"] for name in judges] for line in (lines[0], lines[-1])]
    judged = Judged(*zip(*found, strict=True))
    print(seed, overrides, judged)
    return judged


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_images_improve(tmp_path, table, case, seed):
    judged = trained(tmp_path, seed, *CASES[case])
    gains = judged.rule[1] - judged.rule[0], judged.ocr[1] - judged.ocr[0]
    if case == "permuted rewards":
        assert max(gains) < 0.08
    else:
        assert min(gains) > 0.12
    table[case][seed] = judged


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_improves_images(tmp_path, table, name):
    judged = trained(tmp_path, 0, *OBJECTIVES[name])
    assert min(judged.rule[1] - judged.rule[0], judged.ocr[1] - judged.ocr[0]) > 0.12
    table[name][0] = judged
