"""The trace of a run, as Perfetto shows it: slices of one line are nested or apart."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.cluster.trace import Span, Trace
from megarl.report import chrome_trace


def read(file: Path) -> list[dict]:
    return json.loads(file.read_text())["traceEvents"]


def test_all_attempts_are_on_one_time_axis_with_a_line_for_each_process(tmp_path: Path) -> None:
    for number, begin in ((1, 100.0), (2, 200.0)):
        logs = tmp_path / "logs" / f"attempt_{number}"
        logs.mkdir(parents=True)
        trace = Trace(logs)
        trace._write(
            [Span("trainer-10", "update", begin + 1, begin + 2), Span("trainer-9", "update", begin, begin + 2)]
        )
        trace.record("rollout", begin, begin + 1.5)
        trace.record("step 1", begin, begin + 3)
    with (tmp_path / "logs/attempt_2/trace.jsonl").open("a") as file:
        file.write('{"process": "torn')
    found = read(chrome_trace.write(tmp_path, tmp_path / "out.json"))
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert list(names.values()) == ["driver", "trainer-9", "trainer-10"]
    slices = [event for event in found if event["ph"] == "X"]
    assert [(names[e["pid"]], e["name"], e["ts"], e["dur"]) for e in slices if e["ts"] < 5e6] == [
        ("driver", "step 1", 0.0, 3e6),
        ("driver", "rollout", 0.0, 1.5e6),
        ("trainer-9", "update", 0.0, 2e6),
        ("trainer-10", "update", 1e6, 1e6),
    ]
    assert {e["ts"] for e in found if e["ph"] == "i"} == {0.0, 100e6} and len(slices) == 8
    assert all(e["cat"] == ("step" if e["name"] == "step 1" else "task") for e in slices)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=12))
def test_slices_of_a_line_are_nested_or_apart(times: list[tuple[int, int]]) -> None:
    spans = [Span("p", str(i), begin, begin + length) for i, (begin, length) in enumerate(times)]
    lanes = chrome_trace.lanes(spans)
    assert sorted(span.task for lane in lanes for span in lane) == sorted(span.task for span in spans)
    for lane in lanes:
        for a, b in combinations(lane, 2):
            assert a.end <= b.begin or b.end <= a.begin or (a.begin <= b.begin and b.end <= a.end)


def test_a_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no logs/attempt_1/trace.jsonl with a task in it; give the folder of a run"):
        chrome_trace.write(tmp_path)
