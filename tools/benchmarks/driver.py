"""Measure the overhead of a step in the driver and in a rank: joining scores, baselines, scheduling microbatches, Ray
calls to all ranks, merging metrics, completing a checkpoint; unpickling and collating a rank's samples. Engines,
rewards and ranks are stubs.

.venv/bin/python tools/benchmarks/driver.py --out tools/benchmarks/results/driver.json
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import megarl.cluster  # noqa: F401  configures Ray's authentication, which Ray reads on import

# isort: split
import numpy as np
import ray
import torch
from benchmark import BASE, Laps, option, run_benchmark
from ray import cloudpickle

from megarl.algorithms.baselines import MovingAverage
from megarl.cluster.groups.group import ProcessActor, WorkerGroup
from megarl.cluster.groups.remote import remote
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import RankBatch
from megarl.cluster.session import Session
from megarl.cluster.supervision.supervisor import supervised
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.checkpoint import FileRecord
from megarl.core.metrics import Metric, merge, merge_updates
from megarl.core.timing import Stopwatch
from megarl.core.types import Prompt, Sample, SampleRef, Score, VersionRun
from megarl.data.collate import with_scores
from megarl.data.local_batch import LocalBatch
from megarl.data.packing import Packing
from megarl.models.token_cost import TokenCost
from megarl.rollout.engine import SamplingRequest
from megarl.run.checkpoints import Checkpoints
from megarl.step.baselines import attach_baselines
from megarl.step.dispatch import dispatch, samples_of, updates_of
from megarl.step.metrics import step_metrics
from megarl.step.requests import requests
from megarl.step.rollouts import choose
from megarl.step.scoring import select

FEWER_TOKENS = 8
"""Divisor of the sample lengths for the second measurement of memory."""

STEPS = 9
"""Number of measured steps of a rank. The result is the median, because memory pools are empty in the first step."""

CALLS = 6
"""Number of calls to each rank per step: a forward pass, an update and its end, the refit, a copy for the checkpoint,
and the wait for the checkpoint's files."""

ANSWERING = 2
"""Number of processes that answer for all ranks."""

FILES = 2
"""Number of checkpoint files per rank."""

NUM_METRICS = 40
"""Number of metrics that a rank returns per update."""


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
    """A step's inputs from engines, rewards and ranks, made before the measurement."""

    prompts: list[Prompt]
    samples: list[list[SampleRef]]
    scores: list[Score]
    metrics: list[dict[str, Metric]]


@ray.remote(num_cpus=0, max_concurrency=64)
class StubActor(ProcessActor):
    """Answers for many ranks."""

    def stub(self) -> None:
        """Return at once."""

    def update(self) -> dict[str, Metric]:
        return {f"policy/{k}": Metric(0.5, 1000.0) for k in range(NUM_METRICS)}


