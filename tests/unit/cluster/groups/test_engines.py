from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.groups import engines, remote, replicas
from megarl.cluster.groups.engine_actor import EngineActor
from megarl.cluster.groups.engines import EngineGroup, Sampled
from megarl.cluster.groups.reward_models import RewardEngineActor
from megarl.cluster.pending import Answers, Pending, ready
from megarl.cluster.placement import Process
from megarl.config.load import load
from megarl.core.errors import RunFailure, UserError
from megarl.core.sample import SampleRef
from megarl.resharding.families import huggingface_holder, megatron_holders, vllm_holders
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.planner import make_plan
from megarl.rollout.router import RESTARTS, Aborted
from tests.paths import QUICKSTART
from tests.unit.resharding.cases import GPT_OSS, config_of, layout_of

DIED = object()
"""The result of a call to a lost process."""


class FakeActor:
    """An engine that answers every request with its name. A call runs when a caller waits for it."""

    seen: dict[str, list[str]]
    aborted: list[str]
    dying: set[str]
    """Engines that die on their next call."""
    model: dict[str, Any]
    misfit = False
    repacking: tuple[str, ...] = ()
    padded: int | None = None
    """The size to which the engine's kernels pad experts."""
    connected: list[tuple]
    put: list
    """Objects put into Ray's object store."""
    asleep: list[str]
    sampled: dict[str, tuple[float, int]]
    """Engine -> seconds and number of steps that it has sampled."""
    is_up: bool
    """Whether restarted engines have started."""
    start_fails: bool

    def __init__(self, name: str):
        self.generate, self.call = self, SimpleNamespace(options=self._named)
        self.abort = SimpleNamespace(remote=FakeActor.aborted.extend)
        self._name = name

    def _named(self, name: str) -> SimpleNamespace:
        assert name.startswith("EngineActor.")
        actor = EngineActor.__ray_metadata__.modified_class
        actor = type("Actor", (actor,), {"__init__": lambda _: None, "start": lambda _: None})()
        actor._worker, actor._process = FakeEngine(self._name), SimpleNamespace(name=self._name)
        return SimpleNamespace(remote=lambda method, *arguments: lambda: actor.call(method, *arguments).value)

    def options(self, num_returns: int) -> FakeActor:
        self._num_returns = num_returns
        return self

    def remote(self, requests: list[str], listener: object = None) -> Any:
        """Return one reference per request after the reference to the infos, as Ray does. The infos reference is a call
        that runs when a caller waits for it."""
        FakeActor.seen.setdefault(self._name, []).extend(requests)
        dies = self._name in FakeActor.dying
        assert self._num_returns == 1 + len(requests) > 1

        def infos() -> object:
            if dies:
                return DIED
            if requests[0] in FakeActor.aborted:
                FakeActor.aborted.remove(requests[0])
                return Aborted(7)
            return [SampleRef(f"{item} by {self._name}", "", 1, 1, 1, "stop", 0, 0) for item in requests]

        return [infos, *(f"ref to {request}" for request in requests)]


class Request(str):
    """A request that equals its name."""

    @property
    def sample_id(self) -> str:
        return str(self)


def ask(engines: EngineGroup, groups: Sequence[Sequence[str]]) -> Pending[list[Sampled]]:
    return engines.generate([[Request(name) for name in group] for group in groups])


class FakeEngine:
    """The engine inside a FakeActor."""

    def __init__(self, name: str):
        self._name = name

    def parameters(self) -> list[dict[str, tuple[tuple[int, ...], str]]]:
        """Return the shape and dtype of each parameter. A misfit has a different name for the norm."""
        shard = vllm_holders(FakeActor.model, 1, 1, "float32", padded_experts=FakeActor.padded)[0].shard
        own = {name: (shape, shard.dtypes[name]) for name, shape in shard.shapes.items()}
        if FakeActor.misfit:
            own["model.other.weight"] = own.pop("model.norm.weight")
        return [own]

    def take_work(self) -> tuple[float, int]:
        return FakeActor.sampled[self._name]

    def repacking(self) -> list[str]:
        return FakeActor.repacking

    def sleep(self, keeps_weights: bool) -> bool:
        FakeActor.asleep.append(f"{self._name} with weights" if keeps_weights else self._name)
        return True

    def connect(self, *arguments: Any) -> bool:
        FakeActor.connected.append(arguments)
        return True


