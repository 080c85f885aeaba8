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
    find_objection,
    look_at_node,
    num_gpus,
    reachable,
    reaching,
    send_report,
)
from megarl.planner.doctor import machine
from tests.paths import ROOT
from tests.timing import WAIT_S

NODES, RUN = ("n0", "n1", "n2"), Path("/shared/runs/a")
SAME = {"torch": "2.13.0", "ray": "2.52.1"}


def reports(**problems: list[str]) -> list[NodeReport]:
    return [NodeReport(node, problems.get(node, []), [], SAME) for node in NODES]


def test_nodes_without_problems() -> None:
    assert find_objection(reports(), NODES, RUN, 60) is None


def test_what_is_wrong_on_some_nodes_makes_them_bad() -> None:
    found = find_objection(reports(n1=["7 GPUs, and the run takes 8 of each node"]), NODES, RUN, 60)
    assert found == Objection("failed", "node n1: 7 GPUs, and the run takes 8 of each node", ["n1"])


def test_what_is_wrong_on_all_is_an_error_of_the_user() -> None:
    everywhere = "model.path=/m: there is no such folder"
    found = find_objection(reports(n0=[everywhere], n1=[everywhere, "disk"], n2=[everywhere]), NODES, RUN, 60)
    assert found == Objection("user_error", f"on all nodes: {everywhere}")
    one = [NodeReport("n0", [], [everywhere], SAME)]
    assert find_objection(one, ["n0"], RUN, 60) == Objection("user_error", f"on all nodes: {everywhere}")


def test_faults_of_one_or_two_nodes_are_not_the_users() -> None:
    one = [NodeReport("n0", ["7 GPUs"], [], SAME)]
    assert find_objection(one, ["n0"], RUN, 60) == Objection("failed", "node n0: 7 GPUs", ["n0"])
    silent = find_objection(one, ["n0", "n1"], RUN, 60)
    assert (silent.verdict, silent.bad) == ("failed", ["n1"])


def test_the_node_with_other_versions_is_the_bad_one() -> None:
    older = NodeReport("n0", [], [], SAME | {"torch": "2.12.0"})
    found = find_objection([older, *reports()[1:]], NODES, RUN, 60)
    assert found == Objection("failed", "node n0: torch is 2.12.0, elsewhere 2.13.0", ["n0"])


def test_a_silent_node_is_bad_and_files_that_only_the_first_has_are_an_error_of_the_user() -> None:
    one_silent = find_objection(reports()[:2], NODES, RUN, 60)
    assert one_silent == Objection(
        "failed", f"node n2: nothing heard in 60 s: down, or without the files in {RUN}", ["n2"]
    )
    all_silent = find_objection(reports()[:1], NODES, RUN, 60)
    assert (all_silent.verdict, all_silent.bad) == ("user_error", ["n1", "n2"])


def test_reports_travel_by_files_and_are_waited_for(tmp_path: Path) -> None:
    first, *others = reports(n1=["one"])
    send_report(tmp_path, first)
    later = threading.Timer(0.3, lambda: [send_report(tmp_path, each) for each in others])
    later.start()
    assert await_reports(tmp_path, NODES, timeout_s=WAIT_S) == [first, *others]
    assert json.loads((tmp_path / "n1").read_text())["problems"] == ["one"]
    assert await_reports(tmp_path, (*NODES, "n3"), timeout_s=0.1) == [first, *others]


def on_two_nodes() -> Config:
    return load(ROOT / "configs/quickstart.yaml", ["cluster.nodes=2", "cluster.interface=lo"])


def test_other_nodes_reach_the_first_one_while_it_waits_for_them() -> None:
    first, other, _ = reports()
    with reachable(first, on_two_nodes()) as first:
        host, port = first.address
        assert (host, reaching(other, first)) == ("127.0.0.1", other)
    cut_off = reaching(other, first)
    assert cut_off.cut_off.startswith(f"no connection over lo to 127.0.0.1, port {port}, of the first node: ")
    last = reports()[2]
    assert find_objection([first, cut_off, last], NODES, RUN, 60) == Objection(
        "failed", f"node n1: {cut_off.cut_off}", ["n1"]
    )
    both = [first, cut_off, replace(last, cut_off=cut_off.cut_off)]
    assert find_objection(both, NODES, RUN, 60).bad == ["n0"]


def test_a_first_node_hears_more_nodes_than_a_socket_usually_does() -> None:
    nodes = 300
    config = load(ROOT / "configs/quickstart.yaml", [f"cluster.nodes={nodes}", "cluster.interface=lo"])
    with reachable(reports()[0], config) as first, ExitStack() as connections:
        for _ in range(nodes - 1):
            connections.enter_context(socket.create_connection(first.address, timeout=1))


def test_a_first_node_without_the_interface_is_a_problem_of_it() -> None:
    config = load(ROOT / "configs/quickstart.yaml", ["cluster.nodes=2", "cluster.interface=ib7"])
    with reachable(reports()[0], config) as first:
        assert first.address is None
    assert first.problems[0].startswith("cluster.interface=ib7: this node has no such interface")
    assert reaching(reports()[1], first) == reports()[1]


def test_a_node_names_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs, the disk, and each file of the recipe; what is fetched by a name is not looked for."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(machine, "LEAST_DISK_GIB", 2**40)
    monkeypatch.setattr(machine, "FULL_GIB", 2**40)
    (tmp_path / "there.py").touch()
    functions = f"[{{function: {tmp_path}/there.py:f}}, {{function: /no/such.py:f}}, {{function: exact_match}}]"
    keys = ["model.path=/no/model", "data.source=/no/data.jsonl", f"rewards.functions={functions}"]
    config = load(ROOT / "configs/quickstart.yaml", [*keys, "rewards.judge=/no/judge.py:f"])
    report = look_at_node("n0", tmp_path, Job("/", nodes=1, gpus=8, stalled=3), config)
    assert [line.split(":")[0] for line in report.missing] == [
        "model.path=/no/model",
        "data.source=/no/data.jsonl",
        "rewards.functions=/no/such.py",
        "rewards.judge=/no/judge.py",
        f"run.folder={config.run.folder}",
    ]
    assert "2 GPUs, and the run takes 8 of each node" in report.problems
    assert any(line.startswith("temporary files: ") and "GiB free" in line for line in report.problems)
    assert {"python", "megarl", "torch", "nvidia-nccl-cu13"} <= report.versions.keys()


@pytest.mark.parametrize(("visible", "count"), [("0,1,2,3", 4), ("GPU-aa,GPU-bb", 2), ("", 0)])
def test_gpus_that_slurm_gives_a_task(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_gpus() == count
