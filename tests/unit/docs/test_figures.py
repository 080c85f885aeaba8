"""The tables of measurements show the recorded results."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from tests.readme import ROOT, text_of
from tools.benchmarks import figures


@pytest.mark.parametrize("page", figures.PAGES)
def test_page_shows_the_recorded_results(page):
    """If this fails, run `python tools/benchmarks/figures.py --write`."""
    assert figures.rendered(page, text_of(page)) == text_of(page)


def test_page_without_markers_is_an_error_that_names_them():
    with pytest.raises(ValueError, match=r"configs/README.md: the page must contain <!-- learning:begin -->"):
        figures.rendered("configs/README.md", "# Recipes\n")


def test_write_updates_the_pages_with_new_results(tmp_path, monkeypatch):
    results = tmp_path / "results"
    shutil.copytree(figures.RESULTS, results)
    for page in figures.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    monkeypatch.setattr(figures, "RESULTS", results)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    run = {"first": 0.125, "last": 0.75, "steps": 20, "steps_to_optimum": None, "control_last": 0.0}
    run["parts"] = {"format": {"first": 0.25, "last": 1.0}, "reward": {"first": 0.0, "last": 1.0, "control_last": 0.5}}
    change(results / "learning.json", runs=figures.result("learning")["runs"] | {"a case": run})
    change(results / "step_equal.json", cpu_percent_elsewhere=12.3)
    change(results / "linear_head.json", ratio_of_seconds=0.123)
    figures.write()
    learning = (tmp_path / "configs" / "README.md").read_text()
    rows = re.search(r"<!-- learning:begin -->\n(.*?)\n<!-- learning:end -->", learning, re.DOTALL).group(1)
    assert rows.splitlines()[-3:] == [
        "| a case | 0.12 | 0.75 | not in 20 | 0.00 |",
        "| a case: format | 0.25 | 1.00 | | |",
        "| a case: reward | 0.00 | 1.00 | | 0.50 |",
    ]
    busy = "by `python tools/benchmarks/training_step.py`, while other processes used 12 % of the machine's CPU time:"
    assert busy in " ".join((tmp_path / "tools" / "benchmarks" / "README.md").read_text().split())
    assert "| 0.12 × the time, " in (tmp_path / "README.md").read_text()


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_samples_to_reach_and_to_stay_within():
    curve = {"samples": [8, 16, 24, 32], "reward": [0.1, 0.9, 0.8, 1.0], "kl": [2.0, 0.01, 0.03, 0.02]}
    assert figures.samples_to_reach(curve, 0.9) == 16
    assert figures.samples_to_reach(curve, 1.1) is None
    assert figures.samples_to_stay_within(curve, "kl", 0.02) == 32
    assert figures.samples_to_stay_within(curve, "kl", 2.0) == 8
    assert figures.samples_to_stay_within(curve, "kl", 0.01) is None
    assert [figures.measured(curve, "kl", samples) for samples in (8, 12)] == ["2.00 ", ""]


def test_recorded_runs_replace_earlier_ones_in_order(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "write", lambda: written.append(json.loads((tmp_path / "learning.json").read_text())))
    (tmp_path / "learning.json").write_text(json.dumps({"runs": {"a": 1, "b": 2, "renamed": 3}}))
    figures.record("learning", {"b": 4, "c": 5}, ["c", "a", "b", "not run yet"])
    [found] = written
    assert list(found["runs"].items()) == [("c", 5), ("a", 1), ("b", 4)]
    assert found["date"] and found["machine"]["cores"]
