"""Measure all single-GPU figures in one call: training step, head, sampling, and a run whose engine shares the GPU.

.venv/bin/python tools/benchmarks/h100.py --out tools/benchmarks/results/h100.json
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from benchmark import BASE, in_new_process, option, run_benchmark, train
from linear_head import measure_side
from megarl_side import RandomActor, batches_of, closed_form, config_of
from training_case import SHAPES, Case, equal_lengths

from megarl.config.load import load
from megarl.core import device
from megarl.core.types import Prompt
from megarl.data.local_batch import LocalBatch
from megarl.models.flops import training_flops
from megarl.models.shape import ModelShape
from megarl.rollout.engine import SamplingRequest
from tests.tiny_model import write_tiny_model

PEAK_TFLOPS = 989.5
"""Peak of an H100 SXM and of an H200 in bfloat16 without sparsity."""

REPEATS = 5


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all measurements.

    Attributes:
        steps: model shape, and number of documents with 1,024 tokens per microbatch.
        heads: vocabulary size, hidden size and number of tokens.
        shape: model shape for sampling and for the run.
        sequences: number of concurrently sampled sequences.
        tokens: tokens per sequence.
    """

    steps: tuple[tuple[str, int], ...]
    heads: tuple[tuple[int, int, int], ...]
    shape: str
    sequences: int
    tokens: int


SIZES = {
    "full": Sizes(
        steps=(("qwen2.5-1.5b", 8), ("qwen2.5-1.5b", 32), ("llama3.1-8b, 8 layers", 8), ("llama3.1-8b, 8 layers", 32)),
        heads=((151936, 1536, 4096), (128256, 4096, 8192), (151936, 1536, 32768)),
        shape="qwen2.5-1.5b",
        sequences=1024,
        tokens=512,
    ),
    "small": Sizes(steps=(("tiny", 1),), heads=((1000, 32, 64),), shape="tiny", sequences=8, tokens=8),
}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    names = arguments.only or MEASUREMENTS
    found = {name: in_new_process(MEASUREMENTS[name], SIZES[arguments.sizes]) for name in names}
    return {"sizes": arguments.sizes, "versions": {"torch": torch.__version__}, **found}


def steps(sizes: Sizes) -> list[dict[str, Any]]:
    return [in_new_process(step, case_of(*shape)) for shape in sizes.steps]


def case_of(shape: str, documents: int) -> Case:
    """Return an update of two microbatches, each with so many documents of 256 + 768 tokens."""
    return Case(
        shape,
        equal_lengths(2 * documents, 256, 768),
        updates=REPEATS,
        threads=len(os.sched_getaffinity(0)),
        microbatch=1024 * documents,
        layout=[],
        dtype="bfloat16",
        recompute="selective",
    )


