"""Untrusted checkpoints, whose pickles call functions."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from megarl.core.errors import UserError
from megarl.megatron.checkpoint.untrusted import without_code
from megarl.resharding.transports.torch_dist import TorchDistFolder


class Call:
    """Calls a function when unpickled."""

    def __init__(self, *call: Any):
        self._call = call

    def __reduce__(self) -> tuple:
        function, *arguments = self._call
        return function, tuple(arguments)


@pytest.fixture
def called(tmp_path: Path) -> Path:
    """A file that exists once a hostile call has been made."""
    return tmp_path / "called"


def save(folder: Path, value: Any) -> Path:
    state = {"weight": torch.arange(4.0), "value": value}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    torch_checkpoint.save(state, checkpoint_id=folder, planner=planner, no_dist=True)
    return folder


def load(folder: Path, is_flat: bool = False) -> dict[str, Any]:
    state = {"weight": torch.zeros(4), "value": None}
    planner = DefaultLoadPlanner(flatten_state_dict=is_flat, flatten_sharded_tensors=False)
    with without_code(folder):
        torch_checkpoint.load(state, checkpoint_id=folder, planner=planner, no_dist=True)
    return state


@pytest.mark.parametrize("is_flat", [False, True])
def test_plain_values_are_loaded(tmp_path: Path, is_flat: bool) -> None:
    value = {"python": (3, tuple(range(625)), None), "states": [torch.ones(2)], "text": "x"}
    state = load(save(tmp_path / "checkpoint", value), is_flat)
    assert state["weight"].tolist() == [0, 1, 2, 3]
    assert repr(state["value"]) == repr(value)
    assert filesystem.pickle is pickle
    assert DefaultLoadPlanner.load_bytes.__module__ == "torch.distributed.checkpoint.default_planner"


@pytest.mark.parametrize("is_flat", [False, True])
def test_object_runs_no_code(tmp_path: Path, called: Path, is_flat: bool) -> None:
    folder = save(tmp_path / "checkpoint", Call(called.touch))
    with pytest.raises(UserError, match=r"checkpoint: a file is corrupt: .*\(UnpicklingError\)\. Fix: use another"):
        load(folder, is_flat)
    assert not called.exists()


def test_overwritten_file_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoint", 1)
    file = folder / "__0_0.distcp"
    file.write_bytes(b"?" * file.stat().st_size)
    with pytest.raises(UserError, match="checkpoint: a file is corrupt") as raised:
        load(folder)
    assert "weights_only" not in str(raised.value)


def test_storage_failure_is_not_called_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(torch, "load", fail)
    with TorchDistFolder(save(tmp_path / "checkpoint", 1)) as folder, pytest.raises(OSError, match="Input/output"):
        folder.read_object("value")


def test_unreadable_file_is_not_called_corrupt(tmp_path: Path) -> None:
    """If a file cannot be read, the storage may have failed, so the original exception is raised."""
    folder = save(tmp_path / "checkpoint", 1)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointException, match="No such file"):
        load(folder)


@pytest.mark.parametrize(
    "call",
    [
        lambda file: Call(file.touch),
        lambda file: Call(os.system, f"touch {file}"),
        lambda file: Call(getattr, Path(file), "touch"),
        lambda file: Call(eval, f"open({str(file)!r}, 'w')"),
    ],
)
def test_metadata_runs_no_code(tmp_path: Path, called: Path, call: Callable[[Path], Call]) -> None:
    folder = save(tmp_path / "checkpoint", 1)
    metadata = torch_checkpoint.FileSystemReader(folder).read_metadata()
    metadata.planner_data = call(called)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert load(folder)["weight"].tolist() == [0, 1, 2, 3]
    assert not called.exists()


def changed(change: Callable[[Metadata], object]) -> Callable[[Path], bytes]:
    def write(folder: Path) -> bytes:
        metadata = torch_checkpoint.FileSystemReader(folder).read_metadata()
        change(metadata)
        return pickle.dumps(metadata)

    return write


def refer_to(name: str) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    return change


def shift(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.offset = -1


DAMAGES: dict[str, Callable[[Path], bytes]] = {
    "empty": lambda folder: b"",
    "text": lambda folder: b"version https://git-lfs.github.com/spec/v1\n",
    "other object": lambda folder: pickle.dumps([1]),
    "call": lambda folder: pickle.dumps(Call(os.getpid)),
    "dotted name": lambda folder: b"\x80\x04\x8c\x07pathlib\x8c\x14PosixPath.touch.real\x93.",
    "enum member": lambda folder: b"cbuiltins\ngetattr\n(cpathlib\nPosixPath\n]tR.",
    "missing argument": lambda folder: b"\x80\x02ctorch\nSize\n(]K\x01tR.",
    "deep": lambda folder: b"\x80\x02" + b"(" * 10_000 + b"t" * 10_000 + b".",
    "absolute path": changed(refer_to("/etc/hosts")),
    "path outside": changed(refer_to("../checkpoint/__0_0.distcp")),
    "no path": changed(refer_to("")),
    "negative offset": changed(shift),
    "no storage": changed(lambda metadata: setattr(metadata, "storage_data", None)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_metadata_is_named(tmp_path: Path, damage: Callable[[Path], bytes]) -> None:
    folder = save(tmp_path / "checkpoint", 1)
    content = damage(folder)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"checkpoint: \.metadata is corrupt or incomplete \(.*Fix: "):
        TorchDistFolder(folder)
    with pytest.raises(CheckpointException, match="metadata read failed"):
        load(folder)
