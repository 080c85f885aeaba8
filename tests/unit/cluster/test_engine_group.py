from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster import vllm_group
from megarl.cluster.engine_group import EngineGroup
from megarl.cluster.placement import Process
from megarl.config.load import load

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


class FakeActor:
    """An engine that answers every request with its name; a call is run when it is waited for."""

    seen: dict[str, list[str]]

    def __init__(self, name: str):
        self.generate = SimpleNamespace(remote=lambda requests: lambda: self._answer(name, requests))

    def _answer(self, name: str, requests: list[str]) -> list[str]:
        FakeActor.seen[name] = requests
        return [f"{request} by {name}" for request in requests]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch):
    """start(replicas): an EngineGroup of such engines."""
    FakeActor.seen = {}
    options = SimpleNamespace(remote=lambda config, folder, process, *_: FakeActor(process.name))
    monkeypatch.setattr(EngineGroup, "actor_class", SimpleNamespace(options=lambda **_: options))
    monkeypatch.setattr(vllm_group, "ray", SimpleNamespace(cluster_resources=dict))
    session = SimpleNamespace(
        logs=None,
        scratch=None,
        watch=lambda actors: None,
        wait=lambda calls, phase, meanwhile: [call() for call in calls.values()],
    )
    config = load(QUICKSTART)
    return lambda replicas: EngineGroup(
        session, config, Path("model"), [Process("engine", index, 1) for index in range(replicas)]
    )


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_samples_come_in_the_order_of_their_requests(start, replicas: int) -> None:
    groups = [[f"{i}.{k}" for k in range(length)] for i, length in enumerate((2, 3, 1, 4, 2))]
    answers = start(replicas).generate(groups)
    assert [[answer.split()[0] for answer in group] for group in answers] == groups


def test_a_group_stays_on_one_replica(start) -> None:
    start(2).generate([["a1", "a2"], ["b1", "b2"], ["c1", "c2"]])
    assert FakeActor.seen == {"engine-0": ["a1", "a2", "c1", "c2"], "engine-1": ["b1", "b2"]}


def test_fewer_groups_than_replicas(start) -> None:
    assert start(3).generate([["a"], ["b"]]) == [["a by engine-0"], ["b by engine-1"]]
