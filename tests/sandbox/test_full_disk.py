"""Writes to a real full disk: a small file system in memory that is full until the writer waits for the first time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.timing import WAIT_S

SIZE = 4 * 2**20

PRELUDE = """
import errno, json, os, sys, time
from pathlib import Path
from megarl.core import files, outage
from megarl.core.errors import InfrastructureFailure

folder, is_freed = Path(sys.argv[1]), sys.argv[2] == "freed"
filler, pauses = folder / "filler", []

def fill():
    with filler.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC

def sleep(seconds):
    pauses.append(seconds)
    if is_freed and len(pauses) == 3:
        filler.unlink()

time.sleep = sleep

def attempt(write):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path != filler}
    try:
        write()
        assert is_freed and pauses == [1, 2, 4], pauses
    except InfrastructureFailure as failure:
        assert not is_freed and sum(pauses) == files.DISK_S, (pauses, failure)
        assert "full or over quota for 300 s. Fix: free disk space, then resume with resume=auto" in str(failure)
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path != filler}
        assert after == before, "something is half-written"
"""

APPEND = """
rows, file = [{"text": str(i) * 3000} for i in range(9)], folder / "rows.jsonl"
files.append_rows(file, rows[:2])
fill()
attempt(lambda: files.retry_when_full(lambda: files.append_rows(file, rows[2:]), file))
written = [json.loads(line) for line in file.read_text().splitlines()]
assert written == (rows if is_freed else rows[:2])
"""

REPLACE = """
file = folder / "manifest.json"
files.replace_text(file, "old")
fill()
attempt(lambda: files.replace_text(file, "new" * 5000))
assert file.read_text() == ("new" * 5000 if is_freed else "old")
assert {path.name for path in folder.iterdir()} - {"filler"} == {"manifest.json"}
"""

METRICS = """
from megarl.run.loggers import JsonlSink
sink = JsonlSink(folder / "metrics.jsonl")
sink.write(1, {"a": 1.0})
fill()
attempt(lambda: sink.write(2, {f"metric/{i}": i for i in range(999)}))
steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
assert steps == ([1, 2] if is_freed else [1])
"""

TENSORS = """
import numpy as np
from safetensors.numpy import load_file, save_file
file, tensors = folder / "waiting.safetensors", {"a": np.arange(100_000)}

def save():
    try:
        save_file(tensors, file)
    except Exception:
        file.unlink(missing_ok=True)
        raise

fill()
attempt(lambda: files.retry_when_full(save, file))
assert not is_freed or (load_file(file)["a"] == tensors["a"]).all()
"""

CHECKPOINT = """
import torch
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from megarl.megatron.checkpoint import sharded
state, checkpoint = {"a": torch.arange(100_000)}, folder / "actor"
checkpoint.mkdir()

def write():
    save_state(state, storage_writer=sharded._Writer(checkpoint, sync_files=True), no_dist=True)

fill()
attempt(lambda: sharded._write_parts(checkpoint, write, 0))
if is_freed:
    loaded = {"a": torch.zeros(100_000, dtype=torch.int64)}
    load(loaded, checkpoint_id=checkpoint, no_dist=True)
    assert torch.equal(loaded["a"], state["a"])
"""

SPACE = """
from megarl.run.checkpoints import Checkpoints
checkpoints = Checkpoints(folder / "checkpoints")
fill()
attempt(lambda: checkpoints.await_space(10_000, keep=1)) if is_freed else None
if not is_freed:
    try:
        checkpoints.await_space(10_000, keep=1)
    except InfrastructureFailure as failure:
        assert "checkpoint.keep=1: " in str(failure) and "Fix: free disk space" in str(failure)
    else:
        raise AssertionError
    assert sum(pauses) == files.DISK_S
"""

WRITES = {name: globals()[name] for name in ("APPEND", "REPLACE", "METRICS", "TENSORS", "CHECKPOINT", "SPACE")}


@pytest.mark.parametrize("outcome", ["freed", "stays full"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_wait_while_the_disk_is_full(name: str, outcome: str, tmp_path: Path) -> None:
    disk = ["bwrap", "--dev-bind", "/", "/", "--size", str(SIZE), "--tmpfs", str(tmp_path)]
    script = [sys.executable, "-c", PRELUDE + WRITES[name], str(tmp_path), outcome]
    ended = subprocess.run([*disk, *script], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert ended.returncode == 0, ended.stderr
    assert "the disk is full" in ended.stdout + ended.stderr or "waiting up to 300 s" in ended.stderr
