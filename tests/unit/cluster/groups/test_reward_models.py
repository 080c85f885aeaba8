"""Reward engines that are lost while they score samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.groups import replicas
from megarl.cluster.groups.reward_models import RewardEngineGroup
from megarl.cluster.pending import Answers, Pending, ready
from megarl.cluster.placement import Process
from megarl.config.load import load
from megarl.core import device
from megarl.core.errors import RunFailure
from megarl.core.sample import SampleRef
from megarl.rollout.router import RESTARTS
from tests.paths import QUICKSTART

DIED = object()
"""The result of a call to a lost process."""


class Cluster:
    """A Session and its reward engines, whose calls run when a caller waits for them."""

    logs, node_of = Path("logs"), None
    trace = SimpleNamespace(add=lambda task, answers: answers.values)

    def __init__(self) -> None:
        self.num_deaths: dict[str, int] = {}
        """Engine -> number of its next scoring calls in which it dies."""
        self.scored: list[tuple[str, list[str]]] = []
        """The engine and the samples of each call that returned scores."""
        self.launched: list[str] = []
        self.watched: set[str] = set()
        self.start_error: Exception | None = None
        self.is_up = False
        """Whether restarting engines have started, even if no caller waits for them."""

    def on_node(self, actor_class: Any, process: Process) -> Any:
        def launch(*_: Any) -> SimpleNamespace:
            self.launched.append(process.name)
            return SimpleNamespace(call=SimpleNamespace(options=lambda **_: self._method(process.name)))

        return SimpleNamespace(remote=launch)

    def _method(self, engine: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda method, *arguments: lambda: getattr(self, method)(engine, *arguments))

    def start(self, engine: str) -> None:
        if self.start_error is not None:
            raise self.start_error

    def score(self, engine: str, samples: list[SampleRef]) -> object:
        if self.num_deaths.get(engine, 0) > 0:
            self.num_deaths[engine] -= 1
            return DIED
        self.scored.append((engine, [sample.id for sample in samples]))
        return {sample.id: f"score of {sample.id}" for sample in samples}

    def watch(self, actors: Mapping[str, Any]) -> None:
        self.watched |= actors.keys()

    def unwatch(self, names: Collection[str]) -> None:
        self.watched -= set(names)

    def submit(self, calls: Mapping[str, Callable], phase: str, limit: str, may_fail: Collection[str] = ()) -> Pending:
        def run(_: None) -> Answers:
            self.is_up |= limit == "start"
            values = {name: call() for name, call in calls.items()}
            lost = {name for name, value in values.items() if value is DIED}
            assert lost <= set(may_fail), f"{phase}: the loss of {lost} ended the run"
            return Answers({name: value for name, value in values.items() if name not in lost}, lost)

        return ready(None).then(run)

    def wait(self, calls: list[Callable], num_returns: int, timeout: float) -> tuple[list, list]:
        assert (num_returns, timeout) == (len(calls), 0)
        return (calls, []) if self.is_up else ([], calls)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RewardEngineGroup, Cluster]]:
    """`start(num_engines, *overrides)` returns a RewardEngineGroup and its fake cluster."""

    def outcome(call: Callable) -> tuple[Any, Exception | None]:
        try:
            return call(), None
        except OSError as error:
            return None, error

    def make(num_engines: int, *overrides: str) -> tuple[RewardEngineGroup, Cluster]:
        cluster = Cluster()
        monkeypatch.setattr(replicas, "ray", SimpleNamespace(wait=cluster.wait))
        monkeypatch.setattr(replicas, "outcome", outcome)
        keys = ["reward_model.path=r", "reward_model.engine=vllm", f"reward_model.layout.dp={num_engines}", *overrides]
        processes = [Process("reward-model", index, 1, devices=(index,)) for index in range(num_engines)]
        return RewardEngineGroup(cluster, load(QUICKSTART, keys), Path("r"), processes), cluster

    return make


SAMPLES = [SampleRef(f"{i}.{k}", f"{i}", 1, 1, 1, "stop", 0, 0) for i in range(4) for k in range(2)]
SCORES = {sample.id: f"score of {sample.id}" for sample in SAMPLES}


def test_samples_of_a_prompt_are_scored_by_one_engine(start):
    group, cluster = start(2)
    assert group.scores(SAMPLES).result() == SCORES
    assert cluster.scored == [
        ("reward-model-0", ["0.0", "0.1", "2.0", "2.1"]),
        ("reward-model-1", ["1.0", "1.1", "3.0", "3.1"]),
    ]
    assert group.scores([]).result() == {} and len(cluster.scored) == 2


def test_samples_of_a_lost_reward_engine_are_scored_again(start, capsys):
    group, cluster = start(2)
    cluster.num_deaths = {"reward-model-1": 1}
    assert group.scores(SAMPLES).result() == SCORES
    assert [name for name, _ in cluster.scored] == ["reward-model-0", "reward-model-0"]
    assert sorted(sample for _, samples in cluster.scored for sample in samples) == list(SCORES), "each exactly once"
    assert capsys.readouterr().out.strip() == (
        "rewards: reward-model-1 died and is being restarted. Continuing with 1 of 2 reward models. See "
        "logs/reward-model-1.log"
    )
    assert group.names == ["reward-model-0"] and cluster.launched[2:] == ["reward-model-1"]
    cluster.is_up = True
    assert group.scores(SAMPLES).result() == SCORES
    assert group.names == ["reward-model-0", "reward-model-1"] == sorted(name for name, _ in cluster.scored[2:])
    assert capsys.readouterr().out.strip() == "rewards: reward-model-1 rejoined. Continuing with 2 of 2 reward models"


def test_samples_wait_for_the_restart_of_the_only_reward_engine(start, capsys):
    group, cluster = start(1)
    assert not cluster.watched, "its loss does not end the run"
    cluster.num_deaths = {"reward-model-0": 2}
    assert group.scores(SAMPLES).result() == SCORES
    assert cluster.launched == 3 * ["reward-model-0"] and len(cluster.scored) == 1
    lost = (
        "rewards: reward-model-0 died and is being restarted. Waiting for reward-model-0. See logs/reward-model-0.log"
    )
    rejoined = "rewards: reward-model-0 rejoined. Continuing with 1 of 1 reward models"
    assert capsys.readouterr().out.splitlines() == 2 * [lost, rejoined]


def test_run_ends_if_the_only_reward_engine_dies_repeatedly(start):
    group, cluster = start(1)
    cluster.num_deaths = {"reward-model-0": RESTARTS + 1}
    with pytest.raises(RunFailure, match=r"^rewards: no reward model is left\. See logs$"):
        group.scores(SAMPLES).result()
    assert len(cluster.launched) == 1 + RESTARTS


def test_reward_engine_that_fails_to_restart_is_excluded(start, capsys):
    group, cluster = start(2)
    cluster.num_deaths = {"reward-model-0": 1}
    group.scores(SAMPLES).result()
    cluster.is_up, cluster.start_error = True, OSError("full")
    capsys.readouterr()
    assert group.scores(SAMPLES).result() == SCORES
    assert group.names == ["reward-model-1"]
    assert capsys.readouterr().out.strip() == (
        "restart of a lost reward model: reward-model-0: OSError: full. See logs/reward-model-0.log. Continuing with 1 "
        "of 2 reward models"
    )


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
def test_reward_engine_on_shared_gpus_is_not_restarted(start, monkeypatch, on_cuda: bool, placement: str):
    monkeypatch.setattr(device, "on_cuda", lambda: on_cuda)
    group, cluster = start(1, f"cluster.placement={placement}")
    restarts = placement == "disaggregated" or not on_cuda
    assert group.may_fail == (["reward-model-0"] if restarts else [])
    assert cluster.watched == (set() if restarts else {"reward-model-0"}), "its loss must end every wait"
