"""Lost ranks are replaced with fakes of groups: the order of the steps, repeated losses and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster import recovery
from megarl.cluster.departures import DeviceState
from megarl.cluster.failure import LostRanks
from megarl.cluster.pending import Pending, ready
from megarl.cluster.recovery import MAX_REPLACEMENTS, Recovery
from megarl.cluster.trained_models import TrainedModels
from megarl.core.errors import RunFailure

GIB = 2**30
RESTART = ["actor kill", "disconnect", "replace nodes", "actor launch", "actor start"]


@dataclass
class Group:
    """A TrainerGroup that logs its calls. It loses a rank in the given calls, once each."""

    role: str
    log: list[str]
    offloads: frozenset[str] = frozenset()
    losing: list[str] = field(default_factory=list)
    problem: str = ""
    """Error with which copies fail, if any."""
    undelivered: str = ""
    """Error with which the delivery of copies to keepers fails, if any."""
    delivered: str = ""
    """Error of the delivery in progress."""
    is_copying: bool = False
    """Whether copies remain incomplete until `finish_copies` waits for them."""
    held: tuple[int, ...] = ()
    """Steps whose copies are complete on all ranks when the ranks are killed."""
    room: tuple[int, int] = (GIB, 9 * GIB)
    nodes: tuple[int, ...] = (0, 0)
    errors: dict[str, int] = field(default_factory=dict)
    """Error counts of the devices on node 1."""

    def _note(self, call: str, value: Any = None) -> Pending[Any]:
        self.log.append(f"{self.role} {call}")
        if call in self.losing:
            self.losing.remove(call)
            raise LostRanks(f"{self.role}-0 died.")
        return ready(value)

    def kill(self) -> None:
        self._note("kill").result()

    def launch(self) -> None:
        self._note("launch").result()

    def start(self) -> Pending[None]:
        return self._note("start")

    def copy_room(self) -> Pending[list[tuple[int, int]]]:
        return ready([self.room] * len(self.nodes))

    def copy_state(self, step: int) -> Pending[str]:
        return self._note(f"copy {step}", self.problem)

    def start_delivery(self, step: int, keepers: Sequence[int]) -> Pending[None]:
        self.delivered = self.undelivered
        return self._note(f"deliver {step}" + describe(keepers))

    def finish_copies(self, waits: bool) -> Pending[tuple[str, str] | None]:
        if "finish" in self.losing:
            return self._note("finish")
        if self.is_copying and not waits:
            return ready(None)
        delivered, self.delivered = self.delivered, ""
        return ready(("", delivered))

    def holds_copies(self, step: int) -> bool:
        return step in self.held

    def discard_copies(self) -> Pending[None]:
        return self._note("discard")

    def restore_state(self, step: int, keepers: Sequence[int]) -> Pending[None]:
        return self._note(f"restore {step}" + describe(keepers))

    def load_checkpoint(self, checkpoint: str) -> Pending[None]:
        return self._note(f"load {checkpoint}")

    @property
    def actors(self) -> dict[str, None]:
        return {f"{self.role}-{rank}": None for rank in range(len(self.nodes))}

    def examine_device(self) -> Pending[list[DeviceState]]:
        return ready([DeviceState(self.errors if node == 1 else {}, 1.0) for node in self.nodes])

    def offload(self, parts: Any) -> Pending[dict]:
        return self._note("offload", {})

    def onload(self, parts: Any) -> Pending[None]:
        return self._note("onload")


def describe(keepers: Sequence[int]) -> str:
    return f", kept by {list(keepers)}" if keepers else ""


@dataclass
class Members:
    """The nodes of a run, n0 and so on, with the names of spare nodes, and requests by node number."""

    log: list[str]
    requests: dict[int, str] = field(default_factory=dict)
    spares: list[str] = field(default_factory=list)
    lost_nodes: list[int] = field(default_factory=list)
    count: int = 3

    def __len__(self) -> int:
        return self.count

    def name(self, number: int) -> str:
        return f"n{number}"

    def lost(self) -> list[int]:
        return self.lost_nodes

    def spare_nodes(self) -> list[str]:
        return self.spares

    def leave_requests(self) -> dict[int, str]:
        return self.requests

    def dismiss(self, number: int) -> None:
        self.requests.pop(number, None)
        self.lost_nodes.append(number)
        self.log.append(f"dismiss {number}")


class Models:
    """Trained models with fakes of their groups."""

    def __init__(
        self, *groups: Group, checkpoint: str | None = None, shares_devices: bool = False, every_steps: int = 1
    ):
        self.log, self.spans = groups[0].log, []
        by_role = {group.role: group for group in groups}
        sharing = {role: [other for other in by_role if other != role] if shares_devices else [] for role in by_role}
        self.obstacle: RunFailure | None = None
        self.members = Members(self.log)
        self.others: list[str] = []
        """Processes that no spare node can take over."""
        session = SimpleNamespace(
            trace=SimpleNamespace(record=lambda name, *_: self.spans.append(name)),
            members=self.members,
            logs=Path("runs/tiny/logs/attempt_1"),
            replace_lost_nodes=self._replace_nodes,
            not_replaceable=lambda numbers: self.others,
        )
        self.recovery = Recovery(session, by_role, sharing, checkpoint, every_steps)
        self.recovery.disconnect.append(lambda: self.log.append("disconnect"))
        self.trained = TrainedModels(by_role, sharing, self.recovery)

    def _replace_nodes(self) -> list[int]:
        self.log.append("replace nodes")
        if self.obstacle is not None:
            raise self.obstacle
        lost, self.members.lost_nodes = self.members.lost_nodes, []
        return lost

    def end(self, step: int) -> None:
        """End a step. All copies complete during its refit, if the groups complete any."""
        self.trained.copy_state(step, lambda: self.log.append(f"repeat {step}"))
        self.trained.poll_copies()

    def run(self, *outcomes: Exception | None) -> int:
        """Attempt a task that has these outcomes, in order. Return the number of attempts."""
        done = 0
        for attempt in self.trained.attempts():
            with attempt:
                done += 1
                if (outcome := outcomes[done - 1]) is not None:
                    raise outcome
        return done


def loss() -> LostRanks:
    return LostRanks("update: actor-1 died. See actor-1.log")


def actor(**settings: Any) -> Group:
    return Group("actor", [], **settings)


def test_task_without_a_loss_runs_once() -> None:
    models = Models(actor())
    assert models.run(None) == 1
    assert models.log == [] and models.trained.take_metrics() == {}


def test_ranks_get_the_state_of_the_latest_copy(capsys: pytest.CaptureFixture[str]) -> None:
    models = Models(actor())
    for step in (4, 5):
        models.end(step)
    models.log.clear()
    assert models.run(loss(), None) == 2
    assert models.log == [*RESTART, "actor restore 5"]
    assert models.spans == ["recover"]
    output = capsys.readouterr().out
    assert (
        "recovery: replacing all ranks of the trained models. Cause: update: actor-1 died. See actor-1.log\n" in output
    )
    assert "and restored their state after step 5" in output
    metrics = models.trained.take_metrics()
    assert metrics["recovery/replacements"].value == 1 and metrics["time/recovery"].value >= 0
    assert models.trained.take_metrics() == {}


@pytest.mark.parametrize(("checkpoint", "loaded"), [(None, []), ("step_3", ["actor load step_3"])])
def test_first_step_repeats_from_the_initial_state(checkpoint: str | None, loaded: list[str]) -> None:
    models = Models(actor(), checkpoint=checkpoint)
    assert models.run(loss(), None) == 2
    assert models.log == [*RESTART, "actor discard", *loaded]


def test_failed_copy_leaves_the_earlier_one_in_use() -> None:
    group = actor(losing=["copy 5"])
    models = Models(group)
    models.end(4)
    copied = 0
    for attempt in models.trained.attempts():
        with attempt:
            copied += 1
            models.end(5)
    assert copied == 2
    assert "actor restore 4" in models.log and "actor restore 5" not in models.log


def test_steps_since_the_copy_are_trained_again(capsys: pytest.CaptureFixture[str]) -> None:
    models = Models(actor(), every_steps=3)
    models.end(1)
    assert models.run(loss(), None) == 2
    assert models.log == ["actor copy 1", *RESTART, "actor restore 1"], "the first step is copied in any case"
    models.end(2)
    models.log.clear()
    assert models.run(loss(), None) == 2
    assert models.log == [*RESTART, "actor restore 1", "repeat 2"]
    models.log.clear()
    for step in (3, 4, 5):
        models.end(step)
    assert models.log == ["actor copy 3"]
    models.log.clear()
    assert models.run(loss(), None) == 2
    assert models.log == [*RESTART, "actor restore 3", "repeat 4", "repeat 5"]
    assert models.spans == ["recover", "recover", "repeat step 2", "recover", "repeat step 4", "repeat step 5"]
    assert "recovery: trained step 5 again in " in capsys.readouterr().out
    models.end(6)
    models.log.clear()
    assert models.run(loss(), None) == 2
    assert models.log == [*RESTART, "actor restore 6"]


def test_loss_while_steps_are_trained_again_repeats_them() -> None:
    models = Models(actor(), every_steps=9)
    losses = [loss()]

    def repeat() -> None:
        models.log.append("repeat 2")
        if losses:
            raise losses.pop()

    models.end(1)
    models.trained.copy_state(2, repeat)
    models.log.clear()
    assert models.run(loss(), None) == 2
    assert models.log == [*RESTART, "actor restore 1", "repeat 2"] * 2


@pytest.mark.parametrize(
    ("held", "restored"),
    [
        ({"actor": (), "critic": ()}, ["restore 4", "repeat 5"]),
        ({"actor": (5,), "critic": ()}, ["restore 4", "repeat 5"]),
        ({"actor": (5,), "critic": (5,)}, ["restore 5"]),
    ],
    ids=["no rank", "one model", "all ranks"],
)
def test_incomplete_copies_are_not_used(held: dict[str, tuple[int, ...]], restored: list[str]) -> None:
    """Ranks are lost after some of them have completed their copies."""
    log: list[str] = []
    groups = [Group("actor", log), Group("critic", log)]
    models = Models(*groups)
    models.end(4)
    for group in groups:
        group.is_copying, group.held = True, held[group.role]
    models.end(5)
    log.clear()
    assert models.run(loss(), None) == 2
    expected = {f"{role} {call}" if "restore" in call else call for role in ("actor", "critic") for call in restored}
    assert {call for call in log if "restore" in call or "repeat" in call} == expected


def test_copies_end_before_the_next_ones_begin() -> None:
    group = actor(is_copying=True)
    models = Models(group)
    models.end(1)
    group.losing.append("finish")
    copied = 0
    for attempt in models.trained.attempts():
        with attempt:
            copied += 1
            models.end(2)
    assert copied == 2
    assert models.log == ["actor copy 1", "actor finish", *RESTART, "actor discard", "repeat 1", "actor copy 2"]


def test_step_waits_for_its_copies_if_engines_sleep() -> None:
    """When the engines wake up for the refit, no step may have to be repeated."""
    models = Models(actor(is_copying=True))
    models.trained = replace(models.trained, waits_for_copies=True)
    models.end(1)
    models.trained.await_copies()
    models.log.clear()
    assert models.run(loss(), None) == 2
    assert models.log == [*RESTART, "actor restore 1"]


@pytest.mark.parametrize(
    ("held", "restored"), [((), ["actor discard", "repeat 1"]), ((1,), ["actor restore 1"])], ids=["none", "complete"]
)
def test_rank_lost_while_the_step_waits_trains_once(held: tuple[int, ...], restored: list[str]) -> None:
    """The attempt that trains the step must not run again: the new ranks have the state after the step."""
    models = Models(actor(losing=["finish"], held=held))
    models.trained = replace(models.trained, waits_for_copies=True)
    for attempt in models.trained.attempts():
        with attempt:
            models.log.append("train 1")
            models.trained.copy_state(1, lambda: models.log.append("repeat 1"))
    models.trained.await_copies()
    assert models.log == ["train 1", "actor copy 1", "actor finish", *RESTART, *restored]


def test_full_memory_disables_replacement_temporarily(capsys: pytest.CaptureFixture[str]) -> None:
    group = actor()
    models = Models(group)
    models.end(4)
    group.problem = "/dev/shm: no room for 1.00 GiB."
    for step in (5, 6):
        models.end(step)
    with pytest.raises(LostRanks):
        models.run(loss())
    group.problem = ""
    models.end(7)
    assert models.run(loss(), None) == 2
    assert [line for line in group.log if "restore" in line] == ["actor restore 7"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("recovery: no copy after step 5") and group.log.count("actor kill") == 1
    assert lines[1] == "recovery: copied the state after step 7; lost ranks can be replaced again"


@pytest.mark.parametrize("call", ["start", "restore 1"])
def test_loss_during_a_replacement_replaces_again(call: str) -> None:
    group = actor()
    models = Models(group)
    models.end(1)
    group.losing += [call]
    assert models.run(loss(), None) == 2
    assert models.log.count("actor kill") == models.log.count("actor launch") == 2
    assert models.log[-1] == "actor restore 1"
    assert models.trained.take_metrics()["recovery/replacements"].value == 2


def test_models_on_shared_devices_load_one_at_a_time() -> None:
    log: list[str] = []
    offloads = frozenset({"optimizer"})
    models = Models(Group("actor", log, offloads), Group("critic", log, offloads), shares_devices=True)
    models.end(2)
    log.clear()
    assert models.run(loss(), None) == 2
    restored = [["launch", "start", "restore 2", "offload"] for _ in range(2)]
    expected = [f"{role} {call}" for role, calls in zip(("actor", "critic"), restored, strict=True) for call in calls]
    assert log == ["actor kill", "critic kill", "disconnect", "replace nodes", *expected]


def test_step_that_always_loses_a_rank_ends_the_run() -> None:
    models = Models(actor())
    models.end(1)
    with pytest.raises(
        RunFailure,
        match=f"lost again after {MAX_REPLACEMENTS} replacements in this step. Last cause: update: actor-1 died",
    ):
        models.run(*[loss()] * (MAX_REPLACEMENTS + 1))
    assert models.log.count("actor launch") == MAX_REPLACEMENTS


def test_limit_counts_losses_of_one_step() -> None:
    models = Models(actor())
    for step in range(3 * MAX_REPLACEMENTS):
        assert models.run(loss(), None) == 2
        models.end(step)


def test_other_failures_are_not_repeated() -> None:
    models = Models(actor())
    with pytest.raises(RunFailure, match=r"^no more memory$"):
        models.run(RunFailure("no more memory"), None)
    assert models.log == []


def test_ranks_are_not_replaced_without_room_for_copies(capsys: pytest.CaptureFixture[str]) -> None:
    """Both ranks are on one node, so their copies need 2 GiB of at most 1.75."""
    models = Models(actor(room=(GIB, 7 * GIB // 2)))
    models.end(1)
    models.end(2)
    assert models.log == []
    [line] = capsys.readouterr().out.splitlines()
    assert "need 2.00 GiB of shared memory on node number 0, more than half of its free 3.50 GiB" in line
    with pytest.raises(LostRanks):
        models.run(loss(), None)
    assert models.log == []


def test_ending_run_replaces_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models(actor())
    models.end(1)
    monkeypatch.setattr(recovery, "interrupts", SimpleNamespace(is_signaled=True))
    with pytest.raises(LostRanks):
        models.run(loss())
    assert models.log == ["actor copy 1"]


def test_room_is_counted_on_each_node() -> None:
    models = Models(actor(room=(GIB, 2 * GIB), nodes=(0, 1)))
    models.end(1)
    assert models.log == ["actor copy 1"]


def test_keepers_hold_copies_while_there_is_a_spare_node() -> None:
    models = Models(actor(nodes=(0, 0, 1, 1)))
    models.end(1)
    models.members.spares = ["n4"]
    models.end(2)
    models.run(loss(), None)
    models.members.spares = []
    models.end(3)
    models.run(loss(), None)
    copies = [call for call in models.log if "copy" in call or "restore" in call]
    kept = ", kept by [2, 3, 0, 1]"
    assert copies == [
        "actor copy 1",
        "actor copy 2",
        f"actor restore 2{kept}",
        "actor copy 3",
        "actor restore 3",
    ]
    assert [call for call in models.log if "deliver" in call] == [f"actor deliver 2{kept}"]


def test_full_keeper_only_disables_the_replacement_of_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    models = Models(actor(nodes=(0, 1), undelivered="/dev/shm: no room for 1.00 GiB."))
    models.members.spares = ["n4"]
    for step in (1, 2):
        models.end(step)
    assert models.log == ["actor copy 1", "actor deliver 1, kept by [1, 0]", "actor copy 2"]
    [line] = capsys.readouterr().out.splitlines()
    consequence = "recovery: no copies on other nodes, so the loss of a node ends the attempt. "
    assert line == f"{consequence}/dev/shm: no room for 1.00 GiB."
    assert models.run(loss(), None) == 2
    assert models.log[-1] == "actor restore 2"


def test_node_that_cannot_be_replaced_ends_the_run() -> None:
    models = Models(actor(nodes=(0, 1)))
    models.obstacle = RunFailure("lost node n1")
    models.end(1)
    with pytest.raises(RunFailure, match=r"^lost node n1$"):
        models.run(loss(), None)
    assert "actor launch" not in models.log


def test_node_with_all_copies_of_a_model_cannot_be_replaced() -> None:
    models = Models(actor(nodes=(1, 1)))
    models.members.spares, models.members.lost_nodes = ["n4"], [1]
    assert models.run(loss(), None) == 2, "before the first copy, no state is lost with the node"
    assert "actor launch" in models.log
    models.end(1)
    models.log.clear()
    assert models.run(loss(), None) == 2, "the death of a rank loses no copies"
    assert models.log[-1] == "actor restore 1"
    models.log.clear()
    models.members.lost_nodes = [1]
    expected = (
        r"actor-1\.log\. All ranks of the actor were on node n1, so no other node has a copy of their state\. Fix: "
        r"resume from the newest checkpoint with resume=auto$"
    )
    with pytest.raises(RunFailure, match=expected):
        models.run(loss(), None)
    assert models.log == ["actor kill"]


def test_keepers_hold_no_copies_without_room(capsys: pytest.CaptureFixture[str]) -> None:
    """Node 0 has room for its two ranks' copies, but not for those of the other node's rank, which it would keep."""
    models = Models(actor(nodes=(0, 0, 1), room=(GIB, 5 * GIB)))
    models.members.spares = ["n4"]
    for step in (1, 2):
        models.end(step)
    assert models.log == ["actor copy 1", "actor copy 2"]
    [line] = capsys.readouterr().out.splitlines()
    assert "need 3.00 GiB of shared memory on node number 0, more than half of its free 5.00 GiB, so the loss " in line
    assert "of a node ends the attempt" in line
    assert models.run(loss(), None) == 2
    assert models.log[-1] == "actor restore 2"


def test_models_without_recovery_have_one_attempt() -> None:
    trained = TrainedModels({}, {})
    with pytest.raises(LostRanks):
        for attempt in trained.attempts():
            with attempt:
                raise loss()
    trained.copy_state(1, lambda: None)
    trained.await_copies()
    trained.poll_copies()
    assert trained.take_metrics() == {}
    trained.replace_leaving_node()


@pytest.fixture
def connects(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of nodes that accept connections; tests may remove some."""
    names = ["n3", "n4"]
    monkeypatch.setattr(recovery, "accept_connections", lambda nodes: {*nodes} <= {*names})
    return names


