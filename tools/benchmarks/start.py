"""Measure the driver's CPU time to start a large run: recipe, placement, results from all ranks and engines, plans, and
the first refit. Ranks and engines are stubs that return results of realistic size immediately.

.venv/bin/python tools/benchmarks/start.py --out tools/benchmarks/results/start.json
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import megarl.cluster  # noqa: F401  configures Ray's authentication, which Ray reads on import

# isort: split
import ray
from benchmark import BASE, Laps, option, run_benchmark
from reshard import CONFIGS

from megarl.cluster.groups.engine_actor import Parameters
from megarl.cluster.groups.engines import EngineGroup
from megarl.cluster.groups.group import ProcessActor, TimedResult
from megarl.cluster.groups.ranks import Started
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.placement import Process, place
from megarl.cluster.refit import Refit
from megarl.cluster.session import Session
from megarl.cluster.supervision.supervisor import supervised
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.data.packing import Packing
from megarl.models.token_cost import TokenCost
from megarl.resharding.families import huggingface_holder, megatron_holder, vllm_holders
from megarl.resharding.planning.planner import make_plan
from megarl.rollout.engine import SyncStats

GPUS_PER_NODE = 8
ANSWERING = 2
"""Number of processes that answer for all ranks and engines."""

PACKING = Packing(4096, 8, True, 1, 8, 1, TokenCost(attended=2e-5, scored=0.08))


class Case(NamedTuple):
    model: str
    layout: str
    ranks: int
    engines: int
    engine_tp: int

    @property
    def nodes(self) -> int:
        return (self.ranks + self.engines * self.engine_tp) // GPUS_PER_NODE


CASES = {
    "deepseek-v3": Case(
        "DeepSeek-V3",
        "{tp: 8, pp: 16, dp: 8, ep: 32, etp: 1, last_stage_layers: 1, sequence_parallel: true}",
        ranks=1024,
        engines=32,
        engine_tp=8,
    ),
    "qwen2.5-0.5b": Case("Qwen2.5-0.5B", "{pp: 2, dp: 4}", ranks=8, engines=4, engine_tp=2),
}


class StubWorker:
    """Stub of a rank's worker in a refit, and of an engine."""

    def __init__(self, config: Config, hf_config: dict[str, Any]):
        holders = vllm_holders(hf_config, config.rollout.tp, 1, config.model.dtype)
        self._shards = [holder.shard for holder in holders]

    def describe_parameters(self) -> tuple[list[Parameters], list[str]]:
        shards = self._shards
        return [{name: (shape, shard.dtypes[name]) for name, shape in shard.shapes.items()} for shard in shards], []

    def send(self) -> int:
        return 0

    def refit(self, *_: Any) -> list[SyncStats]:
        return [SyncStats(0, 0) for _ in self._shards]


@ray.remote(num_cpus=0, max_concurrency=64)
class StubProcess(ProcessActor):
    """Answers for many ranks and engines."""

    def __init__(self, process: Process, logs: Path, config: Config, hf_config: dict[str, Any]):
        super().__init__(process, logs)
        self._worker = StubWorker(config, hf_config)
        self._holder = partial(megatron_holder, hf_config, config.actor.layout, dtype=config.model.dtype)
        self._holders = {}

    def prepare(self, ranks: Sequence[int]) -> None:
        """Prepare the start results of these ranks."""
        self._holders = {rank: self._holder(rank) for rank in ranks}

    def call(self, rank: int, method: str, *arguments: Any) -> TimedResult:
        """Run a method for one rank or engine. Methods that receive a part of the plan do nothing."""
        if method == "open_store":
            value = "127.0.0.1", 1
        elif method == "start":
            value = Started(rank, self._holders[rank], PACKING, "stub") if rank in self._holders else None
        else:
            value = getattr(self._worker, method)(*arguments) if hasattr(self._worker, method) else None
        return TimedResult(value, time.time(), time.time())


class StubHandle:
    """The handle of one rank or engine. It forwards calls to the process that answers for it."""

    def __init__(self, actor: Any, rank: int):
        self._actor, self._rank = actor, rank
        self.__ray_ready__ = actor.__ray_ready__
        self.call = SimpleNamespace(options=self._options)

    def _options(self, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self._actor.call.options(**options).remote, self._rank))


def measure(case: Case, scratch: Path) -> dict[str, Any]:
    lap, hf_config = Laps(), CONFIGS[case.model]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(hf_config))
        config = lap("read the recipe", config_of, case, folder)
        placement = lap("place", partial(place, config, cores=96, on_gpus=True, gpus_per_node=GPUS_PER_NODE))
        with Session(config_of(case, folder, "cluster.nodes=1"), scratch, scratch) as session:
            stubs = [StubProcess.remote(Process("stub", i, 1), scratch, config, hf_config) for i in range(ANSWERING)]
            numbers = range(len(placement.trainers))
            ray.get([stub.prepare.remote(numbers[i::ANSWERING]) for i, stub in enumerate(stubs)])
            session.on_node = lambda _, process: SimpleNamespace(
                remote=lambda *_: StubHandle(stubs[process.index % ANSWERING], process.index)
            )
            trainers = TrainerGroup(session, config, "actor", folder, placement.trainers)
            lap("start of the ranks", lambda: trainers.start().result())
            engines = EngineGroup(session, config, folder, placement.engines)
            lap("start of the engines", lambda: engines.start().result())
            whole = huggingface_holder(hf_config, config.model.dtype)
            export_plan = lap("plan of the export", make_plan, trainers.holders, [whole])
            refit = Refit(session, config, trainers, engines, export_plan)
            metrics: dict[str, Metric] = lap("first refit, with its plan", refit.run, 0)
    assert metrics["engines/alive"].value == case.engines
    assert len(placement.trainers) == case.ranks
    return {
        "model": case.model,
        "layout": case.layout,
        "engines": f"{case.engines} × tp={case.engine_tp}",
        "ranks": len(placement.trainers),
        "driver_cpu_seconds": lap.seconds,
    }


def config_of(case: Case, folder: Path, *overrides: str) -> Config:
    settings = {
        "model.path": folder,
        "data.source": "arithmetic",
        "actor.layout": case.layout,
        "rollout.tp": case.engine_tp,
        "rollout.replicas": case.engines,
        "rollout.verify_refit": "off",
        "batch.prompts_per_step": 1024,
        "batch.prompts_per_update": 1024,
        "batch.samples_per_prompt": 16,
        "cluster.placement": "disaggregated",
        "cluster.nodes": case.nodes,
        "cluster.object_store_mib": 400,
    }
    return load(BASE, [*(f"{key}={value}" for key, value in settings.items()), *overrides])


if __name__ == "__main__":
    with supervised() as folder:
        run_benchmark(
            __doc__,
            lambda arguments: measure(CASES[arguments.case], folder),
            option("--case", choices=CASES, default="deepseek-v3", help="a model and its layouts"),
        )
