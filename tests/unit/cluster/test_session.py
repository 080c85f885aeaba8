"""Waiting for results in a session, with a fake of Ray whose calls finish at given times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    OutOfMemoryError,
    RayTaskError,
    TaskUnschedulableError,
    WorkerCrashedError,
)

from megarl.cluster import pending as pending_module
from megarl.cluster import session as module
from megarl.cluster.failure import LostRanks
from megarl.cluster.object_store import object_store_mib
from megarl.cluster.pending import Answers, Pending, first, join
from megarl.cluster.placement import Node, Process
from megarl.cluster.session import CAUSE_S, RAYLET_S, SETTLE_S, Session
from megarl.config.cluster_schema import Timeouts
from megarl.config.load import load
from megarl.core.errors import RunFailure, UserError
from tests.paths import BASE

NEVER = float("inf")
SECONDS = {"start": 600, "rollout": 100, "rewards": 70, "passes": 60, "update": 100, "refit": 20, "checkpoint": 30}
TIMEOUTS = Timeouts(**SECONDS)


@dataclass(frozen=True, eq=False)
class Call:
    """A call that finishes at a given time of the fake's clock, with a result or an error."""

    at: float
    answer: Any = None


@dataclass
class FakeRay:
    now: float = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, calls: Sequence[Call], num_returns: int = 1, timeout: float = NEVER) -> tuple[list, list]:
        assert calls, "Ray rejects an empty list of calls"
        enough = sorted(call.at for call in calls)[num_returns - 1]
        self.now = max(self.now, min(enough, self.now + timeout))
        ready = [call for call in calls if call.at <= self.now][:num_returns]
        return ready, [call for call in calls if call not in ready]

    def get(self, calls: Call | list[Call], timeout: float | None = None) -> Any:
        if isinstance(calls, list):
            return [self.get(call) for call in calls]
        assert calls.at <= self.now
        if isinstance(calls.answer, Exception):
            raise calls.answer
        return calls.answer


@dataclass
class FakeActor:
    """A process that is alive until a time of the clock."""

    ray: FakeRay
    until: float = NEVER
    __ray_ready__: Any = field(init=False)

    def __post_init__(self) -> None:
        self.__ray_ready__ = SimpleNamespace(remote=self._ping)

    def _ping(self) -> Call:
        return Call(self.ray.now, ActorDiedError() if self.ray.now >= self.until else None)


@dataclass
class FakeMembers:
    """A run's nodes, n0 and so on. Ray detects lost nodes as late as a wait allows."""

    ray: FakeRay
    count: int = 1
    gone: list[int] = field(default_factory=list)
    spare: list[str] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return self.count

    def lost(self, patience_s: float = 0.0) -> list[int]:
        self.ray.sleep(patience_s if self.count > 1 else 0.0)
        return self.gone

    def name(self, number: int) -> str:
        return f"n{number}"

    def ray_id(self, number: int) -> str:
        return f"{number + 1:056x}"

    def spare_nodes(self) -> list[str]:
        return self.spare

    def replace(self, lost: Sequence[int]) -> None:
        self.replaced += lost


class FakeWatchdog:
    phase = ""
    checks = 0

    def check(self) -> None:
        self.checks += 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    for each in (module, pending_module):
        monkeypatch.setattr(each, "ray", fake)
        monkeypatch.setattr(each, "time", SimpleNamespace(monotonic=lambda: fake.now, sleep=fake.sleep))
    return fake


@pytest.fixture
def session(ray: FakeRay) -> Session:
    session = Session.__new__(Session)  # without Ray
    session.logs = Path("/logs")
    session._timeouts = TIMEOUTS
    session._watched = {name: FakeActor(ray) for name in ("trainer-0", "trainer-1", "engine-0")}
    session._replaceable = {}
    session._watchdog = FakeWatchdog()
    session.members, session._placed = FakeMembers(ray), {}
    session._pending, session._rendezvous = [], None
    return session


def results(
    session: Session, calls: dict[str, Call], phase: str, meanwhile: Callable[[], object] | None = None
) -> list:
    return list(session.submit(calls, phase, "update").result(meanwhile).values.values())


