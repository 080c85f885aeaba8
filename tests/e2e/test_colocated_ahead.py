"""A complete colocated run whose rollouts run ahead of training."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from tests.e2e.run import read_trace
from tests.e2e.test_train import OFFLOAD, evaluation_rows, lines_of, metrics_of, train_in

pytestmark = pytest.mark.slow
STEPS, PROMPTS, SAMPLES = 12, 8, 8
KEYS = (
    "rollout={max_staleness: 1, kv_cache_on_update: recompute, sleep: true}",
    "rollout.vllm_overrides={max_num_seqs: 16}",  # leaves rollouts unfinished when a step has enough samples
    "evaluation={every_steps: 6, sets: [{name: greedy, size: 6}]}",
    "checkpoint.every_steps=6",
    f"run.steps={STEPS}",
    OFFLOAD,
)


@pytest.fixture(scope="module")
def run(series, model, tmp_path_factory) -> Path:
    return train_in(series, tmp_path_factory.mktemp("turns"), model, *KEYS)


def test_each_prompt_is_trained_on_once(run):
    steps = metrics_of(run)
    files = [run / f"rollouts/step_{number:06d}.jsonl" for number in range(1, STEPS + 1)]
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert [len(step_rows) for step_rows in rows] == STEPS * [PROMPTS * SAMPLES]
    assert len({row["prompt_id"] for step_rows in rows for row in step_rows}) == STEPS * PROMPTS
    for number, (step, step_rows) in enumerate(zip(steps, rows, strict=True), start=1):
        ages = [number - 1 - run["version"] for row in step_rows for run in row["version"]]
        assert step["weights/version"] == number and step["weights/staleness_max"] == max(ages) <= 1
        oldest = [number - 1 - min(run["version"] for run in row["version"]) for row in step_rows]
        assert ("mismatch/logprob_abs_mean" in step) == (min(oldest) == 0)
        assert ("policy_lag/logprob_abs_mean" in step) == (max(oldest) > 0)
        assert step.get("mismatch/logprob_abs_mean", 0) < 1e-5
        assert step["rollout/groups_ahead"] == (PROMPTS if number < STEPS else 0)
    assert sum(step["weights/mixed_frac"] for step in steps) > 0, "no rollout was unfinished during a refit"
    rewards = [step["reward/mean"] for step in steps]
    assert fmean(rewards[-3:]) >= fmean(rewards[:3]) + 0.3
    saved = [json.loads(file.read_text()) for file in sorted(run.glob("checkpoints/step_*/manifest.json"))]
    assert [len(each["content"]["state"]["run"]["under_way"]) for each in saved] == [PROMPTS, 0]


def test_engines_pause_while_models_train(run):
    """The trainer's passes and updates run between the engine's `pause` and `resume`, and no rollout finishes in
    between.
    """
    spans = read_trace(run / "logs/attempt_1")
    trained = [span for span in spans if span.process == "trainer-0" and span.task in ("keep_log_probs", "update")]
    assert len([span for span in trained if span.task == "update"]) == STEPS
    for span in trained:
        assert not [each for each in spans if each.task == "generate" and span.begin < each.end < span.end]
        paused = max(each.end for each in spans if each.task == "pause" and each.end < span.begin)
        resumed = min(each.begin for each in spans if each.task == "resume" and each.begin > paused)
        assert span.end < resumed
    in_order = sorted((span for span in spans if span.process == "engine-0"), key=lambda span: span.begin)
    turns = [span.task for span in in_order if span.task in ("pause", "resume", "sleep", "refit")]
    evaluation = ["resume", "pause", "sleep"]
    steps = [*(STEPS // 2 * [*evaluation, "refit"]), *evaluation]
    canaries = evaluation
    assert turns[turns.index("resume") :] == [*canaries, *evaluation, *steps, *steps]
    assert min(line["idle/engines"] for line in metrics_of(run)) > 0


def test_evaluations_use_one_weight_version(run):
    evaluated = [line["step"] for line in lines_of(run) if "evaluation/greedy/avg@1" in line]
    assert evaluated == [0, 6, 12]
    for number in evaluated:
        versions = {run["version"] for row in evaluation_rows(run, "greedy", number) for run in row["version"]}
        assert versions == {number}
