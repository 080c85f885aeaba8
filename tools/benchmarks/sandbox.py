"""Measure how many programs per second run in sandboxes: each in a new sandbox, and one by one in a persistent one.

.venv/bin/python tools/benchmarks/sandbox.py --out tools/benchmarks/results/sandbox.json
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from benchmark import load_config, own_cpu_seconds, run_benchmark

from megarl.rewards.code import code_tests
from megarl.sandbox.choice import find_provider
from megarl.sandbox.provider import Provider

RESPONSE = """```python
def primes(n):
    return [p for p in range(2, n) if all(p % d for d in range(2, int(p**0.5) + 1))]
```"""
TESTS = ["assert primes(10) == [2, 3, 5, 7]", "assert primes(2) == []", "assert len(primes(1000)) == 168"]

PER_SANDBOX = 10
"""Number of programs that one persistent sandbox runs, as a tool's sandbox does."""

Program = Callable[[], Awaitable[bool]]


async def null_programs(provider: Provider, count: int = 1) -> bool:
    async with await provider.start() as sandbox:
        return all([(await sandbox.run([provider.python, "-c", ""])).succeeded for _ in range(count)])


async def small_test(provider: Provider) -> bool:
    return await code_tests("", RESPONSE, TESTS, sandbox=provider)


async def measure(program: Program, count: int, at_once: int, programs: int = 1) -> dict[str, Any]:
    """Call `program`, which runs `programs` programs, `count` times, with `at_once` concurrent calls. Return the
    programs per second, and the wall-clock and CPU seconds per program, including all child processes.
    """
    seconds: list[float] = []

    async def run_some(number: int) -> None:
        for _ in range(number):
            begin = time.perf_counter()
            assert await program(), "the program failed its tests"
            seconds.append(time.perf_counter() - begin)

    begin, cpu = time.perf_counter(), own_cpu_seconds()
    await asyncio.gather(*(run_some(count // at_once) for _ in range(at_once)))
    wall = time.perf_counter() - begin
    return {
        "programs": programs * len(seconds),
        "per_second": round(programs * len(seconds) / wall, 1),
        "median_seconds": round(statistics.median(seconds) / programs, 4),
        "cpu_seconds": round((own_cpu_seconds() - cpu) / len(seconds) / programs, 4),
    }


async def measure_all(count: int, at_once: int) -> dict[str, Any]:
    provider = await find_provider(load_config("none", {"sandbox.provider": "bubblewrap"}).sandbox)
    runs = {}
    for name, program, programs in (
        ("a null program", null_programs, 1),
        ("a small test", small_test, 1),
        ("null programs, ten in a sandbox", partial(null_programs, count=PER_SANDBOX), PER_SANDBOX),
    ):
        runs[name] = await measure(partial(program, provider), count // programs, at_once, programs)
    return {"provider": provider.name, "as_root": os.geteuid() == 0, "at_once": at_once, "runs": runs}


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        lambda arguments, _: asyncio.run(measure_all(arguments.count, arguments.at_once)),
        ("--count", dict(type=int, default=200, help="programs of each kind")),
        ("--at-once", dict(type=int, default=4)),
    )
