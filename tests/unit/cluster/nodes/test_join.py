"""A node that waits for the end of a run, between two attempts, and that leaves the run early."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster.nodes import join as module
from megarl.cluster.nodes.rendezvous import Invitation, NodeRendezvous
from megarl.cluster.supervision import processes, segments
from megarl.cluster.supervision.scratch import make_memory_folder, make_scratch, memory_folder, remove_scratch
from tests.unit.cluster.nodes.test_rendezvous import INVITED, report


def test_attempt_finds_no_copies_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(module, "_await_invitation", lambda rendezvous, _: rendezvous.invitation())
    monkeypatch.setattr(processes, "end_descendants", lambda: None)
    rendezvous = NodeRendezvous(tmp_path / "nodes")
    rendezvous.invite(INVITED)
    found: list[bool] = []

    def take_part(rendezvous: NodeRendezvous, invitation: Invitation, scratch: Path, is_spare: bool) -> None:
        found.append(memory_folder(scratch).exists())
        (make_memory_folder(scratch) / "actor-0.0.json").write_text("{}")
        if len(found) == 1:
            rendezvous.invite(replace(INVITED, id="b2"))
        else:
            rendezvous.withdraw()

    monkeypatch.setattr(module, "_take_part", take_part)
    scratch = make_scratch()
    module.join(rendezvous, scratch, timeout_s=0.0, is_spare=False)
    remove_scratch(scratch)
    assert found == [False, False]


class Ray:
    """Ray's process on a node, which runs until it is polled `polls` times."""

    def __init__(self, polls: int = 1000):
        self._left = polls

    def poll(self) -> int | None:
        self._left -= 1
        return None if self._left > 0 else 1


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeRendezvous:
    """The rendezvous of a run that this node joins, without Ray and without time."""
    rendezvous = NodeRendezvous(tmp_path / "nodes")
    rendezvous.invite(replace(INVITED, logs=str(tmp_path)))
    monkeypatch.setattr(module, "_await_invitation", lambda rendezvous, _: rendezvous.invitation())
    monkeypatch.setattr(module, "_report", lambda invitation: replace(report(2), invitation=invitation.id))
    monkeypatch.setattr(module, "socket_environment", lambda address: {})
    monkeypatch.setattr(module, "interface_of", lambda address: "eth0")
    monkeypatch.setattr(module, "_reaches", lambda invitation: True)
    monkeypatch.setattr(module.subprocess, "Popen", lambda *_, **__: Ray())
    return rendezvous


def test_released_node_leaves_the_run(node: NodeRendezvous, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            node.release(node.reports()[0])

    monkeypatch.setattr(module.time, "sleep", sleep)
    assert module.main(tmp_path, tmp_path, timeout_s=0.0, is_spare=False) == 0
    assert len(slept) == 3 and node.reports()[0].problem is None


def test_signal_requests_the_replacement_of_the_node(
    node: NodeRendezvous, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is made once, and a node that is replaced in time has not failed."""
    requests: list[dict[str, str]] = []
    signals = SimpleNamespace(is_signaled=False, grace=lambda *_, **__: nullcontext())

    def sleep(_: float) -> None:
        requests.append(node.leave_requests())
        signals.is_signaled = True
        if len(requests) == 2:
            (tmp_path / "nodes" / "leave-n2").unlink()
        if len(requests) == 4:
            node.release(node.reports()[0])

    monkeypatch.setattr(module, "interrupts", signals)
    monkeypatch.setattr(module.time, "sleep", sleep)
    assert module.main(tmp_path, tmp_path, timeout_s=0.0, is_spare=False) == 0
    assert requests == [{}, {"n2": "megarl join received a signal on this node"}, {}, {}]
