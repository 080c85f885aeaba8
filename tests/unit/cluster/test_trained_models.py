"""Trained models take turns on shared devices: the model that computes is loaded, and the others are offloaded where
configured."""

from __future__ import annotations

import pytest

from megarl.cluster.pending import Pending, ready
from megarl.cluster.trained_models import TrainedModels


class FakeTrainers:
    """A TrainerGroup that tracks its parts on the devices and records the state of the devices during each task."""

    def __init__(self, role: str, offloads: set[str], on_devices: set[str]):
        self._role, self.offloads, self._on_devices = role, frozenset(offloads), on_devices
        self.onload(("parameters", "gradients", "optimizer"))

    def offload(self, parts) -> Pending[dict]:
        for part in self.offloads.intersection(parts):
            self._on_devices.discard(f"{self._role} {part}")
        return ready({})

    def onload(self, parts) -> Pending[None]:
        self._on_devices |= {f"{self._role} {part}" for part in parts}
        return ready(None)


def models_of(*together: str, **offloads: str) -> tuple[TrainedModels, set[str]]:
    """Return models for these roles, each with its offloadable parts, and the set of parts on the devices. `together`
    lists the roles that share devices."""
    on_devices: set[str] = set()
    groups = {role: FakeTrainers(role, set(parts.split()), on_devices) for role, parts in offloads.items()}
    sharing = {role: [other for other in together if other != role] if role in together else [] for role in groups}
    return TrainedModels(groups, sharing), on_devices


def names(role: str, parts: str) -> set[str]:
    return {f"{role} {part}" for part in parts.split()}


ALL = "parameters gradients optimizer"
ROLES = ("actor", "critic", "implicit_reward")


def test_idle_models_are_offloaded() -> None:
    trained, on_devices = models_of(*ROLES, critic=ALL, actor="optimizer gradients", implicit_reward="")
    seen: dict[str, set[str]] = {}

    def look(name: str) -> Pending[None]:
        seen[name] = set(on_devices)
        return ready(None)

    always = names("implicit_reward", ALL) | names("actor", "parameters")
    trained.stage_actor_for_sync()
    assert on_devices == always, "refit must find only the permanent parts"
    trained.offload_all().result()
    assert on_devices == always, "rollout must find only the permanent parts"
    trained.run({role: lambda role=role: look(f"{role} passes") for role in ("critic", "actor")}, ("parameters",))
    trained.run({role: lambda role=role: look(f"{role} update") for role in ("critic", "actor")})
    trained.stage_actor_for_sync()
    trained.run({role: lambda role=role: look(f"{role} saved") for role in trained.groups}, ("parameters",))
    assert seen == {
        "critic passes": always | names("critic", "parameters"),
        "actor passes": always,
        "critic update": always | names("critic", ALL),
        "actor update": always | names("actor", ALL),
        "critic saved": always | names("critic", "parameters"),
        "actor saved": always,
        "implicit_reward saved": always,
    }


@pytest.mark.parametrize("in_last_turn", ["critic", "actor"])
def test_refit_finds_the_actors_weights_after_any_turn(in_last_turn: str) -> None:
    trained, on_devices = models_of(*ROLES[:2], actor=ALL, critic=ALL)
    trained.run({in_last_turn: lambda: ready(None)})
    trained.stage_actor_for_sync()
    assert on_devices == names("actor", "parameters")


def test_models_stay_on_unshared_devices() -> None:
    trained, on_devices = models_of(actor=ALL, critic=ALL)
    trained.run({role: lambda: ready(None) for role in ("critic", "actor")})
    assert on_devices == names("actor", ALL) | names("critic", ALL)


@pytest.mark.parametrize(("together", "begun"), [(["actor", "critic"], ["critic"]), ([], ["critic", "actor"])])
def test_independent_tasks_overlap_on_separate_devices(together: list[str], begun: list[str]) -> None:
    trained, _ = models_of(*together, actor="", critic="")
    log: list[str] = []

    def task(name: str) -> Pending[tuple]:
        log.append(name)
        return ready(None).then(lambda _: (tuple(log), name))

    results = trained.run({"critic": lambda: task("critic"), "actor": lambda: task("actor")})
    assert results["critic"] == (tuple(begun), "critic"), "tasks that had begun before the first wait"
    assert results["actor"] == (("critic", "actor"), "actor")


def test_models_take_turns_only_on_the_same_devices() -> None:
    """The critic has separate devices. It computes concurrently with the actor and keeps its state there."""
    trained, on_devices = models_of("actor", "implicit_reward", actor=ALL, critic=ALL, implicit_reward=ALL)
    log: list[str] = []

    def task(role: str) -> Pending[set[str]]:
        log.append(f"{role} begins")
        there = set(on_devices)
        return ready(None).then(lambda _: log.append(f"{role} is waited for") or there)

    found = trained.run({role: lambda role=role: task(role) for role in ("actor", "critic", "implicit_reward")})
    assert log[:4] == ["actor begins", "critic begins", "actor is waited for", "implicit_reward begins"]
    assert found["implicit_reward"] == names("implicit_reward", ALL) | names("critic", ALL)
    assert found["actor"] == names("actor", ALL) | names("critic", ALL)
