"""Every call that the driver waits for has the timeout of its phase."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from megarl.cluster import rank_batch
from megarl.cluster.groups import remote, rewards
from megarl.cluster.groups.engines import EngineGroup
from megarl.cluster.groups.reward_models import RewardEngineGroup, RewardModelGroup
from megarl.cluster.groups.rewards import RewardGroup
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.pending import Pending
from megarl.cluster.placement import Process
from megarl.cluster.refit import Refit
from megarl.config.cluster_schema import TimeoutKind
from megarl.config.load import load
from tests.paths import QUICKSTART
from tests.unit.resharding.cases import config_of


class Handle:
    """A fake of an actor or of one of its methods."""

    def __getattr__(self, name: str) -> Handle:
        return self

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, *arguments: Any) -> Handle:
        return self

    def __iter__(self) -> Iterator[Handle]:
        """Yield the references to a call's two return values."""
        return iter((self, self))

    def __getitem__(self, index: int) -> Handle:
        return self


class EndlessWait(Exception):
    """Raised instead of waiting forever."""


class HangingSession:
    """A Session whose calls never return."""

    logs, scratch = Path("logs"), Path("scratch")
    trace = SimpleNamespace(add=lambda task, answers: answers.values)

    def __init__(self) -> None:
        self.waits: list[tuple[str, TimeoutKind]] = []

    def on_node(self, actor_class: Any, process: Process) -> Any:
        return actor_class

    node_of = None

    def watch(self, actors: dict, are_replaceable: bool = False) -> None:
        pass

    def unwatch(self, names: Any) -> None:
        pass

    def submit(self, calls: dict, phase: str, limit: TimeoutKind, may_fail: Any = ()) -> Pending:
        self.waits.append((phase, limit))
        return Pending(self, {"call": Handle()}, phase, limit, 1.0)

    def wait(self, pending: Pending, meanwhile: Any) -> None:
        raise EndlessWait


class Groups:
    """The worker groups of a run with one process each."""

    def __init__(self, folder: Path, session: HangingSession):
        self.session, self.config = session, load(QUICKSTART)
        self.actor = TrainerGroup(session, self.config, "actor", folder, [Process("trainer", 0, 1, devices=(0,))])
        self.engines = EngineGroup(session, self.config, folder, [Process("engine", 0, 1, devices=(0,))])
        self.reward_model = RewardModelGroup(
            session, self.config, "reward_model", folder, [Process("model", 0, 1, devices=(0,))]
        )
        self.reward_engines = RewardEngineGroup(session, self.config, folder, [Process("engine", 0, 1, devices=(0,))])
        for group in (self.actor, self.reward_model):
            group._data_parallel_ranks, group.packing = [0], None
        self.rewards = RewardGroup(session, self.config, [Process("rewards", 0, 1)], None, None)
        self.judged = RewardGroup(session, self.config, [Process("rewards", 0, 1)], self.reward_model, None)
        self.judged._reads_ids = False
        self.refit = Refit(session, load(QUICKSTART, ["rollout.verify_refit=off"]), self.actor, self.engines, None)


