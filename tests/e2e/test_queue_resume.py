"""Runs that start more prompts than a step trains on are killed and resumed, and train on each prompt exactly once."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from megarl.core.checkpoint import Checkpoint
from megarl.rewards.sample_file import load_samples
from megarl.step.queue import WAITING
from tests.e2e.run import Run, write_recipe
from tests.e2e.test_resume import kill, latest
from tests.timing import START_S

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
STEPS, PER_STEP, SAMPLES = 12, 4, 4
MAX_STALENESS = 2


def rows_of(folder: Path) -> dict[int, list[dict]]:
    files = sorted((folder / "tiny" / "rollouts").iterdir())
    return {int(f.stem.removeprefix("step_")): [json.loads(line) for line in f.read_text().splitlines()] for f in files}


@pytest.mark.parametrize(
    "keys",
    [
        (f"rollout.max_staleness={MAX_STALENESS}", "cluster.placement=disaggregated"),
        ("rollout.on_stale=drop", "batch.oversampling=2"),
    ],
    ids=["ahead", "oversampled"],
)
def test_each_prompt_is_trained_on_exactly_once(tmp_path: Path, keys: tuple[str, ...]) -> None:
    recipe, runs_ahead = write_recipe(tmp_path), "rollout.on_stale=drop" not in keys
    lines = [json.dumps({"prompt": f"{i} + {i} =", "answer": str(2 * i)}) for i in range(200)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    overrides = (*keys, "data.shuffle=false", "checkpoint.every_steps=1", "resume=auto", "rollout.max_new_tokens=40")
    waited: dict[str, str] = {}
    for reached in (2, 5):
        with Run(recipe, tmp_path, *overrides) as run:
            run.wait_until(lambda reached=reached: latest(tmp_path) >= reached)
            time.sleep(random.uniform(0, 2))
            kill(run)
        checkpoint = Checkpoint.open(tmp_path / "tiny" / "checkpoints" / f"step_{latest(tmp_path):06d}")
        if (checkpoint.path / WAITING).exists():
            groups = load_samples(checkpoint.path / WAITING)
            waited |= {sample.id: sample.text for _, _, samples in groups for sample in samples}
    with Run(recipe, tmp_path, *overrides, f"run.steps={STEPS + latest(tmp_path)}") as run:
        assert run.end(START_S) == 0, run.errors
    steps = rows_of(tmp_path)
    trained = Counter(row["prompt_id"] for rows in steps.values() for row in rows)
    assert set(trained.values()) == {SAMPLES} and len(trained) == len(steps) * PER_STEP
    responses = {row["sample_id"]: row["response"] for rows in steps.values() for row in rows}
    metrics = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    oldest = max(line["weights/staleness_max"] for line in metrics)
    if runs_ahead:
        assert set(trained) == {f"prompts.jsonl:{i + 1}" for i in range(len(trained))}, (
            "prompts were trained on out of order"
        )
        assert oldest <= MAX_STALENESS and waited
        assert {name: responses.get(name) for name in waited} == waited, "finished samples were sampled again"
    else:
        assert oldest == 0 and not waited
        assert max(line["rollout/dropped_samples"] for line in metrics) > 0
        assert all(line["rollout/dropped_tokens"] >= line["rollout/aborted_tokens"] for line in metrics)