def flops_of(case: Case) -> float:
    """Return the model's FLOPs per update, without recomputation."""
    lengths = [prompt + response for prompt, response in case.lengths]
    return training_flops(
        ModelShape.of(case.hf_config),
        num_tokens=case.num_tokens,
        num_scored=sum(response for _, response in case.lengths),
        num_attended=sum(n * (n + 1) // 2 for n in lengths),
    )


def step(case: Case) -> dict[str, Any]:
    """Measure the model FLOPs utilization of the training step, after two updates to warm up."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "case"
        case.write(folder)
        config = config_of(case, folder)
        worker = RandomActor(config, folder, 0, dist.FileStore(str(folder / "store"), 1), case.threads)
        batches, seconds = batches_of(case, worker), []
        for _ in range(2 + case.updates):
            start = time.perf_counter()
            worker.update(LocalBatch(batches[0].samples, batches[0].microbatches))
            device.synchronize()
            seconds.append(time.perf_counter() - start)
    tflops = flops_of(case) / median(seconds[2:]) / 1e12
    return {
        "shape": case.shape,
        "recompute": case.recompute,
        "device": torch.cuda.get_device_name() if device.on_cuda() else "CPU",
        "kernels": worker.kernels,
        "tokens_per_microbatch": case.microbatch,
        "flops_per_update": flops_of(case),
        "seconds": seconds[2:],
        "median_seconds": median(seconds[2:]),
        "tokens_per_second": case.num_tokens / median(seconds[2:]),
        "tflops": tflops,
        "mfu": tflops / PEAK_TFLOPS,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.on_cuda() else None,
        "closed_form_bytes": closed_form(case, config, 0, batches),
    }


def heads(sizes: Sizes) -> list[dict[str, Any]]:
    """Measure the head against full logits compiled by torch and, if Liger is installed, against its fused loss."""
    sides = ["tiled", "compiled", *(["Liger"] if importlib.util.find_spec("liger_kernel") else [])]
    return [
        {
            **dict(zip(("vocabulary", "hidden", "tokens"), head, strict=True)),
            **{side: in_new_process(measure_side, side, *head, "bfloat16", REPEATS) for side in sides},
        }
        for head in sizes.heads
    ]


def sampling(sizes: Sizes) -> dict[str, float]:
    """Measure an engine's tokens per second with megarl's requests, which have log-probs and seeds, and with vLLM's own
    `generate`."""
    from megarl.rollout.vllm.environment import environment

    os.environ.update(environment(1, threads=len(os.sched_getaffinity(0)), index=0))
    from vllm import SamplingParams

    from megarl.rollout.vllm.engine import VllmEngine, rollout_arguments

    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny_model(Path(scratch), **SHAPES[sizes.shape])
        keys = [f"model.path={folder}", "data.source=arithmetic", f"rollout.max_new_tokens={sizes.tokens}"]
        keys += [f"rollout.context_length={2 * sizes.tokens}", f"rollout.kv_cache_gib={_kv_cache_gib(sizes)}"]
        rollout = load(BASE, keys).rollout
        engine = VllmEngine(rollout, rollout_arguments(rollout, folder, "bfloat16", seed=0))
        engine.hold(1)  # random weights, whose responses rarely end early
        prompt = tuple(range(5, 5 + sizes.tokens // 2))

        def ours() -> int:
            requests = [SamplingRequest(f"{i}", Prompt(f"{i}", "", prompt), seed=i) for i in range(sizes.sequences)]
            return sum(len(sample.response_ids) for sample in asyncio.run(engine.generate(requests)))

        def plain() -> int:
            asked = [{"prompt_token_ids": [*prompt]} for _ in range(sizes.sequences)]
            parameters = SamplingParams(temperature=1.0, max_tokens=sizes.tokens)
            answers = engine._llm.generate(asked, parameters, use_tqdm=False)
            return sum(len(answer.outputs[0].token_ids) for answer in answers)

        ways = {"megarl": ours, "plain vLLM": plain}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(3):  # alternating; the first round is a warm-up
            for name, way in ways.items():
                begin = time.perf_counter()
                num_tokens = way()
                rates[name].append(num_tokens / (time.perf_counter() - begin))
    return {name: median(found[1:]) for name, found in rates.items()}


def _kv_cache_gib(sizes: Sizes) -> float:
    """Return enough for a quarter of the sequences, or a little in a trial on CPU."""
    shape = SHAPES[sizes.shape]
    head = shape["hidden_size"] // shape["num_attention_heads"]
    of_token = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head
    return round(max(0.05, sizes.sequences / 4 * 2 * sizes.tokens * of_token / 2**30), 2)


def run(sizes: Sizes) -> dict[str, Any]:
    """Measure a run whose trainer and engine take turns on the GPU: the seconds of a step's phases, and the refit's
    bytes per second compared with a copy on the device."""
    keys = ["run.steps=3", "model.dtype=bfloat16", "data.source=arithmetic"]
    keys += ["cluster.placement=colocated", "rollout.sleep=true", "actor.offload=[gradients, optimizer]"]
    keys += [f"rollout.max_new_tokens={sizes.tokens}", f"rollout.context_length={sizes.tokens + 128}"]
    keys += [f"rollout.kv_cache_gib={_kv_cache_gib(sizes)}", "batch.samples_per_prompt=8"]
    keys += [f"batch.{name}={max(1, sizes.sequences // 8)}" for name in ("prompts_per_step", "prompts_per_update")]
    keys += ["actor.recompute=selective", "actor.tokens_per_microbatch=8192"]
    with tempfile.TemporaryDirectory() as scratch:
        model = write_tiny_model(Path(scratch) / "model", **SHAPES[sizes.shape])
        lines, _ = train(Path(scratch), BASE, *keys, f"model.path={model}")
    last = lines[-1]
    phases = {name.removeprefix("time/"): value for name, value in last.items() if name.startswith("time/")}
    return {
        "seconds": phases,
        "refit_gb_per_second": last["refit/gb"] / last["time/refit"],
        "copy_gb_per_second": _copy_gb_per_second(),
    }


def _copy_gb_per_second() -> float:
    source = torch.ones(2**28, dtype=torch.bfloat16, device=device.device())
    target, seconds = torch.empty_like(source), []
    for _ in range(2 + REPEATS):
        begin = time.perf_counter()
        target.copy_(source)
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    return source.nbytes / 1e9 / median(seconds[2:])


MEASUREMENTS: dict[str, Callable[[Sizes], Any]] = {"steps": steps, "heads": heads, "sampling": sampling, "run": run}


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        measure,
        option("--sizes", choices=SIZES, default="full", help="small: a trial on CPU (default: %(default)s)"),
        option("--only", choices=MEASUREMENTS, action="append", help="run only this measurement; may be repeated"),
    )
