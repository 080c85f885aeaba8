"""Step times that others have published, against what `megarl plan` predicts for the same layouts.

.venv/bin/python tools/benchmarks/published_steps.py --out tools/benchmarks/results/published_steps.json
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # the shapes of published models are those that the tests have

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
"""The factor within which steps are predicted."""

MISSES = [("NeMo-RL", "DeepSeek-V3", "256xH100"), ("verl", "DeepSeek-V3", "96xH20")]
"""The runs that are predicted worse: both of the largest model, whose engines span four nodes."""

PROMPT = 150
"""The tokens of a prompt of NeMo-RL's runs, which its table does not give: an assumption for OpenMathInstruct-2. The
table's average length is of prompt and response together."""


@dataclass(frozen=True)
class Case:
    """One published run.

    engines      tp of an engine, and the number of engines
    tokens       the mean of a sample, and the longest
    batch        prompts of a step, samples of each, prompts of an update
    layout       keys of actor.layout
    seconds      of a step, as published; rollout: of its sampling, where that is published too
    overlapped   whether sampling goes on during training (one step off)
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
        workload = replace(workload, sharing=1)  # these trainers compute a prompt for each of its samples
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
"""NeMo-RL's table of version 0.4 (runs of sequences packed up to their longest, all layers recomputed, log-probs of the
old policy and of the reference), and verl's benchmark, whose batch is that of the script that it names. KV caches are
what the engine's share of memory leaves."""

KV_CACHE_GIB = {"Llama-3.1-8B": 30, "Qwen3-30B-A3B": 30, "Qwen3-32B": 30, "Qwen3-235B-A22B": 15, "DeepSeek-V3": 4}


def predict(case: Case) -> dict[str, Any]:
    """Returns the case with what is predicted, in seconds."""
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
