"""Tests of the Chrome trace export: spans in one lane are nested or disjoint."""

from __future__ import annotations

import gzip
import json
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.cluster import trace
from megarl.cluster.groups.group import TimedResult
from megarl.cluster.trace import Span, Trace
from megarl.core.errors import UserError
from megarl.report import chrome_trace


def read(file: Path) -> list[dict]:
    return json.loads(file.read_text())["traceEvents"]


def test_trace_has_one_time_axis_and_one_row_per_process(tmp_path: Path) -> None:
    for number, begin in ((1, 100.0), (2, 200.0)):
        logs = tmp_path / "logs" / f"attempt_{number}"
        logs.mkdir(parents=True)
        written = Trace(logs)
        written._write(
            [Span("trainer-10", "update", begin + 1, begin + 2), Span("trainer-9", "update", begin, begin + 2)]
        )
        written.record("rollout", begin, begin + 1.5)
        written.record("step 1", begin, begin + 3)
    with (tmp_path / "logs/attempt_2/trace.jsonl").open("a") as file:
        file.write('{"process": "torn')
    events = read(chrome_trace.write(tmp_path, tmp_path / "out.json"))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == ["driver", "trainer-9", "trainer-10"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [(names[e["pid"]], e["name"], e["ts"], e["dur"]) for e in slices if e["ts"] < 5e6] == [
        ("driver", "step 1", 0.0, 3e6),
        ("driver", "rollout", 0.0, 1.5e6),
        ("trainer-9", "update", 0.0, 2e6),
        ("trainer-10", "update", 1e6, 1e6),
    ]
    assert {e["ts"] for e in events if e["ph"] == "i"} == {0.0, 100e6} and len(slices) == 8
    assert all(e["cat"] == ("step" if e["name"] == "step 1" else "task") for e in slices)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=12))
def test_spans_of_a_lane_are_nested_or_disjoint(times: list[tuple[int, int]]) -> None:
    spans = [Span("p", str(i), begin, begin + length) for i, (begin, length) in enumerate(times)]
    lanes = chrome_trace.lanes(spans)
    assert sorted(span.task for lane in lanes for span in lane) == sorted(span.task for span in spans)
    for lane in lanes:
        for a, b in combinations(lane, 2):
            assert a.end <= b.begin or b.end <= a.begin or (a.begin <= b.begin and b.end <= a.end)


def test_trace_requires_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"logs/attempt_1/trace.jsonl contains no tasks. Fix: pass a run folder"):
        chrome_trace.write(tmp_path)


class Answers(NamedTuple):
    values: dict[str, TimedResult]


def test_trace_of_many_ranks_and_steps_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace keeps 32 of 1,024 ranks and the latest of 300 steps. The returned times cover all ranks."""
    monkeypatch.setattr(trace, "WINDOW_BYTES", 200_000)
    logs = tmp_path / "logs" / "attempt_1"
    logs.mkdir(parents=True)
    written = Trace(logs)
    for step in range(300):
        answers = {f"trainer-{rank}": TimedResult(rank, step, step + 0.5) for rank in range(1024)}
        assert written.add("update", Answers(answers)) == {f"trainer-{rank}": rank for rank in range(1024)}
    assert written.take_seconds("trainer-1022") == 150
    assert {path.name for path in logs.iterdir()} == {"trace.jsonl", "trace.earlier.jsonl.gz"}
    assert (logs / "trace.jsonl").stat().st_size < 200_000
    spans = list(trace.read_spans(logs))
    begins = sorted({span.begin for span in spans})
    assert begins == list(range(int(begins[0]), 300)) and 60 < len(begins) < 200, "the latest steps, without a gap"
    ranks = {span.process for span in spans}
    assert len(ranks) == 32 and {"trainer-0", "trainer-1023"} <= ranks
    events = read(chrome_trace.write(tmp_path))
    assert sum(event["ph"] == "X" for event in events) == len(spans)


@pytest.mark.parametrize(
    "line", ["[" * 100_000, "3", "{}", '{"process": 1, "task": "a", "begin": 0, "end": 1}', "\udcff"]
)
def test_foreign_lines_are_skipped(tmp_path: Path, line: str) -> None:
    logs = tmp_path / "logs" / "attempt_1"
    logs.mkdir(parents=True)
    (logs / "trace.jsonl").write_text(f"{line}\n", errors="surrogateescape")
    Trace(logs).record("rollout", 1.0, 2.0)
    assert [span.task for span in trace.read_spans(logs)] == ["rollout"]


GOOD = '{"process": "driver", "task": "t", "begin": 1, "end": 2}\n'


@pytest.mark.parametrize(
    "line",
    [
        '{"process": "d", "task": "t", "begin": 1' + "0" * 400 + ', "end": 2}',
        '{"process": "d", "task": "t", "begin": NaN, "end": 2}',
        '{"process": "d", "task": "t", "begin": 1, "end": Infinity}',
        '{"process": "²", "task": "t", "begin": 1, "end": 2}',
        '{"process": "rank ' + "1" * 5000 + '", "task": "t", "begin": 1, "end": 2}',
        " " * 10**6,
    ],
    ids=range(6),
)
def test_odd_spans_do_not_raise(tmp_path: Path, line: str) -> None:
    logs = tmp_path / "logs/attempt_1"
    logs.mkdir(parents=True)
    (logs / "trace.jsonl").write_text(f"{line}\n{GOOD}")
    assert "NaN" not in chrome_trace.write(tmp_path).read_text()


@pytest.mark.parametrize(
    "damage", [lambda data: b"text", lambda data: data[:40], lambda data: data[:20] + b"\xff" * 50], ids=range(3)
)
def test_a_damaged_earlier_window_is_named(tmp_path: Path, damage) -> None:
    logs = tmp_path / "logs/attempt_1"
    logs.mkdir(parents=True)
    (logs / trace.EARLIER).write_bytes(damage(gzip.compress(GOOD.encode() * 1000)))
    (logs / "trace.jsonl").write_text(GOOD)
    with pytest.raises(UserError, match=rf"{trace.EARLIER}: not a complete gzip file"):
        chrome_trace.write(tmp_path)


def test_a_compressed_file_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file can expand to terabytes."""
    monkeypatch.setattr(trace, "WINDOW_BYTES", 10 * len(GOOD))
    (tmp_path / trace.EARLIER).write_bytes(gzip.compress(GOOD.encode() * 10_000))
    assert 10 <= len(list(trace.read_spans(tmp_path))) <= 20


@pytest.mark.parametrize("name", ["trace.json", ".trace.json"])
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    logs, victim = tmp_path / "run/logs/attempt_1", tmp_path / "victim"
    logs.mkdir(parents=True)
    (logs / "trace.jsonl").write_text(GOOD)
    victim.write_text("mine")
    (tmp_path / "run" / name).symlink_to(victim)
    chrome_trace.write(tmp_path / "run")
    assert victim.read_text() == "mine"
