"""Measure the driver's overhead in a large run, whose engines, rewards and ranks are stubs.

`step`: joining scores, baselines, scheduling microbatches, Ray calls to all ranks, merging metrics, completing a
checkpoint; and in a rank, unpickling and collating its samples.
`start`: recipe, placement, results from all ranks and engines, plans, and the first refit. The stubs return results of
realistic size immediately.

.venv/bin/python tools/benchmarks/driver.py step --out tools/benchmarks/results/driver.json
.venv/bin/python tools/benchmarks/driver.py start --out tools/benchmarks/results/start.json
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import megarl.cluster  # noqa: F401  configures Ray's authentication, which Ray reads on import

# isort: split
import numpy as np
import ray
import torch
from benchmark import load_config, run_benchmark, sample_of
from ray import cloudpickle

from megarl.algorithms.baselines import MovingAverage
from megarl.cluster.groups.engines import EngineGroup
from megarl.cluster.groups.group import ProcessActor, TimedResult, WorkerGroup
from megarl.cluster.groups.ranks import Started
from megarl.cluster.groups.remote import remote
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.placement import Process, place
from megarl.cluster.rank_batch import RankBatch
from megarl.cluster.refit import Refit
from megarl.cluster.session import Session
from megarl.cluster.supervision.processes import ProcessId
from megarl.cluster.supervision.supervisor import supervised
from megarl.config.schema import Config
from megarl.core.checkpoint import FileRecord
from megarl.core.metrics import Metric, merge, merge_updates
from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
from megarl.core.score import Score
from megarl.core.timing import Stopwatch
from megarl.core.token_batch import TokenBatch
from megarl.data.collate import add_scores
from megarl.data.local_batch import LocalBatch
from megarl.data.packing import Packing
from megarl.models.token_cost import TokenCost
from megarl.resharding.families import huggingface_holder, megatron_holder, vllm_holders
from megarl.resharding.planning.planner import make_plan
from megarl.rollout.engine import SamplingRequest, SyncStats
from megarl.run.checkpoints import Checkpoints
from megarl.step.baselines import attach_baselines
from megarl.step.dispatch import dispatch, samples_of, updates_of
from megarl.step.metrics import step_metrics
from megarl.step.requests import requests
from megarl.step.rollouts import choose
from megarl.step.scoring import select
from tests.published_models import CONFIGS

STEPS = 9
"""Number of measured steps per rank. The result is the median, because memory pools are empty in the first step."""

CALLS = 6
"""Number of calls to each rank per step: a forward pass, an update and its end, the refit, a copy for the checkpoint,
and the wait for the checkpoint's files."""

ANSWERING = 2
"""Number of processes that stand in for all ranks and engines."""

NUM_METRICS = 40
"""Number of metrics that a rank returns per update."""

COST = TokenCost(attended=2e-5, scored=0.08)
"""The cost of a model with about 8B parameters and a vocabulary of 150,000."""