class FakeSession:
    logs = Path("logs")

    def __init__(self) -> None:
        self.watched: list[str] = []

    def on_node(self, actor_class: Any, process: Process) -> Any:
        return actor_class

    node_of = None

    def watch(self, actors: dict) -> None:
        self.watched += actors

    def unwatch(self, names: Collection[str]) -> None:
        self.watched = [name for name in self.watched if name not in names]

    trace = SimpleNamespace(add=lambda task, answers: answers.values)

    def submit(self, calls: dict, phase: str, limit: str, may_fail: Sequence[str] = ()):
        answers = {name: call() for name, call in calls.items()}
        lost = {name for name, answer in answers.items() if answer is DIED}
        assert lost <= set(may_fail)
        return ready(Answers({name: answer for name, answer in answers.items() if name not in lost}, lost))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`start(replicas, *overrides)` returns an EngineGroup of fake engines."""
    FakeActor.seen, FakeActor.dying, FakeActor.connected, FakeActor.asleep = {}, set(), [], []
    FakeActor.is_up, FakeActor.start_fails = False, False
    FakeActor.misfit, FakeActor.padded, FakeActor.put, FakeActor.model = False, None, [], config_of()
    FakeActor.repacking, FakeActor.aborted = (), []
    (tmp_path / "config.json").write_text(json.dumps(config_of()))
    made = SimpleNamespace(remote=lambda config, folder, process, *_: FakeActor(process.name))
    monkeypatch.setattr(EngineGroup, "actor_class", made)

    def wait(calls: list, num_returns: int, timeout: float) -> tuple[list, list]:
        assert (num_returns, timeout) == (len(calls), 0)
        return (calls, []) if FakeActor.is_up else ([], calls)

    monkeypatch.setattr(replicas, "ray", SimpleNamespace(wait=wait))
    monkeypatch.setattr(remote, "ray", SimpleNamespace(put=lambda it: FakeActor.put.append(it) or it))
    monkeypatch.setattr(replicas, "outcome", lambda call: (call(), OSError("full") if FakeActor.start_fails else None))
    return lambda replicas, *overrides: EngineGroup(
        FakeSession(),
        load(QUICKSTART, ["model.dtype=float32", *overrides]),
        tmp_path,
        [Process("engine", index, 1, devices=(0,)) for index in range(replicas)],
    )


def check_answers(answers: list[list[SampleRef]], groups: list[list[str]]) -> None:
    assert [[sample.id.split()[0] for sample in group] for group in answers] == groups
    assert [[ref.sample for ref in group] for group in answers] == [[f"ref to {r}" for r in g] for g in groups]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_samples_are_in_the_order_of_their_requests(start, replicas: int) -> None:
    groups = [[f"{i}.{k}" for k in range(length)] for i, length in enumerate((2, 3, 1, 4, 2))]
    answers = ask(start(replicas), groups).result()
    check_answers(answers, groups)


def test_a_group_stays_on_one_replica(start) -> None:
    ask(start(2), [["a1", "a2"], ["b1", "b2"], ["c1", "c2"]]).result()
    assert FakeActor.seen == {"engine-0": ["a1", "a2", "c1", "c2"], "engine-1": ["b1", "b2"]}


def test_fewer_groups_than_replicas_are_spread(start) -> None:
    answers = ask(start(3), [["a"], ["b"]]).result()
    assert [[sample.id for sample in group] for group in answers] == [["a by engine-0"], ["b by engine-1"]]


def test_single_groups_go_to_the_least_loaded_engine(start) -> None:
    engines = start(2)
    first = ask(engines, [["a1", "a2", "a3"]])
    others = [ask(engines, [[name]]) for name in ("b", "c", "d")]
    assert FakeActor.seen == {"engine-0": ["a1", "a2", "a3"], "engine-1": ["b", "c", "d"]}
    others[0].result()
    ask(engines, [["e"]])
    assert FakeActor.seen["engine-1"][-1] == "e"
    first.result()
    ask(engines, [["f"]])
    assert FakeActor.seen["engine-0"][-1] == "f"


def test_slow_replica_gets_fewer_groups(start) -> None:
    """One of three engines takes four times as long per token, so it receives a quarter of the work. If steps wait for
    all samples, each engine receives the same number of prompts in every run."""
    engines, waiting = start(3, "rollout.max_staleness=1"), start(3)
    sizes = dict.fromkeys(range(18), 8)
    assert [len(part) for part in engines.router.assign(sizes).values()] == [6, 6, 6]
    for latencies, shares in (((0.01, 0.04, 0.01), [8, 2, 8]), ((0.01, 0.012, 0.01), [6, 6, 6])):
        answers = [(10.0, round(10 / latency)) for latency in latencies]
        FakeActor.sampled = dict(zip(engines.names, answers, strict=True))
        for _ in range(8):
            engines.take_idle_share().result()
            waiting.take_idle_share().result()
        assert [len(part) for part in engines.router.assign(sizes).values()] == shares
        assert [len(part) for part in waiting.router.assign(sizes).values()] == [6, 6, 6]
    assert list(engines.router.assign(sizes, excluded=["engine-0"])) == ["engine-1", "engine-2"]
    engines.drop({"engine-1"}, "rollout")
    assert list(engines.router.assign(sizes)) == ["engine-0", "engine-2"]
    assert list(engines.router.assign(sizes, excluded=["engine-0", "engine-2"])) == ["engine-0", "engine-2"], (
        "only these engines exist"
    )


@pytest.mark.parametrize("unwanted", [False, True])
@pytest.mark.parametrize("slowness", [1.9, 4])
def test_idle_engine_takes_over_from_a_much_slower_one(
    monkeypatch, start, capsys, slowness: float, unwanted: bool
) -> None:
    engines = start(2, "rollout.max_staleness=1")
    FakeActor.sampled = {"engine-0": (1.0, 1000), "engine-1": (slowness, 1000)}
    engines.take_idle_share().result()
    monkeypatch.setattr(engines._session, "submit", lately(engines, []))
    under_way = {name: ask(engines, [[name, f"{name}2"]]) for name in "abcde"}
    slow = FakeActor.seen["engine-1"][0]
    others = [under_way.pop(name) for name in FakeActor.seen["engine-0"][::2]]
    engines.router.reassign_stragglers([[slow]])
    assert FakeActor.aborted == [], "no engine is idle"
    for pending in others:
        pending.result()
    for _ in range(2):
        engines.router.reassign_stragglers([[slow]])
    is_moved = slowness > 2
    assert FakeActor.aborted == [slow] * is_moved, "once"
    assert ("restart 1 of its prompts" in capsys.readouterr().out) == is_moved
    if unwanted:
        engines.router.abort([[slow]])
        assert under_way.pop(slow).result() == [Aborted(7)]
    for name, pending in under_way.items():
        engine = "engine-0" if is_moved else "engine-1"
        assert [sample.id for sample in pending.result()[0]] == [f"{name} by {engine}", f"{name}2 by {engine}"]
    assert not engines.router.submissions and not +engines.router.load


def test_loss_seen_by_several_calls_counts_once(start, capsys) -> None:
    """Calls that detect the loss late must not blame the restarted engine."""
    engines = start(2)
    FakeActor.dying = {"engine-0"}
    under_way = [ask(engines, [[name, name]]) for name in ("a", "b", "c", "d")]
    assert len(FakeActor.seen["engine-0"]) == 4
    check_answers([under_way[0].result()[0]], [["a", "a"]])
    FakeActor.dying, FakeActor.is_up = set(), True
    engines.rejoin_restarted("refit")
    assert engines.names == ["engine-0", "engine-1"]
    capsys.readouterr()
    for pending in under_way[1:]:
        pending.result()
    assert engines.names == ["engine-0", "engine-1"] and not capsys.readouterr().out


def test_work_of_a_lost_engine_is_reassigned_once(start, capsys) -> None:
    engines = start(3)
    FakeActor.dying = {"engine-1"}
    groups = [[f"{i}.{k}" for k in range(2)] for i in range(5)]
    answers = ask(engines, groups).result()
    check_answers(answers, groups)
    assert engines.names == ["engine-0", "engine-2"]
    assert [holder.name for holder in engines.holders] == ["vllm:0.0", "vllm:2.0"]
    delivered = [request for name in engines.names for request in FakeActor.seen[name]]
    assert sorted(delivered) == sorted(request for group in groups for request in group)
    line = "rollout: engine-1 died and is being restarted. Continuing with 2 of 3 engines. See logs/engine-1.log"
    assert capsys.readouterr().out.strip() == line


def lately(engines: EngineGroup, calls: list) -> Callable:
    """Return a session's `submit` that logs calls and runs them when their result is requested."""

    def submit(given, *_, **__):
        calls.append(given)
        return ready(None).then(lambda _: FakeSession().submit(given, "rollout", "rollout", engines.names))

    return submit


