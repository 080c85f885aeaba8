"""An audit accepts the files of every run, however often it was killed, and refuses every change to them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megarl.cli import app
from megarl.core.checkpoint import Checkpoint, write_manifest
from megarl.core.errors import UserError
from megarl.run.audit.audit import audit
from megarl.run.audit.chain import START, sealed
from tests.marks import every_third
from tests.unit.run.audit.histories import History
from tests.unit.step.test_queue import STEPS

Line = dict[str, Any]


@pytest.mark.parametrize("seed", every_third(range(50)))
def test_killed_run_is_accepted(seed: int, tmp_path: Path) -> None:
    history = History(tmp_path, seed)
    is_proven, lines = history.audit()
    assert is_proven, lines
    assert f"steps        {STEPS} (1 to {STEPS}, finished)" in lines[1]
    assert f"{3 * STEPS} trained on, each in one step" in lines[2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with failed and dropped groups, which was killed several times."""
    history = History(tmp_path_factory.mktemp("finished"), seed=8)
    assert history.num_kills > 2 and history.config.drops_rollouts and history.config.rollout.max_staleness
    assert history.audit()[0]
    return history.folder.path


@pytest.fixture(scope="module")
def copied(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder, whose ledger the tests replace."""
    folder = tmp_path_factory.mktemp("copied") / "run"
    shutil.copytree(finished, folder)
    return folder


def refusal(folder: Path, ledger: bytes) -> str:
    """Return the contradiction that an audit finds after the ledger is replaced."""
    (folder / "samples.jsonl").write_bytes(ledger)
    is_proven, lines = audit(folder)
    assert not is_proven, lines
    return lines[0]


def ledger_of(folder: Path) -> list[bytes]:
    return (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_change_of_lines_is_refused(finished: Path, copied: Path, data: st.DataObject) -> None:
    lines = ledger_of(finished)
    some_line = st.integers(0, len(lines) - 1)
    i, j = data.draw(some_line), data.draw(some_line)
    match data.draw(st.sampled_from(["remove", "double", "swap", "cut"])):
        case "remove":
            changed = lines[:i] + lines[i + 1 :]
        case "double":
            changed = [*lines[:j], lines[i], *lines[j:]]
        case "swap":
            assume(i != j)
            changed = [*lines]
            changed[i], changed[j] = lines[j], lines[i]
        case _:
            changed = lines[:i]
    refusal(copied, b"".join(changed))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_changed_number_or_byte_is_refused(finished: Path, copied: Path, data: st.DataObject) -> None:
    content = (finished / "samples.jsonl").read_bytes()
    numbers = [match.span() for match in re.finditer(rb"\d+", content)]
    if data.draw(st.booleans()):
        start, stop = data.draw(st.sampled_from(numbers))
        new = str(data.draw(st.integers(0, 99))).encode()
    else:
        start = data.draw(st.integers(0, len(content) - 1))
        stop, new = start + 1, bytes([data.draw(st.integers(0, 255))])
    assume(content[start:stop] != new)
    refusal(copied, content[:start] + new + content[stop:])


def resealed(lines: list[Line]) -> bytes:
    """Return a ledger with correct hashes."""
    previous, ledger = START, b""
    for line in lines:
        previous, sealed_line = sealed(previous, {name: value for name, value in line.items() if name != "hash"})
        ledger += sealed_line
    return ledger


def last(lines: list[Line], kind: str, step: int | None = None) -> Line:
    return next(line for line in reversed(lines) if line["kind"] == kind and step in (None, line["step"]))


def last_steps(lines: list[Line]) -> list[Line]:
    """Return the lines of the steps that count."""
    return [last(lines, "step", number) for number in range(1, STEPS + 1)]


def train_again(lines: list[Line]) -> None:
    *_, before, after = last_steps(lines)
    for name in ("draw", "row"):
        after["trained"][name][0] = before["trained"][name][1]


def take_another_row(lines: list[Line]) -> None:
    last(lines, "step")["trained"]["row"][0] += 1


def lose_a_row(lines: list[Line]) -> None:
    line = next(line for line in lines if line["kind"] == "back" and line["pending"]["draw"])
    for column in line["pending"].values():
        column.pop()


def draw_in_another_order(lines: list[Line]) -> None:
    line = next(line for line in lines if line["kind"] == "step" and len(set(line["drawn"])) > 1)
    line["drawn"].sort(reverse=line["drawn"] == sorted(line["drawn"]))


def exceed_the_bound(lines: list[Line]) -> None:
    bound = lines[0]["max_staleness"]
    last(lines, "step")["trained"]["oldest"][0] = STEPS - 1 - bound - 1


def use_future_weights(lines: list[Line]) -> None:
    last(lines, "step")["trained"]["newest"][0] = STEPS


def raise_the_bound(lines: list[Line]) -> None:
    for line in lines:
        if "max_staleness" in line:
            line["max_staleness"] += 1


def repeat_a_group(lines: list[Line]) -> None:
    *_, before, after = last_steps(lines)
    after["trained"]["group"][0] = before["trained"]["group"][0]


def train_fewer_groups(lines: list[Line]) -> None:
    line = last(lines, "step")
    for table in ("trained", "left_out"):
        line[table] = {name: values[1:] for name, values in line[table].items()}
    line["left_out"] = {}


def leave_out_a_good_group(lines: list[Line]) -> None:
    line = next(line for line in reversed(last_steps(lines)) if "why" in line["left_out"])
    for name, values in line["trained"].items():
        line["left_out"][name].append(values.pop())
    line["left_out"]["why"].append("surplus")


def hide_a_failure(lines: list[Line]) -> None:
    line = next(line for line in lines if line["kind"] == "step" and line["failed"])
    line["failed"] = {}


def skip_a_step(lines: list[Line]) -> None:
    lines.remove(last(lines, "step", STEPS - 1))


def refit_other_weights(lines: list[Line]) -> None:
    last(lines, "step")["weights"]["sample"]["engines"] = "0" * 16


def resume_other_weights(lines: list[Line]) -> None:
    weights = last(lines, "refit")["weights"]["all"]
    weights["trainer"] = weights["engines"] = "0" * 16


def refit_another_version(lines: list[Line]) -> None:
    last(lines, "step")["weights"]["version"] -= 1


def train_without_a_refit(lines: list[Line]) -> None:
    lines.remove(last(lines, "refit"))


def resume_another_checkpoint(lines: list[Line]) -> None:
    last(lines, "back")["checkpoint"] = "0" * 64


def save_another_checkpoint(lines: list[Line]) -> None:
    last(lines, "checkpoint")["checkpoint"] = "0" * 64


def save_no_checkpoint(lines: list[Line]) -> None:
    lines.remove(last(lines, "checkpoint"))


def go_back_too_far(lines: list[Line]) -> None:
    lines.insert(-1, {"kind": "back", "step": STEPS + 1, "timeline": lines[-1]["timeline"] + 1, "cause": ""})


def drop_a_trained_row(lines: list[Line]) -> None:
    *_, before, after = last_steps(lines)
    after["dropped"] = {"draw": [before["trained"]["draw"][0]], "samples": [2], "why": ["stale"]}


def hide_a_dropped_group(lines: list[Line]) -> None:
    line = next(line for line in reversed(last_steps(lines)) if line["dropped"])
    line["dropped"] = {}


def count_more_samples(lines: list[Line]) -> None:
    last(lines, "step")["trained"]["samples"][0] += 1


def forget_the_end(lines: list[Line]) -> None:
    lines.pop()


def change_the_data(lines: list[Line]) -> None:
    last(lines, "back")["data"]["hash"] = "other"


def evaluate_twice(lines: list[Line]) -> None:
    line = last(lines, "evaluation")
    lines.insert(lines.index(line), line)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (train_again, r"expected a pending row as draw \d+, but found row \d, which step 11 \(line \d+\) took"),
        (take_another_row, "expected a pending row as draw"),
        (lose_a_row, r"expected the \d+ pending rows after step \d+, but found \d+, with differences"),
        (draw_in_another_order, r"expected row \d as draw \d+ \(epoch \d+\), but found row"),
        (
            exceed_the_bound,
            r"expected tokens of draw \d+ from versions \d+ to 11 \(rollout.max_staleness=\d\), but found",
        ),
        (use_future_weights, r"expected tokens of draw \d+ from versions \d+ to 11 .*, but found versions \d+ to 12"),
        (raise_the_bound, r"config.resolved.yaml: expected rollout.max_staleness=\d, as recorded for attempt"),
        (repeat_a_group, "expected each group in one step only, but found group"),
        (train_fewer_groups, r"expected at least 3 groups \(batch.prompts_per_step\), but found 2"),
        (leave_out_a_good_group, r"expected 3 trained groups \(batch.prompts_per_step\), but found 2"),
        (hide_a_failure, "expected failed rollouts by group"),
        (skip_a_step, "expected step 11, but found step 12"),
        (refit_other_weights, "expected engines with the trainer's checksum"),
        (resume_other_weights, r"expected the weights of step \d+ with checksum"),
        (refit_another_version, "expected weight version 12, but found 11"),
        (train_without_a_refit, "expected a refit before the first step of an attempt"),
        (resume_another_checkpoint, "expected the recorded checkpoint"),
        (save_another_checkpoint, "step_000012: expected the SHA-256 0000000000000000… of its manifest, but found"),
        (save_no_checkpoint, "step_000012: expected only checkpoints of the ledger, up to step 12"),
        (go_back_too_far, "expected a return to one of the steps 0 to 12, but found step 13"),
        (drop_a_trained_row, r"expected a pending row as draw \d+, but found a dropped group whose row which step 11"),
        (hide_a_dropped_group, r"metrics.jsonl line \d+: expected rollout/dropped_samples=0, as in line"),
        (count_more_samples, "step_000012.jsonl: expected samples=3 of group"),
        (forget_the_end, "expected finished_after_step=12 and no end in the ledger, but found 12"),
        (change_the_data, "expected the run's data"),
        (evaluate_twice, "expected one evaluation of a after step"),
    ],
)
def test_contradiction_with_correct_hashes_is_refused(
    finished: Path, copied: Path, change: Callable[[list[Line]], None], message: str
) -> None:
    lines = [json.loads(line) for line in ledger_of(finished)]
    assert resealed(lines) == b"".join(ledger_of(finished))
    change(lines)
    assert re.search(message, refusal(copied, resealed(lines)))


def test_break_names_its_line(finished: Path, copied: Path) -> None:
    lines = ledger_of(finished)
    lines[4] = lines[4].replace(b'"step": ', b'"step": 1')
    assert re.fullmatch(
        rf"{copied}/samples.jsonl line 5: expected the hash [0-9a-f]{{32}} of this line after line 4, but found "
        r"[0-9a-f]{32}. This line was changed, or lines before it were added, removed or moved",
        refusal(copied, b"".join(lines)),
    )


def remove_line(file: Path, number: int) -> None:
    lines = file.read_text().splitlines(keepends=True)
    del lines[number]
    file.write_text("".join(lines))


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: remove_line(run / "metrics.jsonl", 3), "metrics.jsonl line 4: expected step 4, but found step 5"),
        (
            lambda run: remove_line(run / "metrics.jsonl", -1),
            "expected 12 steps, as in the ledger of this finished run",
        ),
        (
            lambda run: replace(run / "metrics.jsonl", '"engines/alive": 2', '"engines/alive": 3'),
            "metrics.jsonl line 1: expected engines/alive=2",
        ),
        (
            lambda run: replace(run / "rollouts/step_000005.jsonl", '"version": 4', '"version": 9'),
            r"step_000005.jsonl: expected (oldest|newest)=4 of group",
        ),
        (lambda run: remove_line(run / "rollouts/step_000005.jsonl", 0), "expected rollouts=2 of group"),
        (
            lambda run: shutil.copytree(run / "checkpoints/step_000012", run / "checkpoints/step_000001"),
            "step_000001: expected",
        ),
        (lambda run: (run / "checkpoints/step_000012/manifest.json").unlink(), "expected an intact checkpoint"),
        (lambda run: replace(run / "manifest.json", "12", "11"), "and its end in the ledger, but found 11"),
        (
            lambda run: replace(run / "config.resolved.yaml", "prompts_per_step: 3", "prompts_per_step: 4"),
            "but found 4",
        ),
    ],
)
def test_contradiction_with_another_file_is_refused(
    finished: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    damage(tmp_path / "run")
    assert re.search(message, refusal(tmp_path / "run", b"".join(ledger_of(finished))))


VALUES = [None, True, -1, 2**70, 1.5, "a", [], {}, [[1]], {"draw": [1]}, float("nan")]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_values_of_other_types_never_raise(finished: Path, copied: Path, data: st.DataObject) -> None:
    lines = [json.loads(line) for line in ledger_of(finished)]
    value: Any = data.draw(st.sampled_from(lines))
    while True:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = data.draw(st.sampled_from(list(keys)))
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        value = inner
    value[key] = data.draw(st.sampled_from(VALUES))
    (copied / "samples.jsonl").write_bytes(resealed(lines))
    audit(copied)


def test_commands_exit_code_is_1_for_a_break(finished: Path, copied: Path) -> None:
    result = CliRunner().invoke(app, ["audit", str(finished)])
    assert result.exit_code == 0 and result.stdout.startswith(f"{finished}: proven. No drawn row")
    refusal(copied, b"")
    result = CliRunner().invoke(app, ["audit", str(copied)])
    assert result.exit_code == 1 and result.stderr.startswith(f"{copied}/samples.jsonl: expected a line `run`")


def test_folder_without_a_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}: not a run folder with a ledger .* Fix: pass the folder of a run"):
        audit(tmp_path)


def test_checkpoint_with_other_pending_rows_is_refused(finished: Path, tmp_path: Path) -> None:
    """The checkpoint has correct checksums, and the ledger has its SHA-256."""
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / f"step_{STEPS:06d}"
    state = Checkpoint.open(path).state
    write_manifest(path, STEPS, {**state, "run": {**state["run"], "num_draws": state["run"]["num_draws"] + 1}}, ())
    lines = [json.loads(line) for line in ledger_of(finished)]
    last(lines, "checkpoint", STEPS)["checkpoint"] = Checkpoint.open(path).digest
    assert f"{path}: expected the draws and pending rows (" in refusal(tmp_path / "run", resealed(lines))