def end_step(models: Models, step: int) -> list[str]:
    """Copy the state after a step, and replace a node that should leave. Return the calls after the copies."""
    models.end(step)
    models.log.clear()
    models.trained.replace_leaving_node()
    return [*models.log]


def test_spare_node_replaces_a_node_on_request(connects: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks continue with their state after the step."""
    models = Models(actor(nodes=(1, 2)))
    models.members.spares = ["n3"]
    assert end_step(models, 4) == []
    models.members.requests[2] = "maintenance"
    assert end_step(models, 5) == ["dismiss 2", *RESTART, "actor restore 5, kept by [1, 0]"]
    assert "Cause: node n2 leaves the run: maintenance\n" in capsys.readouterr().out
    metrics = models.trained.take_metrics()
    assert metrics["recovery/replacements"].value == 1 and models.spans == ["move"]
    assert end_step(models, 6) == []


def test_node_with_a_failing_device_is_replaced(connects: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    group = actor(nodes=(1, 2), errors={"pending row remaps": 0})
    models = Models(group)
    models.members.spares = ["n3", "n4"]
    assert end_step(models, 1) == []
    group.errors = {"pending row remaps": 1}
    assert "dismiss 1" in end_step(models, 2)
    assert (
        "Cause: node n1 leaves the run: the device of actor-0 has new pending row remaps\n" in capsys.readouterr().out
    )
    assert "dismiss 1" not in end_step(models, 3), "the spare node's devices have counted these errors before"


def test_devices_of_a_lost_node_are_forgotten(connects: list[str]) -> None:
    """The devices of the node that has taken its place have counted more errors, but before the run."""
    group = actor(nodes=(1, 2), errors={"pending row remaps": 0})
    models = Models(group)
    models.members.spares = ["n3", "n4"]
    end_step(models, 1)
    models.members.lost_nodes, group.errors = [1], {"pending row remaps": 1}
    assert models.run(loss(), None) == 2
    assert "dismiss 1" not in end_step(models, 2)


def test_only_one_node_leaves_in_a_step(connects: list[str]) -> None:
    """Each of two nodes may keep the only other copy of the other one's ranks. The third one has no ranks."""
    models = Models(actor(nodes=(0, 1, 2)))
    models.members.spares, models.members.requests = ["n3", "n4"], {1: "a", 2: "b", 5: "c"}
    for step, number in ((1, 1), (2, 2), (3, 5)):
        assert [call for call in end_step(models, step) if "dismiss" in call] == [f"dismiss {number}"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"spares": []}, "it has no spare node. Fix: run megarl join runs/tiny on another node"),
        ({"spares": ["n9"]}, "it has no spare node. Fix: run megarl join runs/tiny on another node"),
        (
            {"others": ["the driver", "engine-0"]},
            "no spare node can take over the driver, engine-0. Fix: end the run, and resume it on other nodes with "
            "resume=auto",
        ),
        (
            {"nodes": (1, 1)},
            "no spare node can take over all ranks of the actor. Fix: end the run, and resume it on other nodes with "
            "resume=auto",
        ),
        ({"undelivered": "no room."}, "copies on other nodes do not fit. Fix: enlarge /dev/shm"),
    ],
    ids=["no spare", "dead spare", "other processes", "all ranks", "full keeper"],
)
def test_node_that_cannot_leave_is_reported_once(
    changes: dict, line: str, connects: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    group = actor(nodes=changes.get("nodes", (1, 2)), undelivered=changes.get("undelivered", ""))
    models = Models(group)
    models.others = changes.get("others", [])
    models.members.spares, models.members.requests = changes.get("spares", ["n3"]), {1: "maintenance"}
    for step in (1, 2):
        assert end_step(models, step) == []
    lines = [line for line in capsys.readouterr().out.splitlines() if "n1" in line]
    assert lines == [f"recovery: node n1 should leave the run: maintenance. The run continues, because {line}"]


def test_node_leaves_when_a_spare_node_has_joined(connects: list[str]) -> None:
    """A spare that has joined since the copy has to wait: the copies are only on the ranks' own nodes."""
    models = Models(actor(nodes=(1, 2)))
    models.members.requests = {1: "maintenance"}
    models.end(1)
    models.members.spares = ["n3"]
    models.trained.replace_leaving_node()
    assert "dismiss 1" not in models.log
    assert "dismiss 1" in end_step(models, 2)


def test_leaving_node_waits_for_all_of_its_models(connects: list[str]) -> None:
    """The critic's copies were not delivered, because it has all of its ranks on the node."""
    log: list[str] = []
    models = Models(Group("actor", log, nodes=(1, 2)), Group("critic", log, nodes=(2, 2)))
    models.members.spares, models.members.requests = ["n3"], {2: "maintenance"}
    assert end_step(models, 1) == []
    models.members.requests = {1: "maintenance"}
    assert "dismiss 1" in end_step(models, 2)


def test_node_leaves_between_copies(connects: list[str]) -> None:
    """A copy is made before the interval has passed, because the node should leave."""
    models = Models(actor(nodes=(1, 2)), every_steps=9)
    models.members.spares = ["n3"]
    assert end_step(models, 1) == []
    models.members.requests = {1: "maintenance"}
    assert end_step(models, 2) == ["dismiss 1", *RESTART, "actor restore 2, kept by [1, 0]"]


def test_node_that_cannot_leave_causes_one_copy(connects: list[str]) -> None:
    models = Models(actor(nodes=(1, 2)), every_steps=9)
    models.members.requests = {1: "maintenance"}
    for step in (1, 2, 3):
        models.end(step)
        models.trained.replace_leaving_node()
    assert models.log == ["actor copy 1"]
    models.members.spares = ["n3"]
    assert end_step(models, 4) == [], "the state after this step is not copied"
    assert "dismiss 1" in end_step(models, 5)


def test_devices_are_examined_before_the_copy_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed probe must not compete with the copy."""
    group = actor()
    models, examine = Models(group), group.examine_device
    monkeypatch.setattr(group, "examine_device", lambda: group.log.append("actor examine") or examine())
    models.end(1)
    models.trained.replace_leaving_node()
    assert models.log == ["actor examine", "actor copy 1"]
    models.members.count = 1
    models.end(2)
    assert models.log[2:] == ["actor copy 2"]


def test_node_that_must_leave_waits_for_the_copies(connects: list[str]) -> None:
    models = Models(actor(nodes=(1, 2), is_copying=True))
    models.members.spares, models.members.requests = ["n3"], {1: "maintenance"}
    assert "dismiss 1" in end_step(models, 1)


def test_rank_lost_before_a_node_leaves_repeats_no_step(connects: list[str]) -> None:
    group = actor(nodes=(1, 2), held=(1,), is_copying=True)
    models = Models(group)
    models.members.spares, models.members.requests = ["n3"], {1: "maintenance"}
    models.end(1)
    models.log.clear()
    group.losing.append("finish")
    models.trained.replace_leaving_node()
    assert models.log == ["actor finish", *RESTART, "actor restore 1, kept by [1, 0]"]
    assert "dismiss 1" in end_step(models, 2), "the copies are delivered again"


def test_further_loss_while_a_node_leaves_replaces_again(connects: list[str]) -> None:
    models = Models(actor(nodes=(1, 2), losing=["start"]))
    models.members.spares, models.members.requests = ["n3"], {1: "maintenance"}
    calls = end_step(models, 1)
    assert calls.count("dismiss 1") == 1 and calls.count("actor kill") == 2
    assert calls[-1] == "actor restore 1, kept by [1, 0]"


@pytest.mark.parametrize("reason", ["signal", "one node", "no copy"])
def test_no_node_leaves_without_need(reason: str, connects: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models(actor(nodes=(1, 2), problem="/dev/shm is full." if reason == "no copy" else ""))
    models.members.spares, models.members.requests = ["n3"], {1: "maintenance"}
    models.members.count = 1 if reason == "one node" else 3
    models.trained.replace_leaving_node()
    assert models.log == [], "no step has ended"
    monkeypatch.setattr(recovery, "interrupts", SimpleNamespace(is_signaled=reason == "signal"))
    assert end_step(models, 1) == []


def test_slowest_node_is_a_metric(connects: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    group = actor(nodes=(1, 2))
    monkeypatch.setattr(group, "examine_device", lambda: ready([DeviceState({}, 2.0), DeviceState({}, 3.0)]))
    models = Models(group)
    end_step(models, 1)
    assert {name: metric.value for name, metric in models.trained.take_metrics().items()} == {
        "cluster/slowest_node": 1.5
    }
