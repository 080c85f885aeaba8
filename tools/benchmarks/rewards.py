"""Measure how many math answers per second a run's pool of reward functions scores, and the CPU time per answer in the
pool's processes, which gives the throughput of a machine with one core per process.

.venv/bin/python tools/benchmarks/rewards.py --out tools/benchmarks/results/rewards.json
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from fractions import Fraction
from typing import Any

import psutil
from benchmark import run_benchmark, sample_of

from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.rewards.pool import FunctionPool

PROMPTS, SAMPLES, RUNS = 256, 8, 3
PROCESSES = 2
THOUGHTS = "Let us see: the sum of the two parts is $a + b$, which we divide by what is left over. "
"""Text before the answer, repeated to about 1,700 characters."""

CASES = {
    "math_match, groups as in a run": ("math_match", False),
    "math_match, distinct answers": ("math_match", True),
    "exact_match": ("exact_match", False),
}
"""Name -> reward function, and whether all responses have different answers."""

Form = Callable[[Fraction, Fraction], tuple[str, str]]
"""Function from the correct number and the response's number to the texts of reference and response."""

FORMS: dict[str, Form] = {
    "integer": lambda right, said: (f"{right.numerator}", f"{said.numerator}"),
    "fraction": lambda right, said: (
        rf"\frac{{{right.numerator}}}{{{right.denominator}}}",
        rf"\dfrac{{{2 * said.numerator}}}{{{2 * said.denominator}}}",
    ),
    "root": lambda right, said: (rf"{right.numerator}\sqrt{{2}}", rf"\sqrt{{{2 * said.numerator**2}}}"),
    "polynomial": lambda right, said: (
        f"x^2 + {2 * right.numerator}x + {right.numerator**2}",
        f"(x+{said.numerator})^2",
    ),
    "interval": lambda right, said: (f"[0, {right.numerator})", f"[0,{said.numerator})"),
}


def samples(seed: int, are_distinct: bool) -> Iterator[Sample]:
    """Yield the samples of each prompt. Half of the responses are correct and, as in a run, several have the same
    answer. With `are_distinct`, every response has a different answer, and one is correct."""
    generator = random.Random(seed)
    for i in range(PROMPTS):
        form = FORMS[list(FORMS)[i % len(FORMS)]]
        right = Fraction(generator.randint(1, 999), generator.randint(2, 99))
        prompt = Prompt(f"{i}", "How many?", [1], answer=form(right, right)[0])
        for j in range(SAMPLES):
            said = right if generator.random() < 0.5 else right + generator.randint(1, 9)
            said = right + j if are_distinct else said
            text = f"{THOUGHTS * 20}So it is $\\boxed{{{form(right, said)[1]}}}$."
            yield sample_of(f"{i}.{j}", prompt, [7], text=text)


def through_pool(pool: FunctionPool, function: str, batch: list[Sample]) -> tuple[float, float, list[float | None]]:
    """Return the seconds to score all samples, the CPU seconds of the pool's processes, and the rewards."""
    begin, cpu = time.perf_counter(), cpu_seconds(pool)
    calls = [pool.call(function, sample.prompt.text, sample.text, sample.prompt.answer) for sample in batch]
    values = [call.result().value for call in calls]
    return time.perf_counter() - begin, cpu_seconds(pool) - cpu, values


def cpu_seconds(pool: FunctionPool) -> float:
    times = [psutil.Process(child.pid).cpu_times() for child in pool._children]
    return sum(time.user + time.system for time in times)


def measure(*_: object) -> dict[str, Any]:
    rates, cpu_ms = defaultdict(list), defaultdict(list)
    failed = 0  # on a busy machine, calls may exceed math_match's time limit
    with closing(FunctionPool(["math_match", "exact_match"], None, PROCESSES, 60.0)) as pool:
        for case, (function, are_distinct) in CASES.items():
            through_pool(pool, function, list(samples(RUNS, are_distinct)))  # warm-up
            for seed in range(RUNS):
                batch = list(samples(seed, are_distinct))
                seconds, cpu, values = through_pool(pool, function, batch)
                cpu_ms[case].append(1000 * cpu / len(batch))
                failed += values.count(None)
                rates[case].append(round(len(batch) / seconds, 1))
    return {
        "processes": PROCESSES,
        "samples": len(batch),
        "response_characters": round(statistics.fmean(len(sample.text) for sample in batch)),
        "answers_per_second": {case: statistics.median(values) for case, values in rates.items()},
        "cpu_ms_per_answer": {case: round(statistics.median(values), 3) for case, values in cpu_ms.items()},
        "runs": rates,
        "failed": failed,
    }


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
