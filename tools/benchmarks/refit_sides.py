"""The processes of refit.py: ranks that hold a trainer's shards, and an engine; and the baseline, which gathers, sends
and loads whole tensors one by one ("common way").

Trainers whose engines have devices of their own commonly refit like this: the tensor-parallel ranks all-gather each
parameter, the first rank of each pipeline stage assembles the checkpoint's tensors and sends them to the engine, and
vLLM's load_weights writes them. Unlike some trainers, the baseline does not broadcast between stages.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.resharding.execute import execute
from megarl.resharding.piece import Holder, Shard
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.plan import Plan, Writes
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.local import LocalMemory
from megarl.resharding.transports.shared_memory import publish

DEADLINE_S = 600


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
        """Return a stage's checkpoint tensors, and the writes that assemble them. A tied head is sent as embedding."""
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
        for name, shards in self._gathered():
            if self._rank == self._way.root(self._stage):
                full = torch.empty(self._way.folder.shapes[name])
                execute(self._tensors[name], {name: full}, LocalMemory(shards))
                self._group.send([full], self._way.size - 1, 0).wait()

    def _gathered(self) -> Iterator[tuple[str, Mapping[str, Mapping[str, torch.Tensor]]]]:
        """Yield each tensor with all shards of its parameter, which are gathered once."""
        known, shards = None, {}
        for name, writes in self._tensors.items():
            parameter = writes.copies[0].move.source.parameter
            if parameter != known:
                is_sharded = len({copy.source for copy in writes.copies}) > 1
                known, shards = parameter, self._gather(parameter) if is_sharded else self._of_each(parameter)
            yield name, shards

    def _of_each(self, parameter: str) -> dict[str, dict[str, torch.Tensor]]:
        """Return a parameter that every rank of the stage holds whole."""
        return {holder.name: {parameter: self.parameters[parameter]} for holder in self._way.stages[self._stage]}

    def _gather(self, parameter: str) -> dict[str, dict[str, torch.Tensor]]:
        holders = self._way.stages[self._stage]
        shards = [torch.empty(holder.shapes[parameter]) for holder in holders]
        self._stage_group.allgather([shards], [self.parameters[parameter]]).wait()
        return {holder.name: {parameter: shard} for holder, shard in zip(holders, shards, strict=True)}

    def send_plain(self, num_bytes: int, times: int) -> None:
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        for _ in range(times):
            self._group.send([buffer], self._way.size - 1, 0).wait()

    def cpu_seconds(self) -> float:
        return time.process_time()


class Engine:
    """A vLLM engine with one worker."""

    def __init__(self, rollout: Any, folder: Path, threads: int):
        from megarl.rollout.vllm.environment import environment

        os.environ.update(environment(1, threads, index=0))
        from megarl.rollout.vllm.engine import VllmEngine, rollout_arguments

        self._engine = VllmEngine(rollout, rollout_arguments(rollout, folder, "float32", seed=0))
        self._version = 0

    def open(self, plan: Plan, channel: Any, holder: Holder) -> None:
        self._engine.connect(CompactPlan.of(plan), channel, [holder], by_loader=False)

    def refit(self) -> float:
        """Seconds."""
        self._version += 1
        start = time.perf_counter()
        self._engine.refit(self._version)
        return time.perf_counter() - start

    def open_common(self, way: CommonWay) -> None:
        self._way, self._group = way, way.group("all", way.size - 1, way.size)
        self._tensors = [list(way.tensors(stage)) for stage in range(len(way.stages))]

    def receive_common(self) -> float:
        """Seconds."""
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

    def cpu_seconds(self) -> float:
        return time.process_time()

    def plain_copy(self, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """Copy the same number of bytes in the memory of one process. Return the seconds."""
        if not hasattr(self, "_copies"):
            self._copies = [(torch.zeros(shape), torch.ones(shape)) for shape in shapes.values()]
        start = time.perf_counter()
        for target, source in self._copies:
            target.copy_(source)
        return time.perf_counter() - start

    def wipe(self) -> None:
        self._engine._llm.apply_model(_wipe)

    def checksums(self) -> list[dict[str, str]]:
        return self._engine.checksums()


def _wipe(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