@pytest.mark.parametrize("dying", [set(), {"engine-0"}, {"engine-1"}])
def test_abandoned_group_is_aborted_and_not_reassigned(monkeypatch, start, dying: set[str]) -> None:
    engines, calls = start(2), []
    FakeActor.dying = dying
    monkeypatch.setattr(engines._session, "submit", lately(engines, calls))
    first, second = ask(engines, [["a", "a2"]]), ask(engines, [["b"]])
    engines.router.abort([["a", "a2"]])
    [tokens] = [sampled.num_tokens for sampled in first.result()]
    assert tokens == (0 if dying == {"engine-0"} else 7)
    check_answers(second.result(), [["b"]])
    assert len(calls) == (3 if dying == {"engine-1"} else 2)
    check_answers(ask(engines, [["c"]]).result(), [["c"]])


def test_the_last_engine_is_watched(start) -> None:
    engines = start(2)
    assert engines.may_fail == ["engine-0", "engine-1"]
    assert engines._session.watched == []
    engines.drop({"engine-0"}, "rollout")
    assert engines.may_fail == []
    assert engines._session.watched == ["engine-1"]
    assert start(1)._session.watched == ["engine-0"]


def test_restarted_engine_rejoins_at_its_old_index(start, capsys) -> None:
    engines = start(3, "rollout.sleep=true")
    before = engines.generations
    engines.drop({"engine-1"}, "rollout")
    engines.rejoin_restarted("refit")
    assert engines.names == ["engine-0", "engine-2"]
    capsys.readouterr()
    FakeActor.is_up = True
    engines.rejoin_restarted("refit")
    assert engines.names == [name for name, _ in before] == ["engine-0", "engine-1", "engine-2"]
    assert engines.generations != before, "the generation must show that the engine has no weights"
    assert FakeActor.asleep == ["engine-1"]
    assert capsys.readouterr().out.strip() == "refit: engine-1 rejoined. Continuing with 3 of 3 engines"
    engines.rejoin_restarted("refit")
    assert not capsys.readouterr().out, "the engine must rejoin only once"