CASES: dict[str, tuple[TimeoutKind, Callable[[Groups, Path], Any]]] = {
    "actor open store": ("start", lambda groups, _: groups.actor.start()),
    "actor start": ("start", lambda groups, _: groups.actor._start_ranks("host", 1)),
    "engine start": ("start", lambda groups, _: groups.engines.start()),
    "rewards start": ("start", lambda groups, _: groups.rewards.start()),
    "actor close": ("start", lambda groups, _: groups.actor.close()),
    "rollout": ("rollout", lambda groups, _: groups.engines.generate([[SimpleNamespace(sample_id="0.0")]])),
    "rewards": ("rewards", lambda groups, folder: groups.rewards.score([], 1, folder)),
    "rewards read": ("rewards", lambda groups, folder: groups.judged.score([], 1, folder)),
    "reward model score tokens": ("rewards", lambda groups, _: groups.reward_model.scores([])),
    "reward model score": (
        "rewards",
        lambda groups, _: groups.reward_engines.scores([SimpleNamespace(id="0.0", prompt_id="0")]),
    ),
    "reference log-probs": ("passes", lambda groups, _: groups.actor.keep_log_probs("reference", [["batch"]])),
    "actor score tokens": ("passes", lambda groups, _: groups.actor.score_tokens([["batch"]])),
    "actor update": ("update", lambda groups, _: groups.actor.train([[["batch"]]])),
    "actor adapt kl": ("update", lambda groups, _: groups.actor.adapt_kl(0.1, 1)),
    "actor renew reference": ("update", lambda groups, _: groups.actor.renew_reference()),
    "actor publish": ("refit", lambda groups, _: groups.actor.publish(for_refit=False)),
    "actor checksums": ("refit", lambda groups, _: groups.actor.checksums([], None)),
    "engine connect": ("refit", lambda groups, _: groups.engines.connect(None, None)),
    "refit": ("refit", lambda groups, _: groups.refit.run(version=1)),
    "engine sleep": ("refit", lambda groups, _: groups.engines.sleep(False)),
    "engine pause": ("refit", lambda groups, _: groups.engines.pause()),
    "engine resume": ("refit", lambda groups, _: groups.engines.resume()),
    "actor offload": ("refit", lambda groups, _: groups.actor.offload(())),
    "actor onload": ("refit", lambda groups, _: groups.actor.onload(())),
    "actor save checkpoint": ("checkpoint", lambda groups, folder: groups.actor.save_checkpoint(folder)),
    "actor checkpoint written": ("checkpoint", lambda groups, _: groups.actor.checkpoint_written()),
    "actor finish checkpoint": ("checkpoint", lambda groups, folder: groups.actor.finish_checkpoint(folder)),
    "actor check checkpoint": ("checkpoint", lambda groups, _: groups.actor.load_checkpoint(None)),
    "actor copy room": ("checkpoint", lambda groups, _: groups.actor.copy_room()),
    "actor copy state": ("checkpoint", lambda groups, _: groups.actor.copy_state(1, ())),
    "actor start delivery": ("checkpoint", lambda groups, _: groups.actor.start_delivery(1, ())),
    "actor finish copies": ("checkpoint", lambda groups, _: groups.actor.finish_copies(True)),
    "actor discard copies": ("checkpoint", lambda groups, _: groups.actor.discard_copies()),
    "actor restore state": ("checkpoint", lambda groups, _: groups.actor.restore_state(1, ())),
    "actor export": ("checkpoint", lambda groups, folder: groups.actor._export.on_first(None, None, folder)),
}
"""Phase -> key of its timeout, and function that starts it."""


def connect(refit: Refit) -> None:
    """Replacement for Refit._connect."""
    refit._planned, refit._connected = (None, None), refit._engines.names


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    for group in (TrainerGroup, EngineGroup, RewardModelGroup, RewardEngineGroup):
        monkeypatch.setattr(group, "actor_class", Handle())
    monkeypatch.setattr(rewards, "RewardActor", Handle())
    monkeypatch.setattr(remote, "ray", SimpleNamespace(put=lambda value: value))
    monkeypatch.setattr(rank_batch, "schedule", lambda *_: [()])
    monkeypatch.setattr(Refit, "_connect", connect)
    (tmp_path / "config.json").write_text(json.dumps(config_of()))
    return Groups(tmp_path, HangingSession())


@pytest.mark.parametrize("phase", CASES)
def test_calls_have_the_timeout_of_their_phase(groups: Groups, tmp_path: Path, phase: str) -> None:
    limit, begin = CASES[phase]
    with suppress(EndlessWait):
        begin(groups, tmp_path)
    assert groups.session.waits[0] == (phase, limit)
    assert {other for _, other in groups.session.waits} == {limit}


def test_collectives_have_the_longest_timeout() -> None:
    """A collective can belong to any phase, and the driver's timeout must expire first."""
    assert load(QUICKSTART, ["cluster.timeouts.passes=9000"]).cluster.timeouts.longest == 9000


def test_every_timeout_is_used() -> None:
    assert {limit for limit, _ in CASES.values()} == set(get_args(TimeoutKind))