class Laps(dict[str, float]):
    """The CPU seconds of this process by task."""

    def __call__(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        start = time.process_time()
        result = function(*args)
        self[name] = time.process_time() - start
        return result


class Case(NamedTuple):
    prompts: int
    samples_per_prompt: int
    tokens: int
    ranks: int

    @property
    def prompt_tokens(self) -> int:
        return self.tokens // 10

    @property
    def longest_response(self) -> int:
        """Maximum length of a response, such that samples have `tokens` tokens on average."""
        return 3 * (self.tokens - self.prompt_tokens) // 2


class Step(NamedTuple):
    """A step's configuration, and its inputs from engines, rewards and ranks, created before the measurement."""

    config: Config
    packing: Packing
    prompts: list[Prompt]
    samples: list[list[SampleRef]]
    scores: list[Score]
    metrics: list[dict[str, Metric]]


class StubGroup(WorkerGroup):
    """The stubs of all ranks."""

    title = "StubProcess"

    @remote(timeout="update")
    def _stub(self) -> None: ...

    @remote(timeout="update")
    def _update(self) -> dict[str, Metric]: ...

    def step(self) -> None:
        for call in (*[self._stub] * (CALLS - 1), self._update):
            call().result()


def measure_step(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure a step, and the driver's memory again with samples of an eighth of the length."""
    case = Case(arguments.prompts, arguments.samples_per_prompt, arguments.tokens, arguments.ranks)
    step, lap = step_of(case), Laps()
    rank_batches = driver(step, lap)
    lap("complete a checkpoint", complete_checkpoint, scratch / "checkpoints", case.ranks)
    shorter = case._replace(tokens=case.tokens // 8)
    memory = {str(each.tokens): peak_bytes(step_of(each)) for each in (case, shorter)}
    call_all_ranks(step.config, case.ranks, scratch, lap)  # call it last, because Ray's threads keep running
    return {
        **case._asdict(),
        "driver": {"cpu_seconds": lap, "peak_bytes_by_tokens": memory},
        "rank": rank(rank_batches[0], step),
    }


def driver(step: Step, lap: Laps) -> list[RankBatch]:
    """Run the driver's part of a step with one update, in the order of a real step. Return the ranks' batches."""
    config = step.config
    lap("requests", requests, config, 1, step.prompts)
    groups, metrics = lap("join with scores", select, config, step.samples, step.scores)
    chosen = lap("choose groups", choose, groups, config.batch.prompts_per_step)
    [update] = lap("updates", updates_of, config, chosen)
    samples: list[SampleRef] = lap("baselines", attach_baselines, config, update, {}, {}, MovingAverage())
    rank_batches = lap("microbatches", dispatch, config, samples, step.packing)
    lap("pickle microbatches", lambda: [cloudpickle.dumps(rank_batch) for rank_batch in rank_batches])
    merged = lap("merge metrics", lambda: merge_updates([merge(step.metrics)]))
    lap("metrics of the step", step_metrics, config, step.samples, Stopwatch(), 1)
    assert len(samples) == len(samples_of(update)) and len(merged) == NUM_METRICS and metrics
    return rank_batches


def complete_checkpoint(folder: Path, ranks: int) -> None:
    """Complete a checkpoint of two empty files per rank."""
    checkpoints = Checkpoints(folder)
    hidden = checkpoints.begin(1)
    names = [f"__{rank}_{i}.distcp" for rank in range(ranks) for i in range(2)]
    for name in names:
        (hidden / name).touch()
    checkpoints.commit(1, {"run": {}}, [FileRecord(name, 0, "0" * 64) for name in names])


def call_all_ranks(config: Config, ranks: int, scratch: Path, lap: Laps) -> None:
    """Make a step's calls to all ranks twice and measure the second time, because processes and connections start
    during the first."""
    with Session(config, scratch, scratch) as session:
        actors = [StubProcess.remote(Process("stub", i, 1), scratch) for i in range(ANSWERING)]
        group = StubGroup(session, "stub", {f"rank-{i}": stub_handle(actors[i % ANSWERING], i) for i in range(ranks)})
        group.step()
        lap(f"{CALLS} calls to each rank", group.step)


def peak_bytes(step: Step) -> int:
    """Return the driver's peak memory in a step, without its inputs from engines and rewards."""
    tracemalloc.start()
    driver(step, Laps())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def rank(rank_batch: RankBatch, step: Step) -> dict[str, Any]:
    """Measure one rank's part of a step, with samples as they are stored in Ray, of the given lengths."""
    torch.set_num_threads(1)
    prompts = {prompt.id: prompt for prompt in step.prompts}
    source = np.random.default_rng(0)
    sent = []
    for ref in rank_batch.samples:
        ids = source.integers(150_000, size=ref.num_response_tokens)
        sent.append(pickle.dumps(sample_of(ref.id, prompts[ref.prompt_id], ids), 5))

    def received() -> LocalBatch:
        samples = [pickle.loads(data) for data in sent]
        training = [replace(item, sample=own) for item, own in zip(rank_batch.samples, samples, strict=True)]
        return LocalBatch(training, rank_batch.microbatches)

    def collated(batch: LocalBatch) -> list[TokenBatch]:
        return batch.token_batches(step.packing, "states", True, False, torch.device("cpu"))

    def with_log_probs(batch: LocalBatch) -> None:
        own = {item.sample.id: torch.zeros(len(item.sample.response_ids)) for item in batch.samples}
        for token_batch, members in zip(collated(batch), batch.members, strict=True):
            add_scores(token_batch, members, {"old": own, "reference": own})

    laps = [Laps() for _ in range(STEPS)]
    for lap in laps:
        batch = lap("unpickle", received)
        lap("collate", collated, batch)
        lap("collate for the next pass", collated, batch)
        lap("add log-probs of two passes", with_log_probs, batch)
    seconds = {name: median(lap[name] for lap in laps) for name in laps[0]}
    tokens = sum(item.num_tokens for item in rank_batch.samples)
    return {"samples": len(sent), "tokens": tokens, "bytes": sum(map(len, sent)), "cpu_seconds": seconds}


def step_of(case: Case) -> Step:
    source = random.Random(0)
    ids = np.random.default_rng(0)
    prompts = [
        Prompt(f"data.jsonl:{i}", "", ids.integers(150_000, size=case.prompt_tokens)) for i in range(case.prompts)
    ]
    config = config_of(case)
    packing = Packing(config.actor.tokens_per_microbatch, case.ranks, True, 1, 1, 1, COST)
    asked = requests(config, 1, prompts)
    samples = [[ref_of(case, request, source) for request in group] for group in asked]
    scores = [Score(float(source.random() < 0.5), {"correct": 1.0}) for group in samples for _ in group]
    metrics = [{f"policy/{k}": Metric(source.random(), 1000.0) for k in range(NUM_METRICS)} for _ in range(case.ranks)]
    return Step(config, packing, prompts, samples, scores, metrics)


def ref_of(case: Case, request: SamplingRequest, source: random.Random) -> SampleRef:
    n = source.randint(case.longest_response // 3, case.longest_response)
    num_prompt_tokens, sample = len(request.prompt.token_ids), ray.ObjectRef(os.urandom(28))
    return SampleRef(request.sample_id, request.prompt.id, num_prompt_tokens, n, n, "stop", 0, 0, sample=sample)


def config_of(case: Case) -> Config:
    longest = case.prompt_tokens + case.longest_response
    settings = batch_of(case.prompts, case.samples_per_prompt) | {
        "actor.layout.dp": case.ranks,
        "actor.tokens_per_microbatch": 4 * longest,
        "rollout.max_new_tokens": case.longest_response,
        "rollout.context_length": longest,
        "cluster.object_store_mib": 100,
    }
    return load_config("model", settings)


def batch_of(prompts: int, samples_per_prompt: int) -> dict[str, int]:
    batch = {"prompts_per_step": prompts, "prompts_per_update": prompts, "samples_per_prompt": samples_per_prompt}
    return {f"batch.{name}": size for name, size in batch.items()}


CASES = {
    "deepseek-v3": (
        "DeepSeek-V3",
        "{tp: 8, pp: 16, dp: 8, ep: 32, etp: 1, last_stage_layers: 1, sequence_parallel: true}",
        {"rollout.replicas": 32, "rollout.tp": 8, "cluster.nodes": 160},
    ),
    "qwen2.5-0.5b": ("Qwen2.5-0.5B", "{pp: 2, dp: 4}", {"rollout.replicas": 4, "rollout.tp": 2, "cluster.nodes": 2}),
}
"""Name -> a model, actor.layout, and the engines on the remaining GPUs of the nodes."""


@ray.remote(num_cpus=0, max_concurrency=64)
class StubProcess(ProcessActor):
    """Stands in for many ranks and engines."""

    def prepare(self, config: Config, hf_config: dict[str, Any], ranks: Sequence[int]) -> None:
        """Prepare the results of a start, for these ranks and all engines."""
        self._shards = [h.shard for h in vllm_holders(hf_config, config.rollout.tp, 1, config.model.dtype)]
        holder = partial(megatron_holder, hf_config, config.actor.layout, dtype=config.model.dtype)
        packing = Packing(4096, 8, True, 1, 8, 1, COST)
        self._started = {rank: Started(rank, holder(rank), packing, "stub", ProcessId.own()) for rank in ranks}

    def call(self, rank: int, method: str, *_: Any) -> TimedResult:
        """Return a method's result for one rank or engine. Methods that receive a part of the plan do nothing."""
        value: Any = None
        match method:
            case "open_store":
                value = "127.0.0.1", 1
            case "start":
                value = self._started.get(rank)
            case "describe_parameters":
                shapes = [{n: (shape, s.dtypes[n]) for n, shape in s.shapes.items()} for s in self._shards]
                value = shapes, []
            case "update":
                value = {f"policy/{k}": Metric(0.5, 1000.0) for k in range(NUM_METRICS)}
            case "send":
                value = 0
            case "refit":
                value = [SyncStats(0, 0) for _ in self._shards]
        return TimedResult(value, time.time(), time.time())


def stub_handle(actor: Any, rank: int) -> SimpleNamespace:
    """Return the handle of one rank or engine. It forwards calls to the process that stands in for it."""
    call = SimpleNamespace(options=lambda **o: SimpleNamespace(remote=partial(actor.call.options(**o).remote, rank)))
    return SimpleNamespace(__ray_ready__=actor.__ray_ready__, call=call)


def measure_start(arguments: argparse.Namespace, scratch: Path, folder: Path) -> dict[str, Any]:
    model, layout, engine_settings = CASES[arguments.case]
    lap, hf_config = Laps(), CONFIGS[model]
    (folder / "config.json").write_text(json.dumps(hf_config))
    settings = batch_of(1024, 16) | {
        "actor.layout": layout,
        "rollout.verify_refit": "off",
        "cluster.placement": "disaggregated",
        "cluster.object_store_mib": 400,
        **engine_settings,
    }
    config = lap("read the recipe", load_config, folder, settings)
    placement = lap("place", partial(place, config, cores=96, on_gpus=True, gpus_per_node=8))
    one_node = load_config(folder, settings | {"cluster.nodes": 1})
    with Session(one_node, scratch, scratch) as session:
        stubs = [StubProcess.remote(Process("stub", i, 1), scratch) for i in range(ANSWERING)]
        numbers = range(len(placement.trainers))
        ray.get([stub.prepare.remote(config, hf_config, numbers[i::ANSWERING]) for i, stub in enumerate(stubs)])
        session.on_node = lambda _, process: SimpleNamespace(
            remote=lambda *_: stub_handle(stubs[process.index % ANSWERING], process.index)
        )
        trainers = TrainerGroup(session, config, "actor", folder, placement.trainers)
        lap("start the ranks", lambda: trainers.start().result())
        engines = EngineGroup(session, config, folder, placement.engines)
        lap("start the engines", lambda: engines.start().result())
        whole = huggingface_holder(hf_config, config.model.dtype)
        export_plan = lap("plan the export", make_plan, trainers.holders, [whole])
        refit = Refit(session, config, trainers, engines, export_plan)
        metrics: dict[str, Metric] = lap("plan and run the first refit", refit.run, 0)
    assert metrics["engines/alive"].value == config.rollout.replicas
    return {
        "model": model,
        "engines": f"{config.rollout.replicas} × tp={config.rollout.tp}",
        "ranks": len(placement.trainers),
        "driver_cpu_seconds": lap,
    }


if __name__ == "__main__":
    with supervised() as folder:
        run_benchmark(
            __doc__,
            {
                "step": lambda arguments, _: measure_step(arguments, folder),
                "start": lambda arguments, work: measure_start(arguments, folder, work),
            },
            ("--prompts", dict(type=int, default=1024)),
            ("--samples-per-prompt", dict(type=int, default=16)),
            ("--tokens", dict(type=int, default=2000, help="mean length of a sample (%(default)s)")),
            ("--ranks", dict(type=int, default=1024, help="data-parallel ranks")),
            ("--case", dict(choices=CASES, default="deepseek-v3", help="model and layouts of a start")),
        )