def test_results_are_in_the_order_of_the_calls(session: Session) -> None:
    calls = {"trainer-0": Call(30, "first"), "trainer-1": Call(2, "second"), "engine-0": Call(10, "third")}
    assert results(session, calls, "update") == ["first", "second", "third"]
    assert session._watchdog.phase == "update"


@pytest.mark.parametrize(("limit", "seconds"), SECONDS.items())
def test_timeout_names_missing_processes_and_its_key(session: Session, ray: FakeRay, limit: str, seconds: int) -> None:
    calls = {"trainer-0": Call(1), "trainer-1": Call(NEVER), "engine-0": Call(NEVER)}
    message = (
        f"a phase: no response from trainer-1, engine-0 within {seconds} s. See /logs. Fix: if they only need more "
        "time, raise "
    )
    with pytest.raises(RunFailure, match=f"^{message}cluster.timeouts.{limit}$"):
        session.submit(calls, "a phase", limit).result()
    assert ray.now == seconds


def test_callback_runs_during_a_long_wait(session: Session, ray: FakeRay) -> None:
    done = []

    def meanwhile() -> None:
        done.append((ray.now, *results(session, {"trainer-0": Call(ray.now, "written")}, "state of the checkpoint")))

    assert results(session, {"engine-0": Call(12, "samples")}, "rollout", meanwhile) == ["samples"]
    assert done == [(5, "written"), (10, "written")]
    assert session._watchdog.phase == "rollout"
    done.clear()
    results(session, {"engine-0": Call(ray.now + 4, "samples")}, "rollout", meanwhile)
    assert not done, "a short wait is not made longer"


def test_lost_process_is_the_cause_of_earlier_peer_errors(session: Session) -> None:
    calls = {"trainer-0": Call(3, RayTaskError("f", "", RuntimeError("reset"))), "trainer-1": Call(5, ActorDiedError())}
    with pytest.raises(RunFailure, match=r"^update: trainer-1 died. See /logs/trainer-1.log$"):
        results(session, calls, "update")
    assert session._watchdog.checks == 1, "the loss of Ray itself would be the cause"


def test_user_error_is_raised_at_once(session: Session, ray: FakeRay) -> None:
    with pytest.raises(UserError, match=r"^no such function$"):
        results(session, {"engine-0": Call(3, RayTaskError("f", "", UserError("no such function")))}, "reward start")
    assert ray.now == 3


def test_loss_of_an_unrelated_process_ends_the_wait(session: Session, ray: FakeRay) -> None:
    session._watched["engine-0"].until = 20
    with pytest.raises(RunFailure, match=r"^update: engine-0 died. See /logs/engine-0.log$"):
        results(session, {"trainer-0": Call(NEVER), "trainer-1": Call(4)}, "update")
    assert 20 <= ray.now < 35


def test_loss_of_an_unrelated_process_is_the_cause(session: Session) -> None:
    session._watched["engine-0"].until = 1
    with pytest.raises(RunFailure, match=r"^update: engine-0 died. See /logs/engine-0.log$"):
        results(session, {"trainer-0": Call(2, RayTaskError("f", "", KeyError("its sample is gone")))}, "update")


RESET = RayTaskError("f", "", RuntimeError("Connection closed by peer"))


@pytest.fixture
def replaceable(session: Session) -> Session:
    """A session in which the loss of a trainer is not final."""
    session._replaceable = {name: session._watched.pop(name) for name in ("trainer-0", "trainer-1")}
    return session


def lose_a_rank(session: Session) -> Pending:
    """Wait for an update in which trainer-1 dies, while an engine samples. Return the engine's call."""
    rollout = session.submit({"engine-0": Call(40, "samples")}, "rollout", "rollout")
    calls = {"trainer-0": Call(3, RESET), "trainer-1": Call(4, ActorDiedError())}
    with pytest.raises(LostRanks, match=r"^update: trainer-1 died. See /logs/trainer-1.log$"):
        results(session, calls, "update")
    return rollout


def test_lost_ranks_do_not_end_other_calls(replaceable: Session, ray: FakeRay) -> None:
    assert lose_a_rank(replaceable).result() == Answers({"engine-0": "samples"}, set())
    assert ray.now == 40


