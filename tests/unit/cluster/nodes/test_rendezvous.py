"""The rendezvous folder, and the driver's wait for other nodes with a fake of Ray's list of nodes."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cluster.nodes import gathering
from megarl.cluster.nodes.gathering import gather
from megarl.cluster.nodes.rendezvous import INVITATION, MAX_REASON, PACKAGES, Invitation, NodeRendezvous, Report
from megarl.core.errors import RunFailure, UserError
from megarl.core.versions import installed_versions

INVITED = Invitation("a1", "10.0.0.1", 5000, "secret", installed_versions(PACKAGES), 8, 2**28, "/logs", 0.0)


def report(number: int, invitation: str = "a1") -> Report:
    return Report(f"n{number}", invitation, f"10.0.0.{number}", cores=64, gpus=8)


@pytest.fixture
def rendezvous(tmp_path: Path) -> NodeRendezvous:
    rendezvous = NodeRendezvous(tmp_path / "nodes")
    rendezvous.invite(INVITED)
    return rendezvous


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of the nodes that are alive in Ray; tests may change the list."""
    numbers: list[int] = []
    monkeypatch.setattr(gathering, "alive_nodes", lambda: {f"10.0.0.{number}": f"id {number}" for number in numbers})
    return numbers


def test_invitation_is_readable_by_its_user_only(rendezvous: NodeRendezvous, tmp_path: Path) -> None:
    assert NodeRendezvous(tmp_path / "nodes").invitation() == INVITED
    file = tmp_path / "nodes" / INVITATION
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    rendezvous.withdraw()
    rendezvous.withdraw()
    assert rendezvous.invitation() is None
    assert NodeRendezvous(tmp_path / "none").invitation() is None


def test_new_invitation_removes_earlier_files(rendezvous: NodeRendezvous) -> None:
    rendezvous.report(report(2))
    rendezvous.request_stacks([Path("a.log")])
    rendezvous.invite(replace(INVITED, id="b2"))
    assert rendezvous.reports() == [] and rendezvous.requested_stacks() == (0, [])


def test_differing_versions_are_returned(rendezvous: NodeRendezvous) -> None:
    assert INVITED.differing() == {}
    here = installed_versions(PACKAGES)["torch"]
    other = replace(INVITED, versions=INVITED.versions | {"torch": "1.0"})
    assert other.differing() == {"torch": ("1.0", here)}


def test_reports_are_in_natural_order_of_names(rendezvous: NodeRendezvous) -> None:
    for number in (10, 2, 1):
        rendezvous.report(report(number))
    assert [found.name for found in rendezvous.reports()] == ["n1", "n2", "n10"]
    rendezvous.report(replace(report(2), peak_gb=(2.0, 1.0)))
    assert [found.peak_gb for found in rendezvous.reports()] == [(0.0, 0.0), (2.0, 1.0), (0.0, 0.0)]


def test_reports_of_other_versions_have_other_fields(rendezvous: NodeRendezvous, tmp_path: Path) -> None:
    rendezvous.report(report(1))
    [file] = tmp_path.rglob("node-*.json")
    content = json.loads(file.read_text())
    del content["is_spare"]
    file.write_text(json.dumps(content | {"problem": "versions differ", "speed": 1.0}))
    [found] = rendezvous.reports()
    assert (found.name, found.problem, found.is_spare) == ("n1", "versions differ", False)


def test_stack_requests_are_numbered(rendezvous: NodeRendezvous) -> None:
    assert rendezvous.requested_stacks() == (0, [])
    rendezvous.request_stacks([Path("/logs/a.log")])
    rendezvous.request_stacks([Path("/logs/b.log")])
    assert rendezvous.requested_stacks() == (2, [Path("/logs/b.log")])


def test_gather_returns_the_first_alive_nodes(rendezvous: NodeRendezvous, alive: list[int], capsys) -> None:
    for number in (2, 3, 4):
        rendezvous.report(report(number))
    rendezvous.report(report(5, invitation="of an earlier attempt"))
    alive += [1, 3, 4, 5]
    assert gather(rendezvous, 2, 0.0, "runs/r") == [report(3), report(4)]
    assert capsys.readouterr().out.splitlines() == [
        "node n3: joined from 10.0.0.3 with 64 cores, 8 GPUs",
        "node n4: joined from 10.0.0.4 with 64 cores, 8 GPUs",
    ]


