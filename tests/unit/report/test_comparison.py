"""Tests of the comparison page. tests/browser checks how a browser renders it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.report import comparison
from tests.unit.report.test_report import charts_in


def make_run(folder: Path, name: str, **config: float | None) -> Path:
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"name": name}))
    (folder / "config.resolved.yaml").write_text(json.dumps({"run": {"name": name, "steps": 2}, "actor": config}))
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "own/x": 1.0}\n')
    return folder


def test_differing_keys_are_listed_with_dashes_for_missing_ones(tmp_path: Path) -> None:
    first = make_run(tmp_path / "1", "a", lr=1e-6, beta=0.9)
    text = comparison.write([first, make_run(tmp_path / "2", "b", lr=1e-6, gamma=None)]).read_text()
    table = text.split('id="differences"')[1].split("</table>")[0]
    assert "actor.beta</th><td class=number>0.9</td><td class=number>–</td>" in table
    assert (
        "actor.gamma</th><td class=number>–</td><td class=number>null</td>" in table
        and "lr" not in table
        and "run.name" not in table
    )
    assert "2 keys differ." in text
    charts = {chart["title"]: chart for chart in charts_in(text)}
    assert list(charts) == ["Reward", "own/x"] and [line["run"] for line in charts["own/x"]["lines"]] == [0, 1]


def test_runs_with_equal_names_are_labeled_by_folder(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / number, "<a>") for number in ("1", "2")]
    text = comparison.write(runs).read_text()
    assert "<th>1</th><th>2</th>" in text
    assert "No keys differ." in text and "<a>" not in text


def test_more_runs_than_colors_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"6 runs: a chart can show at most 5\. Fix: pass at most 5 runs"):
        comparison.write([tmp_path] * 6)
