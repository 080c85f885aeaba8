"""The sample ledger survives kills during a write, and runs on offline data have one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megarl.config.load import dump, load
from megarl.core.errors import UserError
from megarl.core.sample import SampleRef
from megarl.data.cursor import PromptCursor
from megarl.run.audit.audit import audit
from megarl.run.audit.chain import Chain
from megarl.run.sample_ledger import SampleLedger
from megarl.step.record import offline_record
from megarl.step.state import RunState
from tests.paths import BASE
from tests.unit.step.test_queue import config_of


def lines_of(path: Path) -> list[dict]:
    return list(Chain(path).lines())


@pytest.mark.parametrize("num_bytes", [1, 60, 2**17])
def test_partial_last_line_is_removed(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "samples.jsonl"
    ledger = SampleLedger(path)
    ledger.refit(0, {"name": "x" * 2**17})
    ledger.refit(0, {"version": 0})
    whole = path.read_bytes()
    ledger.refit(0, {"name": "x" * 2**18})
    path.write_bytes(path.read_bytes()[: len(whole) + num_bytes])
    assert len(lines_of(path)) == 2
    SampleLedger(path)._append("back", 0, {})
    assert path.read_bytes().startswith(whole)
    assert [(line["kind"], line["timeline"]) for line in lines_of(path)] == [("refit", -1), ("refit", -1), ("back", 0)]
    SampleLedger(path)._append("back", 0, {})
    assert lines_of(path)[-1]["timeline"] == 1


def test_ledger_with_only_a_partial_line_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"kind": "ru')
    SampleLedger(path).refit(0, {})
    assert [line["kind"] for line in lines_of(path)] == ["refit"]


@pytest.mark.parametrize("line", ["", "{}", '{"timeline": 0, "hash": "0"}', "a" * 99])
def test_damaged_last_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(UserError, match=f"{path}: the last line is damaged. Fix: move or delete the file"):
        SampleLedger(path)


def test_run_from_another_checkpoint_begins_a_new_history(tmp_path: Path) -> None:
    """A folder without a finished step is used again for another run."""
    config, ledger = config_of(1), SampleLedger(tmp_path / "samples.jsonl")
    for step in (0, 7):
        state = RunState(step, PromptCursor(5, 0, config.data.shuffle))
        state.draw(3 * step, step)
        ledger.begin(config, state, 1, "hash", None, continues=False)
    is_proven, lines = audit(tmp_path)
    assert is_proven and "steps        0 (8 to 7, not finished). Restarts: 1, undone steps: 0" in lines
    assert any("0 draws from 5 rows" in line and "; 21 pending" in line for line in lines)
    assert lines[-1] == "not proven   steps 1 to 7, recorded by another run or before megarl had a ledger"


def test_offline_run_trains_on_each_row_once(tmp_path: Path) -> None:
    objective = "algorithm.objective={name: sft, aggregation: token_mean}"
    config = load(BASE, ["model.path=m", "data.format=messages", "data.source=x.jsonl", objective])
    size = config.batch.prompts_per_step
    state, ledger = (
        RunState(0, PromptCursor(2 * size, 0, config.data.shuffle)),
        SampleLedger(tmp_path / "samples.jsonl"),
    )
    (tmp_path / "config.resolved.yaml").write_text(dump(config))
    ledger.begin(config, state, 1, "hash", None, continues=False)
    for state.step in (1, 2, 3):
        items = state.draw(size, 0)
        state.under_way.clear()
        groups = [[SampleRef(f"row {item.row}", str(item.row), 5, 3, 3, "stop", 0, 0)] for item in items]
        ledger.step(state.step, offline_record(items, groups))
    ledger.end(3)
    is_proven, lines = audit(tmp_path)
    assert is_proven, lines
    assert f"{3 * size} trained on, each in one step" in lines[2] and f"{9 * size:,} trained tokens" in lines[3]
    path = tmp_path / "samples.jsonl"
    assert json.loads(path.read_text().splitlines()[-2])["trained"]["row"] == [item.row for item in items]


def test_interrupted_write_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may arrive before or after a line is flushed. The run may record a checkpoint afterwards."""
    path = tmp_path / "samples.jsonl"
    ledger = SampleLedger(path)
    ledger.refit(0, {})

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ledger._append("back", 0, {})
    assert [(line["kind"], line["timeline"]) for line in lines_of(path)] == [("refit", -1), ("back", 0)]
    ledger.end(0)
    assert [(line["kind"], line["timeline"]) for line in lines_of(path)] == [("refit", -1), ("end", -1)]
