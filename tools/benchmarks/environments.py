"""Measure multi-turn rollouts with a slow tool on a tiny model: the engine's idle time, the CPU time per turn outside
the model, and the prefix cache hits of later turns. The processes are those of a run: an engine, the process beside it
that runs the rollouts, and the environments' processes.

.venv/bin/python tools/benchmarks/environments.py --out tools/benchmarks/results/environments.json
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megarl.cluster  # noqa: F401  configures Ray's authentication, which Ray reads on import

# isort: split

import numpy as np
import psutil
import ray
from benchmark import machine_cpu_seconds, run_benchmark

from megarl.cluster.groups.engines import EngineGroup
from megarl.cluster.groups.environments import EnvironmentGroup
from megarl.cluster.placement import place
from megarl.cluster.session import Session
from megarl.cluster.supervision.supervisor import supervised
from megarl.config.load import load
from megarl.core.types import Prompt, RolloutInfo, SampleRef
from megarl.data.turns import ChatTokens
from megarl.environments.tools import describe
from megarl.models.tokenizer import load_tokenizer
from megarl.rollout.engine import SamplingRequest
from tests.paths import BASE
from tests.tiny_model import write_tiny_llama

if TYPE_CHECKING:
    from megarl.rollout.vllm.engine import VllmEngine

ROLLOUTS, GROUP, TURNS, TURN_TOKENS, PROMPT_TOKENS, PROCESSES = 512, 8, 8, 16, 1000, 2
MEDIAN_S, SIGMA = 0.2, 0.5
"""Duration of a tool call, log-normal: its median in seconds, and the standard deviation of its logarithm."""

ENVIRONMENT = f"""
import asyncio
from math import log
from random import Random

from megarl.environments import Environment, Step, ToolCall, tool

class Slow(Environment):
    "Calls its tool after every turn, regardless of the text, because the model is random."

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
    """An engine's steps: when each begins and ends in vLLM, and whether requests remain after it."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    has_work: list[bool] = field(default_factory=list)
    cpu_s: float = 0.0

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds between steps, separately for steps after which requests remained and steps after which
        all rollouts waited for their environments."""
        gaps, has_work = np.array(self.begins[1:]) - np.array(self.ends[:-1]), np.array(self.has_work[:-1])
        return gaps[has_work], gaps[~has_work]


def watch(engine: VllmEngine) -> None:
    """Make the engine record its steps."""
    step, steps = engine._step, Steps()

    def timed() -> None:
        steps.begins.append(time.perf_counter())
        before = time.thread_time()
        step()
        steps.cpu_s += time.thread_time() - before
        steps.ends.append(time.perf_counter())
        steps.has_work.append(any(not item.completion.done() for item in engine._pending.values()))

    engine._step, engine.steps = timed, steps


@ray.remote(num_cpus=0)
class Listener:
    """Stub of the rewards' process."""

    def begin(self, samples: Sequence[Any]) -> None:
        pass


def measure(scratch: Path) -> dict[str, Any]:
    begin, before = time.perf_counter(), machine_cpu_seconds()
    (scratch / "slow.py").write_text(ENVIRONMENT)
    folder = write_tiny_llama(scratch / "model", max_positions=2048)
    keys = [f"model.path={folder}", "model.dtype=float32", "data.source=arithmetic", "cluster.object_store_mib=200"]
    keys += [f"environment.class={scratch / 'slow.py'}:Slow", f"environment.processes={PROCESSES}"]
    keys += [f"environment.max_turns={TURNS}", f"environment.turn_tokens={TURN_TOKENS}", "rollout.threads=1"]
    keys += ["rollout.context_length=2048", "rollout.max_new_tokens=1024", "rollout.kv_cache_gib=1.5"]
    keys += [f"rollout.vllm_overrides={{max_num_seqs: {ROLLOUTS}, block_size: 32}}"]
    config = load(BASE, keys)
    (scratch / "logs").mkdir()
    with Session(config, scratch / "logs", scratch) as session:
        placement = place(config)
        engines = EngineGroup(session, config, folder, placement.engines)
        environments = EnvironmentGroup(session, config, folder, placement.environments, engines)
        for starting in (engines.start(), environments.start()):
            starting.result()
        found = drive(engines, environments, groups(folder))
        own_s = _cpu_seconds([psutil.Process(), *psutil.Process().children(recursive=True)])
    elsewhere = max(0.0, machine_cpu_seconds() - before - own_s)
    return {
        "cpu_percent_elsewhere": 100 * elsewhere / ((time.perf_counter() - begin) * os.cpu_count()),
        "turns_per_rollout": TURNS,
        "tool_median_s": MEDIAN_S,
        "tool_sigma": SIGMA,
        "processes": PROCESSES,
        "run": found,
    }


