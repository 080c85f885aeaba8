"""Measure multi-turn rollouts with a slow tool on a tiny model: the engine's idle time, the CPU time per turn outside
the model, and the prefix cache hits of later turns. The processes are the same as in a run: an engine, the process that
runs its rollouts, and the environment processes.

.venv/bin/python tools/benchmarks/environments.py --out tools/benchmarks/results/environments.json
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
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
"""Log-normal duration of a tool call: median in seconds, and standard deviation of the logarithm."""

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


def watch(engine: VllmEngine) -> None:
    """Make the engine record the CPU seconds of its steps, and the seconds in which it had no requests after a step,
    because all rollouts waited for their environments."""
    step, steps = engine._step, Counter()
    idle_since = None

    def timed() -> None:
        nonlocal idle_since
        if idle_since is not None:
            steps["idle"] += time.perf_counter() - idle_since
        before = time.thread_time()
        step()
        steps["cpu"] += time.thread_time() - before
        has_work = any(not item.completion.done() for item in engine._pending.values())
        idle_since = None if has_work else time.perf_counter()

    engine._step, engine.seconds = timed, steps


@ray.remote(num_cpus=0)
class Listener:
    """Stub for the reward actor."""

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
    raise NotImplementedError("only the tool's description is used")


def drive(
    engines: EngineGroup, environments: EnvironmentGroup, groups: Sequence[Sequence[SamplingRequest]]
) -> dict[str, Any]:
    listener = Listener.remote()
    [engine], [maker] = engines.actors.values(), environments._actors.values()
    inside(engine, lambda actor: actor._worker.hold(1))
    environments.generate(groups[:1], listener).result()
    inside(engine, lambda actor: watch(actor._worker))
    beside = psutil.Process(inside(maker, lambda _: os.getpid()))
    hosts = [child for child in beside.children(recursive=True) if "megarl.environments.host" in child.cmdline()]
    assert len(hosts) == PROCESSES

    def cpu_seconds() -> np.ndarray:
        return np.array([_cpu_seconds([beside]), _cpu_seconds(hosts), inside(engine, lambda _: time.process_time())])

    before, begin = cpu_seconds(), time.perf_counter()
    rollouts: list[list[SampleRef]] = environments.generate(groups[1:], listener).result()
    seconds = time.perf_counter() - begin
    rollouts_s, hosts_s, engine_s = map(float, cpu_seconds() - before)
    steps = inside(engine, lambda actor: actor._worker.seconds)
    infos = [sample.rollout for group in rollouts for sample in group]
    assert all(info.stop_reason != "failed" for info in infos), "a rollout failed"
    engine_s -= steps["cpu"]
    num_turns = sum(info.num_turns for info in infos)
    later = sum(info.num_context_tokens for info in infos)
    return {
        "rollouts": len(infos),
        "engine_idle_share": round(steps["idle"] / seconds, 4),
        "cpu_ms_per_turn": {
            "rollouts": round(1000 * rollouts_s / num_turns, 3),
            "environments": round(1000 * hosts_s / num_turns, 3),
            "engine, beside its steps": round(1000 * engine_s / num_turns, 3),
        },
        "cached_share_of_later_prompts": round(sum(info.num_cached_tokens for info in infos) / later, 4),
        "mean_later_prompt_tokens": round(later / (num_turns - len(infos))),
    }


def inside(actor: Any, function: Callable[[Any], Any]) -> Any:
    """Call a function with the actor in its process."""
    return ray.get(actor.__ray_call__.remote(function))


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


if __name__ == "__main__":
    with supervised() as folder:
        run_benchmark(__doc__, lambda *_: measure(folder))
