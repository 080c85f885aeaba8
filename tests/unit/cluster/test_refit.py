"""The path of weights from trainer to engine on each machine, and the order in which both use its memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster import workers as module
from megarl.cluster.pending import Answers, Pending, ready
from megarl.cluster.placement import place
from megarl.cluster.refit import Refit
from megarl.cluster.trained_models import TrainedModels
from megarl.cluster.workers import Workers, launch_workers
from megarl.config.device_spans import reward_model_is_beside_engines
from megarl.config.load import load
from megarl.core import device
from megarl.models.run_models import ModelFolders
from megarl.resharding.families import megatron_holders, vllm_holders
from megarl.rollout.engine import SyncStats
from tests.paths import BASE
from tests.tiny_model import write_tiny_llama
from tests.unit.resharding.cases import config_of, layout_of


class FakeTrainers:
    holders = megatron_holders(config_of(), layout_of(), "float32")
    store_address = ("host", 1)

    def __init__(self, log: list, offloads: Collection[str]):
        self._log, self.offloads = log, frozenset(offloads)
        self.send = SimpleNamespace(start=lambda: log.append("send") or {})

    def publish(self, for_refit: bool) -> Pending[dict]:
        assert for_refit
        return self.do("publish")

    def publish_on_gpu(self, plan) -> Pending[dict]:
        return self.do(f"publish on gpu for {', '.join(plan.destinations)}")

    def connect(self, plan, rendezvous) -> Pending[None]:
        assert len(plan.order), "the order of the plan determines the sender"
        if "Remote" in type(rendezvous).__name__:
            self._log.append("trainers connect")
        return ready(None)

    def offload(self, parts) -> Pending[dict]:
        return self.do(f"offload {', '.join(sorted(self.offloads.intersection(parts)))}")

    def onload(self, parts) -> Pending[dict]:
        return self.do(f"onload {', '.join(sorted(self.offloads.intersection(parts)))}")

    def do(self, done: str) -> Pending[dict]:
        self._log.append(done)
        return ready({})


class FakeEngines:
    by_loader = False
    sources = staticmethod(list)

    def __init__(self, log: list, pauses: bool):
        self._log, self._pauses, self.names = log, pauses, ["engine-0", "engine-1"]
        self.losses = 0
        self.back: list[str] = []
        """Engines that have restarted."""
        self.dying: set[str] = set()
        self.dying_on_plan: set[str] = set()
        self.planned: list[tuple[str, ...]] = []
        """Destinations of each plan that the engines received."""
        self.node_of = {"0": 0, "1": 0}

    @property
    def holders(self) -> list:
        return [
            replace(holder, node=self.node_of[holder.name[5]])
            for holder in vllm_holders(config_of(), 1, 2, "float32")
            if f"engine-{holder.name[5]}" in self.names
        ]

    @property
    def generations(self) -> list[tuple[str, int]]:
        return [(name, self.losses) for name in self.names]

    @property
    def may_fail(self) -> list[str]:
        return self.names

    def rejoin_restarted(self, phase: str) -> None:
        self.names, self.back = sorted(self.names + self.back), []

    def connect(self, plan, channel) -> Pending[bool]:
        self._log.append(f"connect {type(channel).__name__}")
        self.planned.append(plan.bare.destinations)
        lost, self.dying_on_plan = self.dying_on_plan, set()
        self.drop(lost, "refit")
        return ready(not lost)

    def start_refit(self, version, expected) -> dict:
        self._log.append("wake weights, refit")
        return {name: lambda: [SyncStats(1, 0)] for name in self.names}

    def drop(self, lost, phase) -> None:
        self.losses += len(lost)
        self.names = [name for name in self.names if name not in lost]

    def generate(self) -> None:
        self._log.append("wake KV cache, generate")

    def pause(self) -> Pending[None]:
        return self._note("pause" if self._pauses else None)

    def resume(self) -> Pending[None]:
        return self._note("resume" if self._pauses else None)

    def sleep(self, keeps_weights: bool) -> Pending[None]:
        return self._note("sleep with weights" if keeps_weights else "sleep")

    def _note(self, done: str | None) -> Pending[None]:
        self._log += [done] if done else []
        return ready(None)


class FakeSession:
    def __init__(self, engines: FakeEngines):
        self._engines = engines

    trace = SimpleNamespace(add=lambda task, answers: answers.values)

    def submit(self, calls: dict, phase: str, limit: str, may_fail) -> Pending[Answers]:
        lost, self._engines.dying = self._engines.dying, set()
        return ready(Answers({name: call() for name, call in calls.items() if name not in lost}, lost))


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch):
    """`prepare(on_gpus, *overrides)` returns Workers of fakes with a real Refit, the fake engines, and the log of their
    calls."""

    def prepare(on_gpus: bool, *overrides: str) -> tuple[Workers, FakeEngines, list[str]]:
        monkeypatch.setattr(device, "on_cuda", lambda: on_gpus)
        config = load(BASE, ["model.path=m", "data.source=arithmetic", "rollout.verify_refit=off", *overrides])
        log: list[str] = []
        trainers, engines = FakeTrainers(log, config.actor.offload), FakeEngines(log, config.pauses_rollouts)
        refit = Refit(FakeSession(engines), config, trainers, engines, export_plan=None)
        trained = TrainedModels({"actor": trainers}, {"actor": ()})
        beside = reward_model_is_beside_engines(config)
        return Workers(trained, None, engines, None, refit, None, beside, Path()), engines, log

    return prepare


@pytest.mark.parametrize("on_gpus", [False, True])
@pytest.mark.parametrize(
    ("placement", "transport", "channel"),
    [
        ("colocated", "auto", None),
        ("disaggregated", "shared_memory", None),
        ("disaggregated", "auto", "Rendezvous"),
        ("disaggregated", "p2p", "Rendezvous"),
    ],
)
def test_transport_depends_on_machine_and_placement(
    prepare, on_gpus: bool, placement: str, transport: str, channel: str | None
) -> None:
    workers, _, log = prepare(on_gpus, f"cluster.placement={placement}", f"rollout.transport={transport}")
    workers.refit.run(1)
    channel = channel or ("CudaMemory" if on_gpus else "SharedMemory")
    assert [line for line in log if "connect" in line] == [f"connect {channel}"]
    assert ("send" in log) == (channel == "Rendezvous")


@pytest.mark.parametrize("on_gpus", [False, True])
def test_engines_read_local_weights_and_receive_the_rest(prepare, on_gpus: bool) -> None:
    """Offloaded weights are published again after each move. Connections persist until an engine is lost."""
    workers, engines, log = prepare(on_gpus, "cluster.nodes=2", *(["actor.offload=[parameters]"] if on_gpus else []))
    engines.node_of = {"0": 0, "1": 1}
    publish = "publish on gpu for vllm:0.0, vllm:1.0" if on_gpus else "publish"
    again = [publish, "connect HybridTransport"]
    for version in (1, 2):
        workers.refit.run(version)
    refit = ["send", "wake weights, refit"]
    assert log == ["trainers connect", *again, *refit, *(again if on_gpus else []), *refit]
    assert workers.refit.transport == f"{'cuda_ipc' if on_gpus else 'shared_memory'} within nodes, p2p between nodes"
    engines.dying = {"engine-1"}
    workers.refit.run(3)
    assert engines.planned[-1] == ("vllm:0.0",) and log[-1] == "wake weights, refit"


PUBLISHED = ["publish on gpu for vllm:0.0, vllm:1.0", "connect CudaMemory"]


@pytest.mark.parametrize("offload", ["[gradients]", "[parameters]"])
def test_offloaded_weights_are_published_for_each_refit(prepare, offload: str) -> None:
    workers, engines, log = prepare(True, f"actor.offload={offload}")
    refit = "wake weights, refit"
    for version in (1, 2):
        workers.refit.run(version)
    again = PUBLISHED if offload == "[parameters]" else []
    assert log == [*PUBLISHED, refit, *again, refit]
    engines.dying = {"engine-0"}
    log.clear()
    workers.refit.run(3)
    assert log == [*again, refit, "publish on gpu for vllm:1.0", "connect CudaMemory", refit]


@pytest.mark.parametrize("transport", ["p2p", "shared_memory"])
def test_nothing_is_sent_to_an_engine_lost_during_planning(prepare, transport: str) -> None:
    workers, engines, log = prepare(False, "cluster.placement=disaggregated", f"rollout.transport={transport}")
    engines.dying_on_plan = {"engine-0"}
    workers.refit.run(1)
    assert engines.planned == [("vllm:0.0", "vllm:1.0"), ("vllm:1.0",)]
    workers.refit.run(2)
    done = [line for line in log if line != "publish"]
    connect = f"connect {'Rendezvous' if transport == 'p2p' else 'SharedMemory'}"
    refit = [*(["send"] if transport == "p2p" else []), "wake weights, refit"]
    assert done == [connect, connect, *refit, *refit]


def test_restarted_engine_is_connected_again(prepare) -> None:
    """The loss and the restart both happen between two refits, so the names of the engines are the same at each
    refit."""
    workers, engines, _ = prepare(False)
    workers.refit.run(1)
    engines.drop({"engine-0"}, "rollout")
    engines.back = ["engine-0"]
    workers.refit.run(2)
    assert engines.planned == 2 * [("vllm:0.0", "vllm:1.0")]


PARTS = "gradients, optimizer, parameters"
ROUND = ["wake KV cache, generate", "score"]
REWARD_MODEL = "reward_model={path: rm}"
AHEAD = "rollout={max_staleness: 1, sleep: true, kv_cache_on_update: recompute}"
ELSEWHERE = "cluster.roles={actor: 0, rollout: 0, reward_model: 1}"


@pytest.mark.parametrize(
    ("keys", "rounds", "sampled"),
    [
        ([], 1, [*ROUND, "sleep"]),
        ([], 3, [*ROUND, *ROUND, *ROUND, "sleep"]),
        ([REWARD_MODEL, ELSEWHERE], 2, [*ROUND, *ROUND, "sleep"]),
        ([REWARD_MODEL], 1, [ROUND[0], "sleep", "score"]),
        ([REWARD_MODEL], 2, [ROUND[0], "sleep with weights", "score", ROUND[0], "sleep", "score"]),
        ([AHEAD], 2, ["resume", *ROUND, *ROUND, "pause", "sleep"]),
        (
            [AHEAD, REWARD_MODEL],
            2,
            ["resume", ROUND[0], "pause", "sleep with weights", "score", "resume", ROUND[0], "pause", "sleep", "score"],
        ),
    ],
    ids=[
        *("one round", "rounds", "reward model elsewhere", "reward model beside, one round", "reward model beside"),
        *("rollouts ahead", "rollouts ahead, reward model beside"),
    ],
)
def test_engine_and_trainer_take_turns(prepare, keys: list[str], rounds: int, sampled: list[str]) -> None:
    """Trainer and engine free the memory for each other once per step.

    If a reward model scores on the engine's devices, the engine also sleeps after each round. It keeps its weights if
    another round may follow. Rollouts of later steps pause before it sleeps and resume once the trainer has left the
    devices.
    """
    workers, engines, log = prepare(True, f"actor.offload=[{PARTS}]", *keys)
    trainers = workers.actor

    def sync(version: int) -> None:
        workers.trained.stage_actor_for_sync()
        workers.refit.run(version)

    sync(0)
    for version in (1, 2):
        log.append("step")
        workers.switch_to_rollout()
        for number in range(rounds):
            if number:
                workers.resume_sampling()
            engines.generate()
            workers.switch_to_scoring(is_last=number + 1 == rounds)
            log.append("score")
        workers.switch_to_training()
        workers.trained.run({"actor": lambda: trainers.do("train")})
        sync(version)
    refit = ["offload gradients, optimizer", "onload parameters", *PUBLISHED, "wake weights, refit"]
    step = ["step", f"offload {PARTS}", *sampled, f"onload {PARTS}", "train", *refit]
    assert log == [*refit, *step, *step]


class FakeWorkerGroup:
    """A worker group that logs when it begins to start and when a caller waits for it."""

    holders = megatron_holders(config_of(), layout_of(), "float32")

    offloads = frozenset({"optimizer"})

    def __init__(self, name: str, log: list[str]):
        self._name, self._log = name, log

    def offload(self, parts) -> Pending[dict]:
        self._log.append(f"{self._name} leaves")
        return ready({})

    def start(self) -> Pending[None]:
        self._log.append(f"{self._name} begins")
        return ready(None).then(lambda _: self._log.append(f"{self._name} is waited for"))


@pytest.mark.parametrize("on_gpus", [False, True])
def test_roles_start_concurrently_unless_they_share_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, on_gpus: bool
) -> None:
    """On shared GPUs, the engines are asleep before the models allocate their memory."""
    folder, log = write_tiny_llama(tmp_path), []
    config = load(BASE, ["model.path=m", "data.source=arithmetic", "model.dtype=float32", "rollout.sleep=true"])
    monkeypatch.setattr(device, "on_cuda", lambda: on_gpus)
    for name in ("TrainerGroup", "RewardGroup"):
        monkeypatch.setattr(module, name, lambda *_, name=name: FakeWorkerGroup(name, log))
    monkeypatch.setattr(module, "engine_group", lambda _: lambda *_: FakeWorkerGroup("EngineGroup", log))
    FakeWorkerGroup.holders = megatron_holders(ModelFolders(folder, None, None, None).hf_config, layout_of(), "float32")
    monkeypatch.setattr(module, "first", lambda pendings: pendings[-1])
    launch_workers(SimpleNamespace(), config, ModelFolders(folder, None, None, None), place(config), None)
    started = [line.partition(": started in ")[0] for line in capsys.readouterr().out.splitlines()]
    assert started == (["engines", "actor", "rewards"] if on_gpus else ["actor", "rewards", "engines"])
    asleep, actor_begins = log.index("EngineGroup is waited for"), log.index("TrainerGroup begins")
    assert (asleep < actor_begins) == on_gpus
    assert log.index("EngineGroup begins") < actor_begins


def test_models_on_shared_devices_start_one_after_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A started model holds all of its state. The next one starts after the offloadable part has been offloaded."""
    folder, log = write_tiny_llama(tmp_path), []
    keys = ["model.path=m", "data.source=arithmetic", "model.dtype=float32", "algorithm.advantage.estimator=gae"]
    config = load(BASE, keys)
    monkeypatch.setattr(module, "RewardGroup", lambda *_: FakeWorkerGroup("RewardGroup", log))
    monkeypatch.setattr(module, "engine_group", lambda _: lambda *_: FakeWorkerGroup("EngineGroup", log))
    monkeypatch.setattr(module, "TrainerGroup", lambda _session, _config, role, *_: FakeWorkerGroup(role, log))
    FakeWorkerGroup.holders = megatron_holders(ModelFolders(folder, None, None, None).hf_config, layout_of(), "float32")
    monkeypatch.setattr(module, "first", lambda pendings: pendings[-1])
    launch_workers(SimpleNamespace(), config, ModelFolders(folder, folder, None, None), place(config), None)
    turns = [line for line in log if line.startswith(("actor", "critic"))]
    assert turns == [f"{role} {what}" for role in ("actor", "critic") for what in ("begins", "is waited for", "leaves")]