def groups(folder: Path) -> list[list[SamplingRequest]]:
    """Return the requests of all rollouts, after one for warm-up."""
    tokens = ChatTokens(load_tokenizer(folder), [describe("wait", _wait)])
    made = []
    for group in range(ROLLOUTS // GROUP + 1):
        messages = [{"role": "user", "content": f"{group:04}".ljust(PROMPT_TOKENS, "a")}]
        prompt = Prompt(f"{group}", messages[0]["content"], tokens.begin(messages), None, messages, {})
        seeds = range(1000 * group, 1000 * group + GROUP)
        made.append([SamplingRequest(f"{group}-{i}", prompt, seed=seeds[i], group_seed=group) for i in range(GROUP)])
    return [made[0][:1], *made[1:]]


def _wait(self: Any) -> str:
    """Takes a while."""
    raise NotImplementedError("described only")


def drive(
    engines: EngineGroup, environments: EnvironmentGroup, groups: Sequence[Sequence[SamplingRequest]]
) -> dict[str, Any]:
    listener = Listener.remote()
    [engine], [maker] = engines.actors.values(), environments._actors.values()
    ray.get(engine.call.remote(lambda worker: worker.hold(1)))
    environments.generate(groups[:1], listener).result()
    ray.get(engine.call.remote(watch))
    pid = ray.get(maker.call.remote(lambda _: os.getpid())).value
    beside = psutil.Process(pid)
    hosts = [child for child in beside.children(recursive=True) if "megarl.environments.host" in child.cmdline()]
    assert len(hosts) == PROCESSES
    before = [_cpu_seconds([beside]), _cpu_seconds(hosts), ray.get(engine.call.remote(_process_time)).value]
    begin = time.perf_counter()
    rollouts: list[list[SampleRef]] = environments.generate(groups[1:], listener).result()
    seconds = time.perf_counter() - begin
    after = [_cpu_seconds([beside]), _cpu_seconds(hosts), ray.get(engine.call.remote(_process_time)).value]
    steps = ray.get(engine.call.remote(lambda worker: worker.steps)).value
    samples = [sample for group in rollouts for sample in group]
    infos = [sample.rollout for sample in samples]
    cpu_s = [end - start for start, end in zip(before, after, strict=True)]
    return summary(infos, steps, seconds, cpu_s[0], cpu_s[1], cpu_s[2] - steps.cpu_s)


def _process_time(_: object) -> float:
    return time.process_time()


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def summary(
    infos: Sequence[RolloutInfo], steps: Steps, seconds: float, rollouts_s: float, hosts_s: float, engine_s: float
) -> dict[str, Any]:
    """Return the figures.

    Args:
        rollouts_s: CPU seconds of the process that runs the rollouts.
        hosts_s: CPU seconds of the environments' processes.
        engine_s: CPU seconds of the engine outside its steps.
    """
    num_turns = sum(info.num_turns for info in infos)
    between, idle = steps.gaps()
    later = sum(info.num_context_tokens for info in infos)
    return {
        "seconds": round(seconds, 2),
        "rollouts": len(infos),
        "failed": sum(info.stop_reason == "failed" for info in infos),
        "turns": num_turns,
        "engine_steps": len(steps.begins),
        "engine_idle_share": round(float(idle.sum()) / seconds, 4),
        "engine_between_steps_share": round(float(between.sum()) / seconds, 4),
        "median_ms_between_steps": round(1000 * float(np.median(between)), 2),
        "cpu_ms_per_turn": {
            "rollouts": round(1000 * rollouts_s / num_turns, 3),
            "environments": round(1000 * hosts_s / num_turns, 3),
            "engine, beside its steps": round(1000 * engine_s / num_turns, 3),
            "all": round(1000 * (rollouts_s + hosts_s + engine_s) / num_turns, 3),
        },
        "turns_per_second": round(num_turns / seconds, 1),
        "cached_share_of_later_prompts": round(sum(info.num_cached_tokens for info in infos) / later, 4),
        "mean_later_prompt_tokens": round(later / (num_turns - len(infos))),
    }


if __name__ == "__main__":
    with supervised() as folder:
        run_benchmark(__doc__, lambda _: measure(folder))
