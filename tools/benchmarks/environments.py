"""Rollouts of many turns in environments whose tool takes its time, on a tiny model: what the engine waits for, what a
turn costs of CPU beside the model, and how much of the later turns' prompts the engine has cached.

.venv/bin/python tools/benchmarks/environments.py --out tools/benchmarks/results/environments.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from machine import machine, machine_cpu_seconds

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # the model is the one that the tests make

if TYPE_CHECKING:
    from megarl.core.types import RolloutInfo
    from megarl.rollout.vllm.engine import VllmEngine

ROLLOUTS, GROUP, TURNS, TURN_TOKENS, PROMPT_TOKENS, PROCESSES = 512, 8, 8, 16, 1000, 2
MEDIAN_S, SIGMA = 0.2, 0.5
"""The time of a call of the tool, log-normal: its median, and the deviation of its logarithm."""

ENVIRONMENT = f"""
import asyncio
from math import log
from random import Random

from megarl.environments import Environment, Step, ToolCall, tool

class Slow(Environment):
    "Calls its tool after each turn, whatever that says: the model is a random one."

    def __init__(self):
        self.random = Random()

    @tool
    async def wait(self) -> str:
        "Takes a while."
        await asyncio.sleep(self.random.lognormvariate(log({MEDIAN_S}), {SIGMA}))
        return "It took a while."

    async def step(self, turn):
        return Step(await self.toolbox.call_all([ToolCall("wait", {{}})]), reward=0.0)
"""


@dataclass
class Steps:
    """The steps of an engine, each as vLLM's part of it begins and ends, and whether a request was left after it."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    has_work: list[bool] = field(default_factory=list)
    cpu_s: float = 0.0

    def watch(self, engine: VllmEngine) -> None:
        step = engine._step

        def timed() -> None:
            self.begins.append(time.perf_counter())
            before = time.thread_time()
            step()
            self.cpu_s += time.thread_time() - before
            self.ends.append(time.perf_counter())
            self.has_work.append(any(not item.completion.done() for item in engine._under_way.values()))

        engine._step = timed

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the seconds between steps: those after which requests were left, and those after which none was, as
        all rollouts waited for their environments."""
        gaps, has_work = np.array(self.begins[1:]) - np.array(self.ends[:-1]), np.array(self.has_work[:-1])
        return gaps[has_work], gaps[~has_work]


async def measure(scratch: Path) -> dict[str, Any]:
    from megarl.config.load import load
    from megarl.core.types import Prompt
    from megarl.environments.hosts import HostPool, host_arguments
    from megarl.environments.runner import RolloutRequest, RolloutRunner
    from megarl.rollout.engine import TurnRequest
    from megarl.rollout.vllm.engine import VllmEngine, rollout_arguments
    from tests.paths import BASE
    from tests.tiny_model import tiny_tokenizer, write_tiny_llama

    (scratch / "slow.py").write_text(ENVIRONMENT)
    folder = write_tiny_llama(scratch / "model", max_positions=2048)
    keys = [f"model.path={folder}", "data.source=arithmetic", f"environment.class={scratch / 'slow.py'}:Slow"]
    keys += [f"environment.max_turns={TURNS}", f"environment.turn_tokens={TURN_TOKENS}"]
    keys += ["rollout.context_length=2048", "rollout.max_new_tokens=1024", "rollout.kv_cache_gib=1.5"]
    config = load(BASE, keys)
    rollout = config.rollout.model_copy(update={"vllm_overrides": {"max_num_seqs": ROLLOUTS, "block_size": 32}})
    engine = VllmEngine(rollout, rollout_arguments(rollout, folder, "float32", seed=0))
    engine.hold(1)
    pool = await HostPool.start(host_arguments(config), PROCESSES)
    runner = RolloutRunner(config, tiny_tokenizer(), pool)
    hosts = [
        child for child in psutil.Process().children(recursive=True) if "megarl.environments.host" in child.cmdline()
    ]
    assert len(hosts) == PROCESSES

    async def sample(token_ids: Sequence[int], max_new_tokens: int, seed: int, greedy: bool) -> Any:
        return await engine.complete(TurnRequest(np.array(token_ids, np.int32), max_new_tokens, seed, greedy))

    def request(number: int) -> RolloutRequest:
        group = number // GROUP
        content = f"{group:04}".ljust(PROMPT_TOKENS, "a")
        prompt = Prompt(f"{group}", content, [], None, [{"role": "user", "content": content}], {})
        prompt = Prompt(prompt.id, content, runner.tokens.begin(prompt.messages), None, prompt.messages, {})
        return RolloutRequest(f"{number}", prompt, number, group)

    await runner.run(request(0), sample)  # it warms up
    requests = [request(number) for number in range(GROUP, GROUP + ROLLOUTS)]
    steps = Steps()
    steps.watch(engine)
    hosts_before, driver_before = _cpu_seconds(hosts), time.thread_time()
    begin = time.perf_counter()
    rollouts = await asyncio.gather(*(runner.run(request, sample) for request in requests))
    seconds = time.perf_counter() - begin
    driver_s = time.thread_time() - driver_before - steps.cpu_s
    hosts_s = _cpu_seconds(hosts) - hosts_before
    await pool.close()
    infos = [samples[0].episode.info for samples in rollouts]
    return summary(infos, steps, seconds, driver_s, hosts_s)


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def summary(
    infos: Sequence[RolloutInfo], steps: Steps, seconds: float, driver_s: float, hosts_s: float
) -> dict[str, Any]:
    num_turns = sum(info.num_turns for info in infos)
    between, idle = steps.gaps()
    return {
        "seconds": round(seconds, 2),
        "turns": num_turns,
        "turns_per_rollout": round(num_turns / len(infos), 2),
        "failed": sum(info.stop_reason == "failed" for info in infos),
        "engine_steps": len(steps.begins),
        "engine_idle_share": round(float(idle.sum()) / seconds, 4),
        "engine_kept_waiting_share": round(float(between.sum()) / seconds, 4),
        "longest_gap_with_work_ms": round(1000 * float(between.max()), 1),
        "median_gap_with_work_ms": round(1000 * float(np.median(between)), 2),
        "driver_cpu_ms_per_turn": round(1000 * driver_s / num_turns, 3),
        "environment_cpu_ms_per_turn": round(1000 * hosts_s / num_turns, 3),
        "cached_share_of_later_prompts": round(
            sum(info.num_cached_tokens for info in infos) / sum(info.num_context_tokens for info in infos), 4
        ),
        "mean_later_prompt_tokens": round(sum(info.num_context_tokens for info in infos) / (num_turns - len(infos))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    from megarl.rollout.vllm.environment import environment

    os.environ.update(environment(1, threads=1, index=0))
    begin, before = time.perf_counter(), machine_cpu_seconds() - sum(os.times()[:4])
    with tempfile.TemporaryDirectory() as scratch:
        run = asyncio.run(measure(Path(scratch)))
    seconds = time.perf_counter() - begin
    elsewhere = machine_cpu_seconds() - before - sum(os.times()[:4])
    found = {
        "machine": machine(),
        "cpu_percent_elsewhere": round(100 * max(0.0, elsewhere) / (seconds * os.cpu_count()), 1),
        "rollouts": ROLLOUTS,
        "turns": TURNS,
        "tool_median_s": MEDIAN_S,
        "tool_sigma": SIGMA,
        "processes": PROCESSES,
        "run": run,
    }
    text = json.dumps(found, indent=2) + "\n"
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
