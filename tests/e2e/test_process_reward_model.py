"""A process reward model, trained and exported by one run, rewards the steps of another run's samples."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import fmean

import pytest
from transformers import AutoModelForTokenClassification

from tests.e2e.test_recipes import run_recipe
from tests.e2e.test_reward_model import readable, rows_of, scores_of
from tests.e2e.test_train import metrics_of, train_in
from tests.tiny_model import EOS_ID, tiny_tokenizer

pytestmark = pytest.mark.slow
STEP_END = "a"


def labelled(folder: Path) -> Path:
    """Write responses whose steps are labeled right if they contain a digit."""
    source, rows = random.Random(3), []
    for i in range(512):
        steps = ["".join(source.choice("bcdefgh012345") for _ in range(3)) for _ in range(1 + i % 3)]
        labels = [any(character.isdigit() for character in step) for step in steps]
        rows.append({"prompt": f"{i}?", "steps": steps, "labels": labels})
    path = folder / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.exhaustive
def test_trained_process_reward_model_rewards_steps(series, model, tmp_path):
    trained = run_recipe(
        series,
        "process-reward-model",
        tmp_path,
        model,
        *("run.steps=48", "run.export=true", "batch.prompts_per_step=32", "batch.prompts_per_update=32"),
        *("actor.optimizer.lr=0.01", "actor.tokens_per_microbatch=1024", "actor.layout.pp=2"),
        *(f"data.source={labelled(tmp_path)}", f"data.step_end={STEP_END}"),
    )
    steps = metrics_of(trained)
    assert steps[0]["label/loss"] == pytest.approx(0.693, abs=1e-3)  # ln 2, because the head starts at zero
    assert fmean(step["label/accuracy"] for step in steps[-8:]) > 0.9
    run = train_in(
        series,
        tmp_path,
        model,
        *(
            "run.steps=1",
            "rewards.functions=[]",
            "algorithm.advantage.credit=reward_to_go",
            "batch.samples_per_prompt=32",
        ),
        f"reward_model={{path: {trained / 'model'}, step_end: {STEP_END}, tokens_per_microbatch: 1024}}",
    )
    classifier = AutoModelForTokenClassification.from_pretrained(trained / "model", attn_implementation="eager")
    rows = [row for row in rows_of(run) if readable(row)]
    several = 0
    for row in rows:
        ids = tiny_tokenizer().encode(row["response"]) + [EOS_ID] * (row["finish_reason"] == "stop")
        [marker] = tiny_tokenizer().encode(STEP_END)
        scores = [score for i, score in enumerate(scores_of(classifier, row)) if ids[i] == marker or i == len(ids) - 1]
        several += len(scores) > 1
        assert row["reward"] == pytest.approx(sum(scores), rel=1e-4, abs=1e-4)
    assert len(rows) > 16 and several > 0