def test_gather_ignores_spare_nodes(rendezvous: NodeRendezvous, alive: list[int]) -> None:
    rendezvous.report(replace(report(2), is_spare=True))
    rendezvous.report(replace(report(3), is_spare=True, problem="packages differ"))
    rendezvous.report(report(4))
    alive += [1, 2, 4]
    assert gather(rendezvous, 1, 0.0, "runs/r") == [report(4)]
    with pytest.raises(RunFailure, match=r"only 1 of 2 other nodes joined in time \(n4\)\. Fix"):
        gather(rendezvous, 2, 0.0, "runs/r")


def test_missing_and_joining_nodes_are_named(rendezvous: NodeRendezvous, alive: list[int]) -> None:
    rendezvous.report(report(2))
    rendezvous.report(report(3))
    alive += [1, 2]
    message = (
        r"cluster.timeouts.start=0: only 1 of 3 other nodes joined in time \(n2\)\. Nodes that failed to join: n3 "
        r"\(see their ray-\*.log files\)\. Fix: run megarl join runs/r on each missing node"
    )
    with pytest.raises(RunFailure, match=message):
        gather(rendezvous, 3, 0.0, "runs/r")


def test_node_that_cannot_join_ends_the_wait(rendezvous: NodeRendezvous, alive: list[int]) -> None:
    rendezvous.report(replace(report(2), problem="node n2: 4 GPUs, but the run uses 8 per node"))
    with pytest.raises(UserError, match="n2: 4 GPUs"):
        gather(rendezvous, 1, 100.0, "runs/r")


def test_all_lost_nodes_of_an_attempt_are_recorded(rendezvous: NodeRendezvous) -> None:
    assert rendezvous.lost() == []
    for names in (["n3"], ["n2"]):
        rendezvous.note_lost(names)
    assert rendezvous.lost() == ["n2", "n3"]
    rendezvous.invite(replace(INVITED, id="b2"))
    assert rendezvous.lost() == []


def test_the_token_is_not_written_through_a_link(rendezvous: NodeRendezvous, tmp_path: Path) -> None:
    readable = tmp_path / "readable"
    readable.write_text("")
    (tmp_path / "nodes" / f".{INVITATION}.{os.getpid()}").symlink_to(readable)
    rendezvous.invite(INVITED)
    assert readable.read_text() == "" and rendezvous.invitation() == INVITED


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.write_text("[" * 100_000)], ids=["pipe", "deep"])
def test_an_odd_invitation_is_named(rendezvous: NodeRendezvous, tmp_path: Path, make) -> None:
    file = tmp_path / "nodes" / INVITATION
    file.unlink()
    make(file)
    with pytest.raises(UserError, match=rf"{INVITATION}: not [^:]*(: nested too deeply)?\. Fix: [^:]*$"):
        rendezvous.invitation()


def test_leave_requests_carry_a_printable_reason(rendezvous: NodeRendezvous, tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    (nodes / "leave-n2").touch()
    (nodes / "leave-n3").write_text("a new \x1b[31mmotor\nand more")
    (nodes / ".leave-n4").touch()  # is being written
    os.mkfifo(nodes / "leave-n5")
    rendezvous.request_leave("n-6", "x" * 1000)
    assert rendezvous.leave_requests() == {
        "n2": f"{nodes}/leave-n2 exists",
        "n3": "a new \\x1b[31mmotor",
        "n5": f"{nodes}/leave-n5 exists",
        "n-6": "x" * MAX_REASON,
    }
    rendezvous.invite(replace(INVITED, id="b2"))
    assert rendezvous.leave_requests() == {}, "an attempt starts on the nodes that its job has chosen"


def test_released_node_may_join_again(rendezvous: NodeRendezvous) -> None:
    first, second, other = replace(report(2), id="a"), replace(report(2), id="b"), replace(report(3), id="c")
    rendezvous.request_leave("n2", "maintenance")
    assert not rendezvous.is_released(first)
    rendezvous.release(first)
    rendezvous.release(other)
    assert rendezvous.is_released(first) and rendezvous.is_released(other) and not rendezvous.is_released(second)
    assert rendezvous.leave_requests() == {}