def test_engines_may_fail_again_after_a_restart(start) -> None:
    engines = start(2)
    engines.drop({"engine-0"}, "rollout")
    FakeActor.is_up = True
    engines.rejoin_restarted("refit")
    assert engines._session.watched == []
    assert engines.may_fail == ["engine-0", "engine-1"]


def test_engine_that_fails_to_restart_is_excluded(start, capsys) -> None:
    engines = start(2)
    engines.drop({"engine-0"}, "rollout")
    FakeActor.is_up, FakeActor.start_fails = True, True
    capsys.readouterr()
    engines.rejoin_restarted("refit")
    assert engines.names == ["engine-1"]
    line = "restart of a lost engine: engine-0: OSError: full. See logs/engine-0.log. Continuing with 1 of 2 engines"
    assert capsys.readouterr().out.strip() == line
    engines.rejoin_restarted("refit")
    assert not capsys.readouterr().out


def test_engine_that_dies_repeatedly_is_excluded(start, capsys) -> None:
    engines = start(2)
    FakeActor.is_up = True
    losses = 0
    while "engine-0" in engines.names:
        engines.drop({"engine-0"}, "rollout")
        engines.rejoin_restarted("refit")
        losses += 1
    assert losses == RESTARTS + 1
    assert "is being restarted" not in capsys.readouterr().out.splitlines()[-1]


def test_engine_on_trainer_gpus_is_not_restarted(start, monkeypatch, capsys) -> None:
    monkeypatch.setattr(engines.device, "on_cuda", lambda: True)
    for placement, starts_again in (("colocated", False), ("disaggregated", True)):
        start(2, f"cluster.placement={placement}").drop({"engine-0"}, "rollout")
        assert ("is being restarted" in capsys.readouterr().out) == starts_again


def test_run_ends_without_engines(start) -> None:
    with pytest.raises(RunFailure, match=r"^refit: no engine is left\. See logs$"):
        start(2).drop({"engine-0", "engine-1"}, "refit")