class StubGroup(WorkerGroup):
    """All ranks."""

    title = "StubActor"

    @remote(timeout="update")
    def _stub(self) -> None: ...

    @remote(timeout="update")
    def _update(self) -> dict[str, Metric]: ...

    def step(self) -> None:
        """Make the calls of a step. The update returns metrics."""
        for _ in range(CALLS - 1):
            self._stub().result()
        self._update().result()


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure a step, and the driver's memory again with samples of an eighth of the length."""
    case = Case(arguments.prompts, arguments.samples_per_prompt, arguments.tokens, arguments.ranks)
    config, packing, step = config_of(case), packing_of(case), step_of(case)
    lap = Laps()
    rank_batches = driver(config, packing, step, lap)
    lap("complete a checkpoint", complete_checkpoint, scratch / "checkpoints", case.ranks)
    shorter = case._replace(tokens=case.tokens // FEWER_TOKENS)
    memory = {
        str(each.tokens): peak_bytes(config_of(each), packing_of(each), step_of(each)) for each in (case, shorter)
    }
    call_all_ranks(config, case.ranks, scratch, lap)  # last, because Ray's threads keep running
    return {
        **case._asdict(),
        "microbatches_per_rank": len(rank_batches[0].microbatches),
        "driver": {"cpu_seconds": lap.seconds, "peak_bytes_by_tokens": memory},
        "rank": rank(case, packing, rank_batches[0], step),
    }


def driver(config: Config, packing: Packing, step: Step, lap: Laps) -> list[RankBatch]:
    """Do the driver's work in a step of one update, in the same order, and return the ranks' batches."""
    lap("requests", requests, config, 1, step.prompts)
    groups, metrics = lap("join with scores", select, config, step.samples, step.scores)
    chosen = lap("choose groups", choose, groups, config.batch.prompts_per_step)
    [update] = lap("updates", updates_of, config, chosen)
    samples: list[SampleRef] = lap("baselines", attach_baselines, config, update, {}, {}, MovingAverage())
    rank_batches = lap("microbatches", dispatch, config, samples, packing)
    lap("pickle microbatches", lambda: [cloudpickle.dumps(rank_batch) for rank_batch in rank_batches])
    merged = lap("merge metrics", lambda: merge_updates([merge(step.metrics)]))
    lap("metrics of the step", step_metrics, config, step.samples, Stopwatch(), 1)
    assert len(samples) == len(samples_of(update)) and len(merged) == NUM_METRICS and metrics
    return rank_batches


def complete_checkpoint(folder: Path, ranks: int) -> None:
    """Complete a checkpoint of empty files, written by all ranks."""
    checkpoints = Checkpoints(folder)
    hidden = checkpoints.begin(1)
    names = [f"__{rank}_{i}.distcp" for rank in range(ranks) for i in range(FILES)]
    for name in names:
        (hidden / name).touch()
    checkpoints.commit(1, {"run": {}}, [FileRecord(name, 0, "0" * 64) for name in names])


def call_all_ranks(config: Config, ranks: int, scratch: Path, lap: Laps) -> None:
    """Make a step's calls to all ranks twice and measure the second time, because processes and connections start
    during the first."""
    with Session(config, scratch, scratch) as session:
        actors = [StubActor.remote(Process("stub", i, 1), scratch) for i in range(ANSWERING)]
        group = StubGroup(session, "stub", {f"rank-{i}": actors[i % ANSWERING] for i in range(ranks)})
        group.step()
        lap(f"{CALLS} calls to each rank", group.step)


def peak_bytes(config: Config, packing: Packing, step: Step) -> int:
    """Return the driver's peak memory in a step, without its inputs from engines and rewards."""
    tracemalloc.start()
    driver(config, packing, step, Laps())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def rank(case: Case, packing: Packing, rank_batch: RankBatch, step: Step) -> dict[str, Any]:
    """Measure one rank's part of a step, with samples as they are stored in Ray, of the given lengths."""
    torch.set_num_threads(1)
    prompts = {prompt.id: prompt for prompt in step.prompts}
    source = np.random.default_rng(0)
    sent = [pickle.dumps(sample_of(item, prompts[item.prompt_id], source), 5) for item in rank_batch.samples]

    def received() -> LocalBatch:
        samples = [pickle.loads(data) for data in sent]
        training = [replace(item, sample=own) for item, own in zip(rank_batch.samples, samples, strict=True)]
        return LocalBatch(training, rank_batch.microbatches)

    def collated(batch: LocalBatch) -> int:
        batches = batch.token_batches(packing, "states", True, False, torch.device("cpu"))
        return sum(len(token_batch.tokens) for token_batch in batches)

    def with_log_probs(batch: LocalBatch) -> None:
        own = {item.sample.id: torch.zeros(len(item.sample.response_ids)) for item in batch.samples}
        token_batches = batch.token_batches(packing, "states", True, False, torch.device("cpu"))
        for token_batch, members in zip(token_batches, batch.members, strict=True):
            with_scores(token_batch, members, {"old": own, "reference": own})

    steps = []
    for _ in range(STEPS):
        lap = Laps()
        batch = lap("unpickle", received)
        lap("collate", collated, batch)
        lap("collate for the next pass", collated, batch)
        lap("add log-probs of two passes", with_log_probs, batch)
        steps.append(lap.seconds)
    seconds = {name: median(step[name] for step in steps) for name in steps[0]}
    tokens = sum(item.num_tokens for item in rank_batch.samples)
    return {"samples": len(sent), "tokens": tokens, "bytes": sum(map(len, sent)), "cpu_seconds": seconds}


def step_of(case: Case) -> Step:
    source = random.Random(0)
    ids = np.random.default_rng(0)
    prompts = [
        Prompt(f"data.jsonl:{i}", "", ids.integers(150_000, size=case.prompt_tokens)) for i in range(case.prompts)
    ]
    asked = requests(config_of(case), 1, prompts)
    samples = [[ref_of(case, request, source) for request in group] for group in asked]
    scores = [Score(float(source.random() < 0.5), {"correct": 1.0}) for group in samples for _ in group]
    metrics = [{f"policy/{k}": Metric(source.random(), 1000.0) for k in range(NUM_METRICS)} for _ in range(case.ranks)]
    return Step(prompts, samples, scores, metrics)


def ref_of(case: Case, request: SamplingRequest, source: random.Random) -> SampleRef:
    n = source.randint(case.longest_response // 3, case.longest_response)
    return SampleRef(
        request.sample_id, request.prompt.id, len(request.prompt.token_ids), n, n, "stop", 0, 0, sample=ref()
    )


def ref() -> ray.ObjectRef:
    return ray.ObjectRef(os.urandom(28))


def sample_of(ref: SampleRef, prompt: Prompt, source: np.random.Generator) -> Sample:
    n = ref.num_response_tokens
    ids, logprobs = source.integers(150_000, size=n), -source.random(n)
    return Sample(ref.id, prompt, ids, logprobs, np.ones(n, np.bool_), (VersionRun(0, n),), ref.finish_reason, "")


def packing_of(case: Case) -> Packing:
    """Return the packing of a model with about 8B parameters and a vocabulary of 150,000."""
    return Packing(
        token_budget=4 * (case.prompt_tokens + case.longest_response),
        num_ranks=case.ranks,
        shares_prompts=True,
        document_multiple=1,
        pack_multiple=1,
        microbatch_multiple=1,
        cost=TokenCost(attended=2e-5, scored=0.08),
    )


def config_of(case: Case) -> Config:
    settings = {
        "model.path": "model",
        "data.source": "arithmetic",
        "actor.layout.dp": case.ranks,
        "actor.tokens_per_microbatch": 4 * (case.prompt_tokens + case.longest_response),
        "rollout.max_new_tokens": case.longest_response,
        "rollout.context_length": case.prompt_tokens + case.longest_response,
        "batch.prompts_per_step": case.prompts,
        "batch.prompts_per_update": case.prompts,
        "batch.samples_per_prompt": case.samples_per_prompt,
        "cluster.object_store_mib": 100,
    }
    return load(BASE, [f"{key}={value}" for key, value in settings.items()])


if __name__ == "__main__":
    with supervised() as folder:
        run_benchmark(
            __doc__,
            lambda arguments: measure(arguments, folder),
            option("--prompts", type=int, default=1024),
            option("--samples-per-prompt", type=int, default=16),
            option("--tokens", type=int, default=2000, help="mean length of a sample (%(default)s)"),
            option("--ranks", type=int, default=1024, help="data-parallel ranks"),
        )