def test_loss_waits_for_peers_but_not_for_engines(replaceable: Session, ray: FakeRay) -> None:
    sampling = replaceable.submit({"engine-0": Call(90, "samples")}, "rollout", "rollout")
    with pytest.raises(LostRanks, match=r"^update: trainer-1 died."):
        results(replaceable, {"trainer-0": Call(2, RESET), "trainer-1": Call(2.5, ActorDiedError())}, "update")
    assert ray.now < 2 + SETTLE_S
    assert sampling.result() == Answers({"engine-0": "samples"}, set())


def test_ranks_that_wait_for_a_lost_one_are_not_awaited(replaceable: Session, ray: FakeRay) -> None:
    calls = {"trainer-0": Call(2, RESET), "trainer-1": Call(2.5, ActorDiedError()), "trainer-2": Call(NEVER)}
    with pytest.raises(LostRanks, match=r"^update: trainer-1 died."):
        results(replaceable, calls, "update")
    assert ray.now == 2.5 + RAYLET_S


@pytest.mark.parametrize("seconds", [1, SETTLE_S + 5], ids=["early", "late"])
def test_tolerated_loss_does_not_hide_that_of_a_rank(replaceable: Session, seconds: float) -> None:
    """An engine that may fail is lost just before a rank, and other ranks report closed connections first."""
    engines = {"engine-0": Call(1.9, ActorDiedError()), "engine-1": Call(40, "samples")}
    rollout = replaceable.submit(engines, "rollout", "rollout", may_fail=["engine-0"])
    with pytest.raises(LostRanks, match=r"^update: trainer-1 died."):
        results(replaceable, {"trainer-0": Call(2, RESET), "trainer-1": Call(2 + seconds, ActorDiedError())}, "update")
    assert rollout.result() == Answers({"engine-1": "samples"}, {"engine-0"})


def test_pending_calls_of_lost_ranks_are_forgotten(replaceable: Session, ray: FakeRay) -> None:
    """A rank that waits for the lost one never returns, which must not fail a later wait."""
    replaceable.submit({"trainer-0": Call(NEVER), "trainer-1": Call(NEVER)}, "passes", "passes")
    lose_a_rank(replaceable).result()
    ray.now = SECONDS["passes"] + 1.0
    assert results(replaceable, {"engine-0": Call(ray.now + 1, "refitted")}, "refit") == ["refitted"]


def test_loss_of_an_idle_rank_explains_peer_errors(replaceable: Session) -> None:
    """The lost rank has no call, because its own part of the update has already returned."""
    replaceable._replaceable["trainer-1"].until = 1
    with pytest.raises(LostRanks, match=r"^update: trainer-1 died."):
        results(replaceable, {"trainer-0": Call(2, RESET)}, "update")


def test_late_loss_explains_peer_errors(session: Session, ray: FakeRay) -> None:
    """An engine that has lost a rank on another node takes a while to exit."""
    calls = {"trainer-0": Call(2, RESET), "trainer-1": Call(3, RESET), "engine-0": Call(20, ActorDiedError())}
    with pytest.raises(RunFailure, match=r"^refit: engine-0 died. See /logs/engine-0.log$"):
        results(session, calls, "refit")
    assert 20 <= ray.now < 23


def test_error_without_a_cause_ends_the_wait(session: Session, ray: FakeRay) -> None:
    calls = {"trainer-0": Call(2, RESET), "trainer-1": Call(NEVER)}
    with pytest.raises(RunFailure, match=r"^update: trainer-0: RuntimeError: Connection closed by peer"):
        results(session, calls, "update")
    assert CAUSE_S <= ray.now < 2 + SETTLE_S + CAUSE_S + 3


def test_idle_rank_may_be_lost_during_other_waits(replaceable: Session) -> None:
    replaceable._replaceable["trainer-1"].until = 1
    assert results(replaceable, {"engine-0": Call(20, "samples")}, "rollout") == ["samples"]


