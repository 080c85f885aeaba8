from __future__ import annotations

import json
import socket
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.config.schema import Config
from megarl.launch.folder import Job
from megarl.launch.preflight import (
    NodeReport,
    Objection,
    await_reports,
    check_connection,
    examine_node,
    find_objection,
    listen_for_nodes,
    num_gpus,
    send_report,
)
from megarl.planner.doctor import machine
from tests.paths import ROOT
from tests.timing import WAIT_S

NODES, RUN = ("n0", "n1", "n2"), Path("/shared/runs/a")
SAME = {"torch": "2.13.0", "ray": "2.52.1"}


def reports(**problems: list[str]) -> list[NodeReport]:
    return [NodeReport(node, problems.get(node, []), [], SAME) for node in NODES]


def test_nodes_without_problems_have_no_objection() -> None:
    assert find_objection(reports(), NODES, RUN, 60) is None


def test_nodes_with_problems_are_bad() -> None:
    found = find_objection(reports(n1=["7 GPUs, but the run needs 8 per node"]), NODES, RUN, 60)
    assert found == Objection("failed", "node n1: 7 GPUs, but the run needs 8 per node", ["n1"])


def test_problem_on_all_nodes_is_a_user_error() -> None:
    everywhere = "model.path=/m: the folder does not exist"
    found = find_objection(reports(n0=[everywhere], n1=[everywhere, "disk"], n2=[everywhere]), NODES, RUN, 60)
    assert found == Objection("user_error", f"on all nodes: {everywhere}")
    one = [NodeReport("n0", [], [everywhere], SAME)]
    assert find_objection(one, ["n0"], RUN, 60) == Objection("user_error", f"on all nodes: {everywhere}")


def test_disk_that_fills_up_later_is_not_a_user_error() -> None:
    full = "run.folder=/shared/runs: the disk is full or not writable. Fix: run megarl doctor for details"
    on_all = [NodeReport(node, [], [full], SAME) for node in NODES]
    assert find_objection(on_all, NODES, RUN, 60).verdict == "user_error"
    found = find_objection(on_all, NODES, RUN, 60, has_run=True)
    assert found == Objection("infrastructure", f"on all nodes: {full}")
    other = "model.path=/m: the folder does not exist"
    both = [NodeReport(node, [], [full, other], SAME) for node in NODES]
    assert find_objection(both, NODES, RUN, 60, has_run=True).verdict == "user_error"


def test_problem_on_one_or_two_nodes_is_not_a_user_error() -> None:
    one = [NodeReport("n0", ["7 GPUs"], [], SAME)]
    assert find_objection(one, ["n0"], RUN, 60) == Objection("failed", "node n0: 7 GPUs", ["n0"])
    silent = find_objection(one, ["n0", "n1"], RUN, 60)
    assert (silent.verdict, silent.bad_nodes) == ("failed", ["n1"])


def test_node_with_other_package_versions_is_bad() -> None:
    older = NodeReport("n0", [], [], SAME | {"torch": "2.12.0"})
    found = find_objection([older, *reports()[1:]], NODES, RUN, 60)
    assert found == Objection("failed", "node n0: torch is 2.12.0, but other nodes have 2.13.0", ["n0"])


def test_silent_node_is_bad_unless_only_the_first_reports() -> None:
    one_silent = find_objection(reports()[:2], NODES, RUN, 60)
    assert one_silent == Objection(
        "failed", f"node n2: no report within 60 s (the node is down or cannot read the files in {RUN})", ["n2"]
    )
    all_silent = find_objection(reports()[:1], NODES, RUN, 60)
    assert (all_silent.verdict, all_silent.bad_nodes) == ("user_error", ["n1", "n2"])


def test_reports_are_awaited_through_files(tmp_path: Path) -> None:
    first, *others = reports(n1=["one"])
    send_report(tmp_path, first)
    later = threading.Timer(0.3, lambda: [send_report(tmp_path, each) for each in others])
    later.start()
    assert await_reports(tmp_path, NODES, timeout_s=WAIT_S) == [first, *others]
    assert json.loads((tmp_path / "n1").read_text())["problems"] == ["one"]
    assert await_reports(tmp_path, (*NODES, "n3"), timeout_s=0.1) == [first, *others]


def on_two_nodes() -> Config:
    return load(ROOT / "configs/quickstart.yaml", ["cluster.nodes=2", "cluster.interface=lo"])


def test_nodes_can_connect_only_while_the_first_listens() -> None:
    first, other, _ = reports()
    with listen_for_nodes(first, on_two_nodes()) as first:
        host, port = first.address
        assert (host, check_connection(other, first)) == ("127.0.0.1", other)
    unconnected = check_connection(other, first)
    assert unconnected.connection_error.startswith(f"cannot connect over lo to the first node at 127.0.0.1:{port}: ")
    last = reports()[2]
    assert find_objection([first, unconnected, last], NODES, RUN, 60) == Objection(
        "failed", f"node n1: {unconnected.connection_error}", ["n1"]
    )
    both = [first, unconnected, replace(last, connection_error=unconnected.connection_error)]
    assert find_objection(both, NODES, RUN, 60).bad_nodes == ["n0"]


def test_first_node_accepts_hundreds_of_connections() -> None:
    nodes = 300
    config = load(ROOT / "configs/quickstart.yaml", [f"cluster.nodes={nodes}", "cluster.interface=lo"])
    with listen_for_nodes(reports()[0], config) as first, ExitStack() as connections:
        for _ in range(nodes - 1):
            connections.enter_context(socket.create_connection(first.address, timeout=WAIT_S))


def test_missing_interface_is_a_problem_of_the_first_node() -> None:
    config = load(ROOT / "configs/quickstart.yaml", ["cluster.nodes=2", "cluster.interface=ib7"])
    with listen_for_nodes(reports()[0], config) as first:
        assert first.address is None
    assert first.problems[0].startswith("cluster.interface=ib7: this node has no interface of that name")
    assert check_connection(reports()[1], first) == reports()[1]


def test_report_lists_missing_paths_and_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report covers GPUs, the disk and each path of the recipe. Names without a path are not checked."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(machine, "MIN_DISK_GIB", 2**40)
    monkeypatch.setattr(machine, "FULL_GIB", 2**40)
    (tmp_path / "there.py").touch()
    functions = f"[{{function: {tmp_path}/there.py:f}}, {{function: /no/such.py:f}}, {{function: exact_match}}]"
    keys = ["model.path=/no/model", "data.source=/no/data.jsonl", f"rewards.functions={functions}"]
    config = load(ROOT / "configs/quickstart.yaml", [*keys, "rewards.judge=/no/judge.py:f"])
    report = examine_node("n0", tmp_path, Job("/", nodes=1, gpus=8, stalled=3), config)
    assert [line.split(":")[0] for line in report.missing] == [
        "model.path=/no/model",
        "data.source=/no/data.jsonl",
        "rewards.functions=/no/such.py",
        "rewards.judge=/no/judge.py",
        f"run.folder={config.run.folder}",
    ]
    assert "found 2 GPUs, but the run needs 8 per node" in report.problems
    assert any(line.startswith("temporary files: ") and "GiB free" in line for line in report.problems)
    assert {"python", "megarl", "torch", "nvidia-nccl-cu13"} <= report.versions.keys()


@pytest.mark.parametrize(("visible", "count"), [("0,1,2,3", 4), ("GPU-aa,GPU-bb", 2), ("", 0)])
def test_gpu_count_follows_visible_devices(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_gpus() == count