@pytest.mark.parametrize("offload", ["[]", "[parameters]"])
def test_offloaded_teachers_load_one_after_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, offload: str
) -> None:
    """A started teacher has offloaded its weights, so only one of them is on the devices while they load."""
    folder, log = write_tiny_llama(tmp_path), []
    models = "teachers.models=[{name: a, path: x}, {name: b, path: y}]"
    keys = ["model.path=m", "data.source=arithmetic", "model.dtype=float32", models, f"teachers.offload={offload}"]
    config, folders = load(BASE, keys), ModelFolders(folder, None, None, None, teachers={"a": folder, "b": folder})

    def teacher_group(_session, _config, teacher, path, processes) -> FakeWorkerGroup:
        assert path == folder and [process.name for process in processes] == [f"teacher-{teacher.name}-0"]
        group = FakeWorkerGroup(teacher.name, log)
        group.role = teacher.name
        return group

    monkeypatch.setattr(module, "RewardGroup", lambda *_: FakeWorkerGroup("RewardGroup", log))
    monkeypatch.setattr(module, "engine_group", lambda _: lambda *_: FakeWorkerGroup("EngineGroup", log))
    monkeypatch.setattr(module, "TrainerGroup", lambda *_: FakeWorkerGroup("TrainerGroup", log))
    monkeypatch.setattr(module, "TeacherGroup", teacher_group)
    FakeWorkerGroup.holders = megatron_holders(ModelFolders(folder, None, None, None).hf_config, layout_of(), "float32")
    monkeypatch.setattr(module, "first", lambda pendings: pendings[-1])
    workers = launch_workers(SimpleNamespace(), config, folders, place(config), None)
    assert [teacher.role for teacher in workers.teachers] == ["a", "b"]
    begins, waits = "begins", "is waited for"
    in_turn = [f"{name} {what}" for name in "ab" for what in (begins, waits)]
    together = [f"a {begins}", f"b {begins}", f"b {waits}", f"a {waits}"]
    assert [line for line in log if line[0] in "ab"] == (in_turn if offload == "[parameters]" else together)