def test_overdue_ranks_count_as_lost(replaceable: Session) -> None:
    with pytest.raises(LostRanks, match=r"^update: no response from trainer-1 within 100 s"):
        results(replaceable, {"trainer-0": Call(1), "trainer-1": Call(NEVER)}, "update")
    with pytest.raises(RunFailure, match=r"^update: no response from engine-0 within 100 s") as error:
        results(replaceable, {"trainer-0": Call(1), "engine-0": Call(NEVER)}, "update")
    assert not isinstance(error.value, LostRanks)


@pytest.mark.parametrize(
    "other",
    [ActorDiedError(), RayTaskError("f", "", UserError("no such function"))],
    ids=["lost engine", "user's error"],
)
def test_other_failures_beside_a_lost_rank_end_the_run(replaceable: Session, other: Exception) -> None:
    calls = {"trainer-0": Call(3, ActorDiedError()), "engine-0": Call(3, other)}
    with pytest.raises((RunFailure, UserError)) as error:
        results(replaceable, calls, "refit")
    assert not isinstance(error.value, LostRanks)


@pytest.fixture
def nodes(replaceable: Session) -> Session:
    """A session in which an engine runs on node 1, and a trainer on each of nodes 2 and 3. Node 3 is lost."""
    replaceable.members.count, replaceable.members.gone = 4, [3]
    for number, process in ((1, "engine-0"), (2, "trainer-0"), (3, "trainer-1")):
        role, index = process.split("-")
        replaceable.node_of(Process(role, int(index), 1, Node(number, range(number, number + 1), 1)))
    replaceable._rendezvous = SimpleNamespace(noted=[], note_lost=lambda names: noted(replaceable).extend(names))
    return replaceable


def noted(session: Session) -> list[str]:
    return session._rendezvous.noted


def lose_a_node(session: Session, **others: Any) -> RunFailure:
    calls = {"trainer-0": Call(3, RESET), "trainer-1": Call(4, ActorDiedError()), **others}
    with pytest.raises(RunFailure) as error:
        results(session, calls, "update")
    return error.value


def test_spare_node_makes_a_lost_node_replaceable(nodes: Session, ray: FakeRay) -> None:
    nodes.members.spare = ["n4"]
    rollout = nodes.submit({"engine-0": Call(90, "samples")}, "rollout", "rollout")
    loss = lose_a_node(nodes)
    assert isinstance(loss, LostRanks) and str(loss) == "update: lost node n3. See /logs"
    assert noted(nodes) == ["n3"] and nodes.members.replaced == []
    assert nodes.replace_lost_nodes() == [3]
    assert nodes.members.replaced == [3]
    assert rollout.result() == Answers({"engine-0": "samples"}, set())


def test_without_lost_nodes_none_is_replaced(nodes: Session) -> None:
    nodes.members.gone = []
    nodes.replace_lost_nodes()
    assert nodes.members.replaced == [] and noted(nodes) == []


@pytest.mark.parametrize(("lost", "spares"), [([3], 0), ([2, 3], 1)])
def test_missing_spare_nodes_are_named(nodes: Session, lost: list[int], spares: int) -> None:
    nodes.members.gone, nodes.members.spare = lost, ["n4"][:spares]
    names = ", ".join(f"node n{number}" for number in lost)
    expected = (
        f"lost {names}. See /logs. {spares} of {len(lost)} required spare nodes have joined the run. Fix: replace "
        "these nodes and resume the run"
    )
    failure = lose_a_node(nodes)
    assert not isinstance(failure, LostRanks) and str(failure) == f"update: {expected}"
    with pytest.raises(RunFailure, match=f"^{expected}$"):
        nodes.replace_lost_nodes()


def test_node_with_other_processes_is_not_replaced(nodes: Session) -> None:
    nodes.members.gone, nodes.members.spare = [1, 3], ["n4", "n5"]
    failure = lose_a_node(nodes)
    assert not isinstance(failure, LostRanks)
    assert "of trained models, but engine-0 also ran there. Fix: " in str(failure)
    with pytest.raises(RunFailure, match="engine-0 also ran there"):
        nodes.replace_lost_nodes()


@pytest.mark.parametrize(
    "other",
    [ActorDiedError(), RayTaskError("f", "", UserError("no such function"))],
    ids=["lost engine", "user's error"],
)
def test_node_lost_beside_other_failures_ends_the_run(nodes: Session, other: Exception) -> None:
    nodes.members.spare = ["n4"]
    failure = lose_a_node(nodes, **{"engine-0": Call(3, other)})
    assert not isinstance(failure, LostRanks)
    assert str(failure) == "update: lost node n3. See /logs. Fix: replace these nodes and resume the run"