def test_engine_with_padded_experts_is_written_in_place(start, tmp_path) -> None:
    """The first replica's padding applies to all replicas."""
    model = config_of(model_type="qwen3_moe", num_experts=4, moe_intermediate_size=6)
    (tmp_path / "config.json").write_text(json.dumps(model))
    engines = start(2)
    FakeActor.model, FakeActor.padded = model, 8
    engines.start().result()
    assert not engines.by_loader
    stack = "model.layers.0.mlp.experts.routed_experts.w2_weight"
    assert [holder.shapes[stack][1] for holder in engines.holders] == [8, 8]


@pytest.mark.parametrize("misfit", [False, True])
def test_engines_with_other_parameters_get_whole_tensors(start, capsys, misfit: bool) -> None:
    engines = start(2)
    FakeActor.misfit = misfit
    engines.start().result()
    family, checkpoint = vllm_holders(config_of(), 1, 1, "float32")[0], huggingface_holder(config_of(), "float32")
    expected = checkpoint if misfit else family
    assert [holder.name for holder in engines.holders] == ["vllm:0.0", "vllm:1.0"]
    assert {holder.shapes == expected.shapes for holder in engines.holders} == {True}
    assert len({holder.shard for holder in engines.holders}) == 1, "all replicas must share one shard"
    plan = CompactPlan.of(make_plan(megatron_holders(config_of(), layout_of(), "float32"), engines.holders))
    assert engines.connect(plan, "channel").result()
    assert [by_loader for *_, by_loader in FakeActor.connected] == [misfit, misfit]
    assert FakeActor.connected[0][2] == engines.holders[:1]
    assert FakeActor.put[:2] == [plan, "channel"] and len(FakeActor.put) == 3, "both engines must share each object"
    lines = [
        "refit: loading whole tensors through vLLM's own loader, which is slower than writing in place, because 2 "
        "of vLLM's parameters differ from the expected ones: vllm:0.0: model.other.weight [12] (float32) does not "
        "belong to the family; vllm:0.0: model.norm.weight is missing"
    ]
    assert capsys.readouterr().out.splitlines() == (lines if misfit else [])


def test_stacked_experts_are_not_sent_to_vllms_loader(start, tmp_path) -> None:
    model = config_of(model_type="gpt_oss", **GPT_OSS)
    (tmp_path / "config.json").write_text(json.dumps(model))
    engines = start(1)
    FakeActor.model, FakeActor.misfit = model, True
    with pytest.raises(UserError, match=r"stacked experts separately\. Fix: remove overrides that change"):
        engines.start().result()


def test_engines_with_packing_kernels_get_whole_tensors(start, capsys) -> None:
    """Names, shapes and dtypes match, so only the engine can report that its kernels repack weights."""
    engines = start(1)
    FakeActor.repacking = ("MARLIN of model.layers.0.mlp.experts",)
    engines.start().result()
    assert engines.by_loader
    assert capsys.readouterr().out.endswith(
        "because these kernels repack weights: MARLIN of model.layers.0.mlp.experts\n"
    )


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("kind", [EngineActor, RewardEngineActor])
def test_engine_that_loses_a_rank_exits(monkeypatch: pytest.MonkeyPatch, kind: Any, lost: bool) -> None:
    """The exit makes the engine count as lost. If no rank is lost, the error propagates to the caller."""
    ended: list[object] = []
    monkeypatch.setattr(replicas.processes, "end_descendants", lambda: ended.append("descendants"))
    monkeypatch.setattr(replicas.os, "_exit", ended.append)
    actor_class = kind.__ray_metadata__.modified_class
    actor = actor_class.__new__(actor_class)
    actor._worker, actor._others = SimpleNamespace(has_lost_a_rank=lost, checksums=lambda: {}["w"]), {}
    with pytest.raises(KeyError):
        actor.call("checksums")
    assert ended == (["descendants", 1] if lost else [])


@pytest.mark.parametrize("sleep", [False, True])
def test_engines_sleep_from_the_start_if_configured(start, sleep: bool) -> None:
    engines = start(2, f"rollout.sleep={str(sleep).lower()}")
    engines.start().result()
    assert FakeActor.asleep == (["engine-0", "engine-1"] if sleep else [])
    engines.sleep(keeps_weights=False).result()
    assert FakeActor.asleep == (2 * ["engine-0", "engine-1"] if sleep else [])


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_engines_keep_weights_needed_after_sleep(start, keeps_weights: bool):
    """Later rounds sample with the same weights."""
    engines = start(1, "rollout.sleep=true")
    engines.sleep(keeps_weights).result()
    assert FakeActor.asleep == ["engine-0 with weights" if keeps_weights else "engine-0"]
