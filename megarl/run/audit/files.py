"""Compares a sample ledger with the other files of its run, if they still exist."""

from __future__ import annotations

import json
import math
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from megarl.config import document
from megarl.core.checkpoint import NAME, Checkpoint
from megarl.core.errors import UserError
from megarl.core.files import is_plain, lines_of, numbered, open_regular, read_text, shown
from megarl.run.audit.chain import MALFORMED, Broken
from megarl.run.audit.history import History
from megarl.run.folder import ATTEMPT, RunFolder

BUDGET_BYTES = 2**26
"""Default for the total size in bytes of the rollout files to compare."""


def chosen_files(files: Mapping[int, Path], budget: float) -> dict[int, Path]:
    """Choose rollout files in a fixed random order, up to a total size of `budget` bytes."""
    order = sorted(files)
    random.Random(0).shuffle(order)
    sizes = accumulate(files[step].lstat().st_size for step in order)
    return {step: files[step] for step, size in zip(order, sizes, strict=True) if size <= budget}


def check_end(folder: RunFolder, history: History, finished: int | None) -> None:
    """Compare the last step in the manifest of a finished run with the ledger."""
    if finished is not None and (finished, True) != (history.head, history.has_ended):
        ended = "its end" if history.has_ended else "no end"
        raise Broken(
            str(folder.manifest), f"finished_after_step={history.head} and {ended} in the ledger", f"{finished}"
        )


def check_settings(folder: RunFolder, history: History) -> str:
    """Compare the settings of each attempt with its config."""
    current = numbered(folder.path / "logs", ATTEMPT)
    for attempt, settings in history.attempts.items():
        path = folder.path / "logs" / ATTEMPT.format(attempt) / folder.config.name
        if not path.exists() and attempt == max(current, default=attempt):
            path = folder.config
        if not path.exists():
            continue
        config = document.parse(read_text(path), str(path)).values
        for section, name in (("rollout", "max_staleness"), ("batch", "prompts_per_step")):
            recorded, actual = settings[name], config.get(section, {}).get(name)
            if recorded is not None and recorded != actual:
                raise Broken(str(path), f"{section}.{name}={recorded}, as recorded for attempt {attempt}", f"{actual}")
    return ""


@dataclass(frozen=True, slots=True)
class Listing:
    """Files of a run, listed before its ledger is read. An active run writes its ledger before these files, so the
    ledger covers them.

    Attributes:
        finished_after: last step of a finished run, or None.
        metrics_bytes: size of metrics.jsonl; 0 if it does not exist.
        checkpoints, rollouts: paths by step.
    """

    finished_after: int | None
    metrics_bytes: int
    checkpoints: Mapping[int, Path]
    rollouts: Mapping[int, Path]

    @classmethod
    def of(cls, folder: RunFolder) -> Listing:
        size = folder.metrics.lstat().st_size if os.path.lexists(folder.metrics) else 0
        return cls(folder.finished_after, size, numbered(folder.checkpoints, NAME), folder.rollout_files())


def check_metrics(folder: RunFolder, history: History, num_bytes: int) -> str:
    """Compare the steps in the first `num_bytes` bytes of metrics.jsonl with the ledger. A killed run may not have
    written its last steps."""
    path, steps = folder.metrics, {step.number: step for step in history.steps}
    if not num_bytes:
        return "no metrics.jsonl"
    expected = None
    for number, row in _objects(path, num_bytes):
        step, place = row.get("step"), f"{path} line {number}"
        if not is_plain(step, int) or 0 < step <= history.base or step == 0:
            continue
        if history.head < step <= history.reached:
            continue
        if step not in steps:
            raise Broken(place, f"a step up to {history.head}, the ledger's last step", f"step {shown(step)}")
        expected = history.base + 1 if expected is None else expected
        if step != expected:
            raise Broken(place, f"step {expected}", f"step {step}")
        expected += 1
        for name, value in (
            ("rollout/prompts", len(steps[step].groups)),
            ("rollout/dropped_samples", steps[step].num_dropped),
            ("engines/alive", steps[step].weights.get("num_engines")),
        ):
            if name in row and row[name] != value:
                raise Broken(place, f"{name}={value}, as in line {steps[step].line} of the ledger", shown(row[name]))
    count = 0 if expected is None else expected - 1 - history.base
    if history.has_ended and count < len(steps):
        raise Broken(str(path), f"{len(steps)} steps, as in the ledger of this finished run", f"{count}")
    return f"metrics.jsonl has {_of(count, len(steps))} steps"


def check_checkpoints(checkpoints: Mapping[int, Path], history: History) -> str:
    """Compare each checkpoint's manifest, including its pending rows, with the ledger, and the sizes of the
    checkpoint's files with the manifest. A run that continues may remove checkpoints."""
    found = {step: path for step, path in checkpoints.items() if not history.head < step <= history.reached}
    known = {step: path for step, path in found.items() if step > history.base or step in history.checkpoints}
    for step, path in known.items():
        expected = history.checkpoints.get(step)
        if expected is None:
            raise Broken(str(path), f"only checkpoints of the ledger, up to step {history.head}", "another checkpoint")
        try:
            checkpoint = Checkpoint.open(path)
        except UserError as damage:
            if not path.exists():
                continue
            raise Broken(str(path), "an intact checkpoint", str(damage)) from None
        if checkpoint.digest != expected:
            raise Broken(str(path), f"the SHA-256 {expected[:16]}… of its manifest", f"{checkpoint.digest[:16]}…")
        state = checkpoint.state["run"]
        rows = zip(state["under_way_draws"], state["under_way"], strict=True)
        saved = state["num_draws"], dict(rows)
        if step > history.base and saved != history.pending[step]:
            raise Broken(str(path), f"the draws and pending rows {shown(history.pending[step])}", shown(saved))
    earlier = "" if known == found else f", {len(found) - len(known)} older than the ledger"
    return f"{len(history.checkpoints)} recorded, {len(known)} on disk with the recorded manifest{earlier}"


