"""Compare published step times of other trainers with the predictions of `megarl plan` for the same layouts.

.venv/bin/python tools/benchmarks/published_steps.py --out tools/benchmarks/results/published_steps.json
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for tests.published_models

from megarl.cluster.memory.parameters import Models
from megarl.config.load import load
from megarl.planner.hardware import read_cluster
from megarl.planner.step_plan import StepPlan, plan_step
from megarl.planner.workload import Workload
from tests.published_models import CONFIGS
from tools.benchmarks.benchmark import BASE, run_benchmark

NEMO_RL = (
    "https://github.com/NVIDIA-NeMo/RL/blob/06beed91bac98a2c39a19435f6bbbbe71aa45720/docs/about/performance-summary.md"
)
VERL = "https://verl.readthedocs.io/en/latest/perf/dpsk.html"
FACTOR = 2.5
"""Predictions should be within this factor of the published times."""

MISSES = [("NeMo-RL", "DeepSeek-V3", "256xH100"), ("verl", "DeepSeek-V3", "96xH20")]
"""Runs whose predictions are worse: both are of the largest model, whose engines span four nodes."""

PROMPT = 150
"""Prompt tokens in NeMo-RL's runs, an assumption for OpenMathInstruct-2 because its table lacks them. The table's mean
length includes prompt and response."""


@dataclass(frozen=True)
class Case:
    """One published run.

    Attributes:
        layout: keys of actor.layout.
        engines: tp of an engine, and the number of engines.
        tokens: mean and maximum number of tokens per sample.
        batch: prompts per step, samples per prompt, prompts per update.
        seconds: published seconds per step.
        rollout: published seconds of its rollout phase, if known.
        overlapped: whether rollouts overlap with training (one step off-policy).
    """

    who: str
    source: str
    model: str
    gpus: str
    layout: dict[str, int]
    engines: tuple[int, int]
    tokens: tuple[int, int]
    batch: tuple[int, int, int]
    seconds: float
    rollout: float | None = None
    overlapped: bool = False
    prompt: int = PROMPT
    keys: tuple[str, ...] = field(default=())

    @property
    def overrides(self) -> list[str]:
        prompts, samples, update = self.batch
        longest = self.tokens[1]
        parallel = {"sequence_parallel": "true" if self.layout.get("tp", 1) > 1 else "false", **self.layout}
        return [
            *(f"actor.layout.{name}={size}" for name, size in parallel.items()),
            f"rollout.tp={self.engines[0]}",
            f"rollout.replicas={self.engines[1]}",
            f"batch.prompts_per_step={prompts}",
            f"batch.samples_per_prompt={samples}",
            f"batch.prompts_per_update={update}",
            f"rollout.context_length={longest}",
            f"rollout.max_new_tokens={longest - self.prompt}",
            f"actor.tokens_per_microbatch={longest}",
            f"cluster.placement={'disaggregated' if self.overlapped else 'colocated'}",
            f"rollout.sleep={'false' if self.overlapped else 'true'}",
            "actor.recompute=full",
            "algorithm.kl.coefficient=0.01",
            *self.keys,
        ]

    def plan(self) -> StepPlan:
        config = load(BASE, ["model.path=published", "data.source=arithmetic", *self.overrides])
        workload = Workload.of(config, self.prompt, self.tokens[0] - self.prompt)
        workload = replace(workload, sharing=1)  # these trainers recompute a prompt for each of its samples
        return plan_step(config, Models.of({"actor": CONFIGS[self.model]}), workload, read_cluster(self.gpus))


EARLY = dict(first_stage_layers=11, last_stage_layers=11)
SMALL = (64, 32, 16)  # 2,048 samples a step, 512 an update
LLAMA_8B, QWEN_30B, QWEN_32B, QWEN_235B, DEEPSEEK = (
    "Llama-3.1-8B",
    "Qwen3-30B-A3B",
    "Qwen3-32B",
    "Qwen3-235B-A22B",
    "DeepSeek-V3",
)
QWEN_235B_LAYOUT = dict(tp=2, pp=8, cp=2, ep=16, etp=1, dp=4, **EARLY)
DEEPSEEK_LAYOUT = dict(pp=16, ep=16, etp=1, dp=16, first_stage_layers=3, last_stage_layers=2)
CASES = (
    Case("NeMo-RL", NEMO_RL, LLAMA_8B, "16xH100", dict(pp=2, dp=8), (1, 16), (1060, 4096), SMALL, 97.7),
    Case("NeMo-RL", NEMO_RL, LLAMA_8B, "16xH100", dict(pp=2, dp=4), (1, 8), (1129, 4096), SMALL, 74.6, None, True),
    Case("NeMo-RL", NEMO_RL, QWEN_30B, "32xH100", dict(tp=2, ep=8, etp=1, dp=16), (4, 8), (3154, 4096), SMALL, 225),
    Case(
        "NeMo-RL",
        NEMO_RL,
        QWEN_30B,
        "32xH100",
        dict(pp=2, ep=8, etp=1, dp=8),
        (2, 8),
        (3158, 4096),
        SMALL,
        244,
        None,
        True,
    ),
    Case("NeMo-RL", NEMO_RL, QWEN_32B, "32xH100", dict(tp=4, pp=4, dp=2), (4, 8), (3206, 4096), SMALL, 393),
    Case("NeMo-RL", NEMO_RL, QWEN_32B, "64xH100", dict(tp=4, pp=4, dp=2), (4, 8), (3207, 4096), SMALL, 215, None, True),
    Case("NeMo-RL", NEMO_RL, QWEN_235B, "128xH100", QWEN_235B_LAYOUT, (16, 8), (5671, 8192), (16, 32, 16), 506),
    Case(
        "NeMo-RL",
        NEMO_RL,
        QWEN_235B,
        "256xH100",
        dict(tp=4, pp=8, ep=16, etp=1, dp=4, **EARLY),
        (8, 16),
        (5691, 8192),
        (16, 32, 16),
        241,
        None,
        True,
    ),
    Case("NeMo-RL", NEMO_RL, DEEPSEEK, "256xH100", DEEPSEEK_LAYOUT, (32, 8), (745, 1536), (32, 16, 32), 154),
    Case(
        "NeMo-RL", NEMO_RL, DEEPSEEK, "512xH100", DEEPSEEK_LAYOUT, (32, 8), (744, 1536), (32, 16, 32), 77.9, None, True
    ),
    Case(
        "verl",
        VERL,
        DEEPSEEK,
        "96xH20",
        dict(tp=8, pp=12, ep=8, etp=1, dp=1, last_stage_layers=6),
        (32, 3),
        (1960 + PROMPT, 11680),
        (96, 8, 32),
        1700,
        1050,
        keys=(
            "actor.megatron_overrides.optimizer={optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0, "
            "use_precision_aware_optimizer: true}",
            "rollout.kv_cache_gib=8",
        ),
    ),
)
"""NeMo-RL's table of version 0.4 (sequences packed up to the maximum length, full recomputation, log-probs of the old
policy and of the reference), and verl's benchmark with the batch of its script. KV caches fill the engine's remaining
share of memory."""

KV_CACHE_GIB = {"Llama-3.1-8B": 30, "Qwen3-30B-A3B": 30, "Qwen3-32B": 30, "Qwen3-235B-A22B": 15, "DeepSeek-V3": 4}


def predict(case: Case) -> dict[str, Any]:
    """Return the case together with its prediction, in seconds."""
    cache = f"rollout.kv_cache_gib={KV_CACHE_GIB[case.model]}"
    if not any(key.startswith("rollout.kv_cache_gib") for key in case.keys):
        case = Case(**{**vars(case), "keys": (*case.keys, cache)})
    plan = case.plan()
    times = plan.times
    predicted = times.overlapped(is_colocated=False) if case.overlapped else times.seconds
    return {
        **{name: value for name, value in asdict(case).items() if name != "keys"},
        "predicted": round(predicted, 1),
        "phases": {name: round(seconds, 1) for name, seconds in times.phases.items()},
        "bounds": times.bounds,
        "ratio": round(predicted / case.seconds, 2),
    }


if __name__ == "__main__":
    run_benchmark(__doc__, lambda _: {"runs": [predict(case) for case in CASES]})