def test_engine_errors_follow_from_a_lost_node(nodes: Session) -> None:
    """An engine that receives weights from a lost node fails, but is not lost."""
    nodes.members.spare = ["n4"]
    assert isinstance(lose_a_node(nodes, **{"engine-0": Call(3, RESET)}), LostRanks)


def test_processes_that_no_spare_node_takes_over_are_named(nodes: Session) -> None:
    assert nodes.not_replaceable([3]) == nodes.not_replaceable([2, 3]) == []
    assert nodes.not_replaceable([1, 3]) == ["engine-0"]
    assert nodes.not_replaceable([0])[0] == "the driver"


MAY_FAIL = ("engine-0", "engine-1")


@pytest.mark.parametrize(
    "loss",
    [ActorDiedError(), OutOfMemoryError("low on memory"), WorkerCrashedError(), TaskUnschedulableError("node died")],
)
def test_process_that_may_fail_may_be_lost(session: Session, ray: FakeRay, loss: Exception) -> None:
    calls = {"engine-0": Call(1, loss), "engine-1": Call(40, "samples")}
    assert session.submit(calls, "rollout", "rollout", may_fail=MAY_FAIL).result() == Answers(
        {"engine-1": "samples"}, {"engine-0"}
    )
    assert ray.now == 40, "the other engine's call has finished"


def test_peer_errors_after_a_tolerated_loss_are_ignored(session: Session) -> None:
    """Errors of peers are ignored even if they arrive before the loss itself."""
    reset = RayTaskError("f", "", RuntimeError("Connection closed by peer"))
    calls = {"trainer-0": Call(1, reset), "engine-0": Call(2, ActorDiedError()), "engine-1": Call(9, reset)}
    assert session.submit(calls, "refit", "refit", may_fail=MAY_FAIL).result() == Answers({}, {"engine-0"})


def test_loss_on_another_node_may_be_noticed_late(session: Session) -> None:
    """The loss is noticed while the session waits for Ray to report a lost node."""
    session.members.count = 2
    reset = RayTaskError("f", "", RuntimeError("Connection closed by peer"))
    calls = {"trainer-0": Call(1, reset), "engine-0": Call(10, ActorDiedError()), "engine-1": Call(19, "refitted")}
    answers = session.submit(calls, "refit", "refit", may_fail=MAY_FAIL).result()
    assert answers == Answers({"engine-1": "refitted"}, {"engine-0"})


def test_error_of_a_process_that_may_fail_is_raised(session: Session) -> None:
    calls = {"engine-0": Call(1, RayTaskError("f", "", KeyError("w"))), "engine-1": Call(NEVER)}
    with pytest.raises(RunFailure, match=r"^refit: engine-0: KeyError: 'w'. See /logs/engine-0.log$"):
        session.submit(calls, "refit", "refit", may_fail=MAY_FAIL).result()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ActorDiedError(), "refit: trainer-0 died. See /logs/trainer-0.log"),
        (RayTaskError("f", "", UserError("no such tensor")), "no such tensor"),
    ],
)
def test_tolerated_loss_does_not_hide_another_failure(session: Session, error: Exception, message: str) -> None:
    calls = {"engine-0": Call(1, ActorDiedError()), "trainer-0": Call(2, error), "engine-1": Call(NEVER)}
    with pytest.raises((RunFailure, UserError), match=f"^{message}$"):
        session.submit(calls, "refit", "refit", may_fail=MAY_FAIL).result()


def test_timeout_still_applies_after_a_tolerated_loss(session: Session) -> None:
    calls = {"engine-0": Call(1, ActorDiedError()), "engine-1": Call(NEVER)}
    with pytest.raises(
        RunFailure,
        match=r"^rollout: no response from engine-1 within 100 s\. See /logs\. Fix: .* raise cluster.timeouts.rollout$",
    ):
        session.submit(calls, "rollout", "rollout", may_fail=MAY_FAIL).result()


