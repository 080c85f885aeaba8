"""Lost nodes and spare nodes, with a fake of Ray's list of nodes."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster.network import own_name
from megarl.cluster.nodes import gathering
from megarl.cluster.nodes import members as module
from megarl.cluster.nodes.members import Members
from megarl.cluster.nodes.rendezvous import NodeRendezvous, Report
from tests.unit.cluster.nodes.test_rendezvous import INVITED, report


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Ray's id for each live node, by address; tests may change it."""
    ids = {f"10.0.0.{number}": f"id {number}" for number in (1, 2, 3)}
    monkeypatch.setattr(module, "alive_nodes", lambda: ids)
    return ids


@pytest.fixture
def rendezvous(tmp_path: Path) -> NodeRendezvous:
    rendezvous = NodeRendezvous(tmp_path / "nodes")
    rendezvous.invite(INVITED)
    for number in (2, 3):
        rendezvous.report(report(number))
    return rendezvous


@pytest.fixture
def members(alive: dict[str, str], rendezvous: NodeRendezvous) -> Members:
    return Members("id 1", [report(2), report(3)], rendezvous)


def join(number: int, alive: dict[str, str], rendezvous: NodeRendezvous, **changes: object) -> Report:
    """Let another node join. Return its report."""
    joined = replace(report(number), **changes)
    rendezvous.report(joined)
    alive[joined.address] = f"id {number}"
    return joined


def test_lost_nodes_are_those_missing_from_ray(members: Members, alive: dict[str, str]) -> None:
    assert members.lost() == []
    del alive["10.0.0.3"]
    assert members.lost(patience_s=60.0) == [2]
    assert members.name(2) == "n3"


def test_node_that_rejoins_under_its_address_is_lost(members: Members, alive: dict[str, str]) -> None:
    """Its processes are gone. It is a spare node now."""
    alive["10.0.0.3"] = "another id"
    assert members.lost() == [2]
    assert members.spare_nodes() == [report(3)]


def test_single_node_is_never_lost(alive: dict[str, str]) -> None:
    alive.clear()
    alone = Members("id 1")
    assert alone.lost(patience_s=60.0) == [] and alone.spare_nodes() == [] and len(alone) == 1


def test_spares_are_live_nodes_without_a_number(
    members: Members, alive: dict[str, str], rendezvous: NodeRendezvous, capsys: pytest.CaptureFixture[str]
) -> None:
    assert members.spare_nodes() == []
    join(10, alive, rendezvous)
    spare = join(4, alive, rendezvous)
    join(5, alive, rendezvous, problem="packages differ")
    join(6, alive, rendezvous, invitation="of an earlier attempt")
    rendezvous.report(report(7))  # has not joined Ray yet
    assert members.spare_nodes() == [spare, report(10)]
    del alive[spare.address]
    assert members.spare_nodes() == [report(10)]
    assert capsys.readouterr().out.splitlines() == [
        "node n4: joined from 10.0.0.4 as a spare node",
        "node n10: joined from 10.0.0.10 as a spare node",
    ]


def test_spare_takes_over_the_number_of_a_lost_node(
    members: Members, alive: dict[str, str], rendezvous: NodeRendezvous, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (4, 5):
        join(number, alive, rendezvous)
    del alive["10.0.0.2"]
    members.replace(members.lost())
    assert "\nrecovery: node n4 (10.0.0.4) replaces node n2\n" in capsys.readouterr().out
    assert [members.ray_id(number) for number in range(3)] == ["id 1", "id 4", "id 3"]
    assert (members.name(1), members.name(2), len(members)) == ("n4", "n3", 3)
    assert members.lost() == [] and members.spare_nodes() == [report(5)]
    del alive["10.0.0.4"]
    assert members.lost() == [1]


@pytest.mark.parametrize(
    ("connects", "lost_at", "expected", "until"),
    [
        (True, None, [], module.SHUTDOWN_S),  # only a process is lost
        (False, None, [], module.NODE_LOSS_S),
        (False, 20.0, [2], 20.0),
        (True, 1.0, [2], 1.0),  # the node shuts down: its processes exit first
    ],
)
def test_node_that_accepts_connections_is_not_awaited(
    connects: bool, lost_at: float | None, expected: list[int], until: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def alive() -> dict[str, str]:
        is_lost = lost_at is not None and now[0] >= 100 + lost_at
        return {f"10.0.0.{number}": f"id {number}" for number in ((1, 2) if is_lost else (1, 2, 3))}

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(module, "alive_nodes", alive)
    monkeypatch.setattr(module, "accept_connections", lambda nodes: connects)
    assert Members("id 1", [report(2), report(3)]).lost(patience_s=30.0) == expected
    assert now[0] - 100 == pytest.approx(until, abs=2 * gathering.POLL_S)


def test_only_listening_nodes_accept_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Report("n2", "1", "127.0.0.1", 4, 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        known = {"NodeManagerAddress": node.address, "NodeManagerPort": server.getsockname()[1], "Alive": True}
        monkeypatch.setattr(gathering.ray, "nodes", lambda: [known])
        assert gathering.accept_connections([node])
        monkeypatch.setattr(gathering.ray, "nodes", lambda: [known | {"Alive": False}])
        assert not gathering.accept_connections([node])
    monkeypatch.setattr(gathering.ray, "nodes", lambda: [known])
    assert not gathering.accept_connections([node])


def test_leave_requests_are_mapped_to_numbers(members: Members, rendezvous: NodeRendezvous) -> None:
    for name in ("n3", "n9", own_name()):
        rendezvous.request_leave(name, f"maintenance of {name}")
    assert members.leave_requests() == {0: f"maintenance of {own_name()}", 2: "maintenance of n3"}
    assert Members("id 1").leave_requests() == {}


def test_dismissed_node_leaves_when_a_spare_replaces_it(
    members: Members, alive: dict[str, str], rendezvous: NodeRendezvous
) -> None:
    join(4, alive, rendezvous, id="d")
    rendezvous.request_leave("n3", "maintenance")
    members.dismiss(2)
    assert members.lost() == [2] and members.spare_nodes() == [replace(report(4), id="d")]
    assert not rendezvous.is_released(report(3))
    members.replace(members.lost())
    assert rendezvous.is_released(report(3)) and members.leave_requests() == {}
    assert members.lost() == [] and members.name(2) == "n4"
    assert members.spare_nodes() == [], "it is alive until it has noticed"
    again = join(3, alive, rendezvous, id="c")
    alive[again.address] = "id of its new Ray"
    assert members.spare_nodes() == [again]


def test_lost_node_is_not_released(members: Members, alive: dict[str, str], rendezvous: NodeRendezvous) -> None:
    join(4, alive, rendezvous)
    del alive["10.0.0.3"]
    members.replace(members.lost())
    assert not rendezvous.is_released(report(3))


def test_spare_that_should_leave_replaces_no_node(
    members: Members, alive: dict[str, str], rendezvous: NodeRendezvous
) -> None:
    leaving, other = (join(number, alive, rendezvous, id=f"spare {number}") for number in (4, 5))
    rendezvous.request_leave("n4", "maintenance")
    for _ in range(2):
        assert members.spare_nodes() == [other]
    assert rendezvous.is_released(leaving) and not rendezvous.is_released(other)
