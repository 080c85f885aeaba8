"""Tests of the report's section on the time ledger."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megarl import report
from megarl.report.time_section import BINS, GROUPS, HEIGHT, bins, render_time
from megarl.run.time_causes import CAUSES
from megarl.run.time_ledger import Interval, TimeLedger

LEDGER = TimeLedger(
    [
        Interval(0.0, 30.0, {"queue": 60.0}),
        Interval(30.0, 50.0, {"startup/ray": 40.0}),
        Interval(100.0, 170.0, {"train": 100.0, "spare": 40.0}),
    ],
    num_steps=5,
    num_devices=2,
    predicted={"train": 9.5},
)


def test_every_cause_has_a_color() -> None:
    causes = [cause for _, group in GROUPS.values() for cause in group]
    assert sorted(causes) == sorted(CAUSES)


@pytest.mark.parametrize("count", [1, 7, BINS])
def test_bins_add_up_to_the_ledger(count: int) -> None:
    found = bins(LEDGER, count)
    assert len(found) == count
    for cause, seconds in LEDGER.seconds.items():
        assert sum(bin.get(cause, 0.0) for bin in found) == pytest.approx(seconds)
    assert all(sum(bin.values()) == pytest.approx(2 * 120 / count) for bin in found)


def test_bars_fill_the_height_in_the_order_of_time() -> None:
    html = render_time(LEDGER)
    bars: dict[str, list[tuple[str, float]]] = {}
    pattern = r'<rect x="([\d.]+)" y="([\d.]+)" .*?height="([\d.]+)" fill="var\((.*?)\)"'
    for x, y, height, color in re.findall(pattern, html):
        below = sum(part for _, part in bars.setdefault(x, []))
        assert float(y) == pytest.approx(HEIGHT - below - float(height), abs=0.1)
        bars[x].append((color, float(height)))
    assert len(bars) == BINS
    assert all(sum(height for _, height in bar) == pytest.approx(HEIGHT, abs=0.1) for bar in bars.values())
    first, *_, last = bars.values()
    assert first == [("--series-5", HEIGHT)]
    assert [color for color, _ in last] == ["--series-1", "--series-5"]
    assert ">0.0333 h</text>" in html


def test_table_has_shares_and_the_prediction() -> None:
    rows = re.findall(r"<tr>(<td>.*?)</tr>", render_time(LEDGER))
    cells = {(row := re.sub(r"<[^>]*>", "|", line)).split("|")[3]: row for line in rows}
    assert list(cells) == ["train", "startup", "queue", "spare"]
    assert cells["train"].endswith("|0.03||41.7 %||10.00||9.50|")
    assert "start-up: ray 16.7 %" in cells["startup"]


def test_run_without_records_has_no_section(tmp_path: Path) -> None:
    assert render_time(TimeLedger()) == ""
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "goodput/train": 0.5, "own/x": 1.0}) + "\n")
    text = report.write(tmp_path).read_text(encoding="utf-8")
    assert '<section id="time"></section>' in text
    assert '"own/x"' in text and '"title":"goodput/train"' not in text