def check_rollouts(files: Mapping[int, Path], history: History, total: int) -> str:
    """Compare rollout files with the groups in the ledger. A file may lack groups because the disk was full."""
    num_groups = 0
    for step, path in files.items():
        if step not in history.tables:  # an unfinished step
            continue
        recorded = {}
        for table in history.tables[step]:
            columns = zip(*(table[name] for name in _COMPARED), strict=True)
            recorded |= dict(zip(table["group"], columns, strict=True))
        for group, rows in _groups(path).items():
            if group not in recorded:
                raise Broken(str(path), "only groups recorded in the ledger", f"group {shown(group)}")
            actual = _described(rows)
            for name, expected, value in zip(_COMPARED, recorded[group], actual, strict=True):
                if value is not None and value != expected:
                    raise Broken(str(path), f"{name}={shown(expected)} of group {group} in the ledger", shown(value))
            num_groups += 1
    return f"{_of(len(files), total)} rollout files compared ({num_groups:,} groups)"


_COMPARED = ("prompt", "rollouts", "samples", "tokens", "oldest", "newest")


def _groups(path: Path) -> dict[str, list[dict[str, Any]]]:
    groups = defaultdict(list)
    for number, row in _objects(path):
        if not isinstance(row.get("sample_id"), str):
            raise Broken(f"{path} line {number}", "a sample", "none")
        groups[row.get("rollout_id", row["sample_id"]).rpartition(".")[0]].append(row)
    return groups


def _described(rows: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Return the values of _COMPARED for the lines of a group. Tokens of images are not in the file."""
    versions = [run["version"] for row in rows for run in row["version"] if run["count"]]
    is_text = all("num_response_tokens" in row for row in rows)
    tokens = (
        sum(sum(row["mask"][::2]) if "mask" in row else row["num_response_tokens"] for row in rows) if is_text else None
    )
    rollouts = {row.get("rollout_id", row["sample_id"]) for row in rows}
    newest = max(versions, default=None)
    return rows[0]["prompt_id"], len(rollouts), len(rows), tokens, min(versions, default=None), newest


def check_evaluations(folder: RunFolder, history: History, budget: float) -> str:
    """Compare the files of evaluation sets with the ledger."""
    files = {
        (step, name): path
        for name, paths in folder.evaluation_files().items()
        for step, path in paths.items()
        if step > history.base or (step, name) in history.evaluations
    }
    for step, name in files.keys() - history.evaluations.keys():
        if step < history.head:  # in a later step, the run may have been killed before recording it
            raise Broken(str(files[step, name]), "only evaluations of the ledger", "another evaluation")
    chosen = chosen_files({i: files[key] for i, key in enumerate(sorted(files.keys() & history.evaluations))}, budget)
    for i, path in chosen.items():
        step, name = sorted(files.keys() & history.evaluations)[i]
        rows = [row for _, row in _objects(path)]
        found = {row.get("rollout_id", row.get("sample_id")) for row in rows}
        expected = history.evaluations[step, name]["rollouts"]
        if len(found) != expected:
            raise Broken(str(path), f"{expected} rollouts, as in the ledger", f"{len(found)}")
        versions = {run["version"] for row in rows for run in row["version"] if run["count"]}
        if not versions <= {step}:
            raise Broken(str(path), f"tokens from weight version {step}", f"versions {sorted(versions)}")
    return f"{_of(len(chosen), len(history.evaluations))} evaluations compared"


def _objects(path: Path, num_bytes: float = math.inf) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for the complete lines in the first `num_bytes` of a JSONL file. Raise Broken if a
    line is not an object."""
    with open_regular(path) as file:
        for number, line in enumerate(lines_of(file), 1):
            num_bytes -= len(line)
            if not line.endswith(b"\n") or num_bytes < 0:
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise Broken(f"{path} line {number}", "a JSON object", shown(line[:80]))
            yield number, row


def checked(path: Path, check: Callable[[], str]) -> str:
    """Run a check of the files at `path`. Raise Broken if their values are malformed."""
    try:
        return check()
    except UserError:
        raise
    except MALFORMED as error:
        raise Broken(
            str(path), "lines that megarl writes", f"malformed ones ({type(error).__name__}: {error})"
        ) from None


def _of(count: int, total: int) -> str:
    return f"{count:,} of {total:,}"


def reasons(counts: Mapping[str, int], most: int) -> Iterable[str]:
    """Yield the `most` most frequent reasons with their counts, and a line with the total count of all others."""
    listed = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    yield from (f"{count:,} {why}" for why, count in listed[:most] if count)
    if len(listed) > most:
        yield f"{sum(count for _, count in listed[most:]):,} for other reasons"
