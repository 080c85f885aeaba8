"""A rank's process before it uses its device."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megarl.cluster.groups import ranks
from megarl.cluster.groups.ranks import RankGroup
from megarl.cluster.pending import ready
from megarl.cluster.placement import Node, Process
from tests.paths import BASE, ROOT

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
PROGRAM = f"""
import json, os, sys
from pathlib import Path
from megarl.cluster.groups.ranks import RankActor
from megarl.cluster.placement import Process
from megarl.config.load import load

folder, (base, *keys) = Path(sys.argv[1]), sys.argv[2:-1]
for number, (layout, given) in enumerate(json.loads(sys.argv[-1])):
    if os.fork() == 0:
        os.environ.pop({VARIABLE!r}, None)
        os.environ.update({{}} if given is None else {{{VARIABLE!r}: given}})
        config = load(Path(base), [*keys, "actor.layout={{" + layout + "}}"])
        RankActor(config, "actor", folder, Process("trainer", 0, threads=1), folder)
        (folder / str(number)).write_text(os.environ.get({VARIABLE!r}, "unset"))
        os._exit(0)
    os.wait()
"""

CASES = [("tp: 2", None, "1"), ("cp: 2", None, "1"), ("pp: 2, dp: 2", None, "unset"), ("tp: 2", "8", "8")]
"""Layout, value of the variable in the user's environment, and value in the rank's."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The values in the ranks' environments. The ranks are forked from one process, because importing takes long."""
    folder = tmp_path_factory.mktemp("ranks")
    keys = ("model.path=m", "data.source=arithmetic")
    given = json.dumps([case[:2] for case in CASES])
    subprocess.run([sys.executable, "-c", PROGRAM, str(folder), str(BASE), *keys, given], cwd=ROOT, check=True)
    return [(folder / str(number)).read_text() for number in range(len(CASES))]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{layout}, {given}" for layout, given, _ in CASES])
def test_in_layer_parallelism_uses_one_device_connection(found: list[str], number: int) -> None:
    """The user's environment takes precedence."""
    assert found[number] == CASES[number][2]


def test_processes_on_lost_nodes_are_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Node(number, range(number, number + 1), 1) for number in range(3)]
    processes = {Process("trainer", node.number, 1, node): f"id {node.number}" for node in nodes}
    killed: list[str] = []
    submitted: dict[str, list[str]] = {}
    session = SimpleNamespace(
        members=SimpleNamespace(lost=lambda: [1]),
        node_of=lambda process: process.node.number,
        submit=lambda calls, *_: submitted.update(calls) or ready(None),
    )
    task = SimpleNamespace(
        options=lambda scheduling_strategy: SimpleNamespace(remote=lambda ids: (scheduling_strategy, ids))
    )
    monkeypatch.setattr(ranks, "ray", SimpleNamespace(kill=killed.append))
    monkeypatch.setattr(ranks, "_kill", task)
    group = RankGroup.__new__(RankGroup)  # without processes
    group.role, group._session, group._process_ids = "actor", session, processes
    group._actors = {process.name: process.name for process in processes}
    group._processes, dropped = list(processes), []
    group._spares = SimpleNamespace(drop=dropped.extend)
    group.kill()
    assert dropped == ["trainer-1"], "it would become a rank on the lost node"
    assert killed == ["trainer-0", "trainer-1", "trainer-2"]
    assert submitted == {"node 0": (0, ["id 0"]), "node 2": (2, ["id 2"])}


def test_spare_process_is_placed_as_its_rank() -> None:
    """A node with spare processes can be replaced, but they have logs of their own."""
    placed, started = [], []

    def on_node(_, process: Process) -> SimpleNamespace:
        placed.append(process.name)
        return SimpleNamespace(remote=lambda *arguments: started.append(arguments[-2].name))

    group = RankGroup.__new__(RankGroup)  # without processes
    group._session, group._arguments = SimpleNamespace(on_node=on_node, logs=None), ()
    group.actor_class = None
    group._create_spare(Process("trainer", 3, threads=1))
    assert (placed, started) == (["trainer-3"], ["spare-trainer-3"])
