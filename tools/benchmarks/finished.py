"""Measure the time to write finished groups of rollouts to disk, as a run does while it samples and trains.

.venv/bin/python tools/benchmarks/finished.py --out tools/benchmarks/results/finished.json
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from benchmark import run_benchmark, sample_of

from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.rewards.finished_files import GroupFile, write_group, write_results
from megarl.rewards.result import Result

GROUPS = 20
CASES = {
    "8 responses of 32 tokens": (8, 32, 0),
    "16 responses of 4,096 tokens": (16, 4096, 0),
    "16 responses of 4,096 tokens, with routes in 48 layers": (16, 4096, 48),
}
"""Name -> responses in a group, tokens per response, and layers with routes to 8 experts each."""


def group_of(number: int, num_samples: int, num_tokens: int, num_layers: int) -> list[Sample]:
    """Return a group of incompressible samples, each with a text of 4 characters per token."""
    generator = np.random.default_rng(number)
    prompt, samples = Prompt(f"rows:{number}", "How many?", [1] * 100, answer="5"), []
    for i in range(num_samples):
        text = "".join(random.choices("abcdefgh ", k=4 * num_tokens))
        ids = generator.integers(0, 150_000, num_tokens, np.int32)
        sample = sample_of(f"1.{number}.{i}", prompt, ids, text=text)
        sample = replace(sample, response_logprobs=generator.standard_normal(num_tokens).astype(np.float32))
        if num_layers:
            shape = (100 + num_tokens, num_layers, 8)
            sample = replace(sample, routes=generator.integers(0, 127, shape, np.int8))
        samples.append(sample)
    return samples


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    folder = arguments.folder or work
    return {"groups": GROUPS, "cases": {name: case(folder / str(i), *CASES[name]) for i, name in enumerate(CASES)}}


def case(folder: Path, num_samples: int, num_tokens: int, num_layers: int) -> dict[str, Any]:
    """Return the figures of one kind of group."""
    folder.mkdir(parents=True)
    seconds, cpu = [], []
    for number in range(GROUPS):
        group = group_of(number, num_samples, num_tokens, num_layers)
        results = {sample.rollout_id: {"math_match": Result(1.0)} for sample in group}
        begin, cpu_begin = time.perf_counter(), time.process_time()
        write_results(write_group(folder, group), results)
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - cpu_begin)
    files = GroupFile.all_in(folder)
    begin = time.perf_counter()
    for file in files:
        file.load()
        file.load_results()
    return {
        "tokens": num_samples * num_tokens,
        "bytes": sum(file.stat().st_size for file in folder.iterdir()) / GROUPS,
        "seconds": median(seconds),
        "slowest_seconds": max(seconds),
        "cpu_seconds": median(cpu),
        "load_seconds": (time.perf_counter() - begin) / GROUPS,
    }


if __name__ == "__main__":
    folder = ("--folder", dict(type=Path, help="new folder on the file system to measure (default: a temporary one)"))
    run_benchmark(__doc__, measure, folder)
