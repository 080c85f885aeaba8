from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megarl.report.evaluations import MAX_SAMPLES, MAX_STEPS, evaluation_charts, read_evaluations
from megarl.report.history import read_history
from tests.unit.report.test_report import ATTACK, charts_in, make_run, sample, write


def evaluated(step: int) -> dict:
    values = {"avg@4": 0.1 * step, "pass@1": 0.1 * step, "pass@4": 0.2, "pass^4": 0.0}
    ends = {
        f"{name}_{end}": value + off for name, value in values.items() for end, off in (("low", -0.1), ("high", 0.1))
    }
    named = {f"evaluation/a/{name}": value for name, value in (values | ends).items()}
    return {"step": step, **named, "evaluation/a/failed_frac": 0.0, "evaluation/version": step, "time/evaluation": 2.0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four steps with evaluations before the first step and after steps 2 and 4."""
    folder = make_run(tmp_path, 4, target=4)
    lines = {line["step"]: line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    for step in (0, 2, 4):
        lines[step] = lines.get(step, {}) | evaluated(step)
        file = folder / "evaluations" / "a" / f"step_{step:06d}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [sample(reward=0.5, response=f"after {step}"), sample(reward=None, failure="f hung", response=ATTACK)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(lines[step]) + "\n" for step in sorted(lines)))
    return folder


def test_curves_cover_the_evaluated_steps_with_intervals(run: Path) -> None:
    history = read_history(run / "metrics.jsonl")
    charts = {chart.title: chart for chart in evaluation_charts(history)}
    assert list(charts) == [f"Evaluation: a, {name}" for name in ("avg@4", "pass@4", "pass^4")]
    chart = charts["Evaluation: a, avg@4"]
    assert history.steps[np.isfinite(history["evaluation/a/avg@4"])].tolist() == [0, 2, 4]
    assert history.finite("evaluation/a/avg@4") == pytest.approx([0.0, 0.2, 0.4])
    low, high = map(history.finite, chart.band)
    assert np.allclose(low, [-0.1, 0.1, 0.3]) and np.allclose(high, [0.1, 0.3, 0.5])


def test_page_has_curves_and_samples_with_escaped_markup(run: Path) -> None:
    text = write(run)
    titles = [chart["title"] for chart in charts_in(text)]
    assert "Evaluation: a, pass^4" in titles and "evaluation/version" not in titles
    assert "evaluation/a/avg@4_low" not in titles
    section = re.search(r'<section id="evaluations">.*?</section>', text, re.DOTALL).group()
    assert section.index("before step 1") < section.index("after step 2") < section.index("after step 4")
    assert section.count("<article") == 6 and section.count("no score") == 3
    assert section.index("f hung") < section.index("after 0"), "failed samples come first"
    assert "<script" not in section and "<img" not in section and "&lt;/script&gt;" in section


def test_run_without_evaluations_has_no_section(tmp_path: Path) -> None:
    text = write(make_run(tmp_path, 3))
    assert '<div id="evaluation-samples"></div>' in text
    assert {chart["place"] for chart in charts_in(text)} == {"charts", "other-charts"}


def test_steps_and_samples_are_subsampled_evenly(tmp_path: Path) -> None:
    files = {step: tmp_path / f"{step}.jsonl" for step in range(0, 101, 5)}
    for file in files.values():
        file.write_text("".join(json.dumps(sample(reward=i)) + "\n" for i in range(200)))
    [selected] = read_evaluations({"a": files})
    assert list(selected.steps) == [0, 40, 80, 100] and len(selected.steps) <= MAX_STEPS
    assert [len(samples) for samples in selected.steps.values()] == [MAX_SAMPLES] * 4
    assert [selected.steps[0][i]["reward"] for i in (0, -1)] == [0, 199]


def test_multi_turn_rollouts_have_one_block_per_message(run: Path) -> None:
    messages = [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": f"{ATTACK} let me see", "tool_calls": [{"name": "add<b>"}]},
        {"role": "tool", "content": None},
        {"role": "assistant", "content": "5" * 5000},
    ]
    rows = [sample(reward=0.5, response="55", messages=messages, stop_reason="max_turns")]
    file = run / "evaluations" / "a" / "step_000004.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = re.search(r'<section id="evaluations">.*?</section>', write(run), re.DOTALL).group()
    article = section[section.rindex("<article") :]
    assert re.findall(r'class="block role-(\w+)"', article) == ["user", "assistant", "tool", "assistant"]
    assert "let me see" in article and "What is 2 + 3?" in article and "max_turns" in article
    assert "characters omitted" in article and "5" * 2000 not in article
    assert "<script" not in section and "add<b>" not in section and "add&lt;b&gt;" in article
