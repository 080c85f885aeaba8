"""A run whose rollouts in environments are aborted because they are stale."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.run import Run, write_recipe
from tests.timing import RUN_S

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
STEPS, PER_STEP, SAMPLES = 6, 4, 4
WORLD = '''
import time
from megarl.environments import Environment, Step


class World(Environment):
    """Lasts three turns, which take longer for some prompts."""

    def reset(self, task):
        self._wait_s = 0.4 if int(task.id.rsplit(":")[-1]) % 3 == 0 else 0.0

    def step(self, turn):
        time.sleep(self._wait_s)
        return Step("more", len(set(turn.token_ids)) / 8, done=turn.number == 2)
'''


def train(folder: Path, *overrides: str) -> Run:
    """Train with fake engines until the last step, and check that each prompt was trained on once."""
    recipe = write_recipe(folder)
    lines = [json.dumps({"prompt": f"{i} + {i} =", "answer": str(2 * i)}) for i in range(200)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    (folder / "world.py").write_text(WORLD)
    environment = f"environment={{class: '{folder / 'world.py'}:World', processes: 1}}"
    keys = (f"run.steps={STEPS}", "actor.layout.pp=1", "rewards.functions=[]", environment)
    room = ("rollout.max_new_tokens=40", "actor.tokens_per_microbatch=512", "environment.turn_tokens=8")
    with Run(recipe, folder, *keys, *room, *overrides) as run:
        assert run.end(RUN_S) == 0, run.errors
    files = sorted((run.folder / "rollouts").iterdir())
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert [len({row["prompt_id"] for row in step}) for step in rows] == [PER_STEP] * STEPS
    trained = Counter(row["prompt_id"] for step in rows for row in step)
    assert set(trained.values()) == {SAMPLES} and len(trained) == STEPS * PER_STEP
    assert all(row["failure"] is None and row["reward"] is not None for step in rows for row in step)
    return run


def test_stale_rollouts_are_dropped_and_counted(tmp_path: Path) -> None:
    run = train(tmp_path, "rollout.on_stale=drop", "batch.oversampling=2")
    aborted = sum(line["rollout/aborted_samples"] for line in run.metrics)
    assert aborted and aborted % SAMPLES == 0
    assert sum(line["rollout/dropped_samples"] for line in run.metrics) >= aborted
    assert sum(line["rollout/aborted_tokens"] for line in run.metrics) > 0
    assert max(line["weights/staleness_max"] for line in run.metrics) == 0