def test_pending_results_may_be_awaited_in_any_order(session: Session, ray: FakeRay) -> None:
    slow, fast = (
        session.submit({name: Call(at, name)}, name, "update") for name, at in (("trainer-0", 30), ("engine-0", 10))
    )
    assert first([slow, fast]) is fast
    assert ray.now == 10
    assert not slow.advance() and fast.result().values == {"engine-0": "engine-0"}
    assert slow.result().values == {"trainer-0": "trainer-0"}
    assert ray.now == 30, "they ran concurrently"


def test_follow_up_calls_belong_to_the_pending_result(session: Session, ray: FakeRay) -> None:
    def start(answers: Answers):
        return session.submit({"trainer-1": Call(ray.now + 5, answers.values["trainer-0"] + 1)}, "start", "start")

    pending = (
        session.submit({"trainer-0": Call(2, 7)}, "address", "start").then(start).then(lambda a: a.values["trainer-1"])
    )
    other = session.submit({"engine-0": Call(20)}, "rollout", "rollout")
    assert first([other, pending]) is pending
    assert (pending.result(), ray.now) == (8, 7)


def test_empty_pending_result_may_have_follow_up_calls(session: Session, ray: FakeRay) -> None:
    """A step without any pair has no updates, but still ends."""
    ended = session.submit({"trainer-0": Call(3, "ended")}, "end of step", "update")
    assert join([]).then(lambda metrics: ended.then(lambda _: metrics)).result() == []
    assert ray.now == 3


def test_failure_of_another_pending_result_ends_the_wait(session: Session, ray: FakeRay) -> None:
    session.submit({"trainer-1": Call(3, RayTaskError("f", "", KeyError("w")))}, "critic update", "update")
    with pytest.raises(RunFailure, match=r"^critic update: trainer-1: KeyError: 'w'. See /logs/trainer-1.log$"):
        session.submit({"trainer-0": Call(50)}, "actor update", "update").result()
    assert ray.now < 10


def test_most_specific_error_of_all_pending_is_raised(session: Session) -> None:
    reset = RayTaskError("f", "", RuntimeError("Connection closed by peer"))
    session.submit({"trainer-1": Call(4, ActorDiedError())}, "critic update", "update")
    with pytest.raises(RunFailure, match=r"^critic update: trainer-1 died. See /logs/trainer-1.log$"):
        session.submit({"trainer-0": Call(3, reset)}, "actor update", "update").result()


def test_timeout_of_another_pending_result_ends_the_wait(session: Session, ray: FakeRay) -> None:
    session.submit({"engine-0": Call(NEVER)}, "rollout", "refit")
    with pytest.raises(
        RunFailure,
        match=r"^rollout: no response from engine-0 within 20 s\. See /logs\. Fix: .* raise cluster.timeouts.refit$",
    ):
        session.submit({"trainer-0": Call(50)}, "update", "update").result()
    assert ray.now == 20


GIB = 2**30
STEP = (
    *("rollout.context_length=8192", "rollout.max_new_tokens=7168", "batch.samples_per_prompt=16"),
    *("batch.prompts_per_step=512", "batch.prompts_per_update=512"),
)


@pytest.mark.parametrize(
    ("overrides", "free", "expected"),
    [
        (STEP, 64 * GIB, None),  # as much as the batch requires
        (STEP, GIB, 9 * 1024 // 10 * 2**20),
        (STEP, 100 * 2**20, 256 * 2**20),
        ((*STEP, "cluster.object_store_mib=3000"), GIB, 3000 * 2**20),
    ],
)
def test_object_store_fits_the_batch_within_shared_memory(monkeypatch, overrides, free, expected):
    config = load(BASE, ["model.path=m", "data.source=arithmetic", *overrides])
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    expected = object_store_mib(config, None) * 2**20 if expected is None else expected
    assert module.object_store_bytes(config, None) == expected


def test_object_store_holds_the_encoded_images(monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 * GIB))
    config = load(BASE, ["model.path=m", "data.source=arithmetic", *STEP])
    empty, full = (module.object_store_bytes(config, None, encoded=encoded) for encoded in (0, GIB))
    assert full - empty == GIB
