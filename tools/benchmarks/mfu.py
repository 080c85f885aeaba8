"""Measure the model FLOPs utilization of the training step on one GPU, and profile its kernels.

.venv/bin/python tools/benchmarks/mfu.py --out tools/benchmarks/results/mfu.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from benchmark import option, run_benchmark
from training_case import SHAPES, Case, equal_lengths

from megarl.models.flops import training_flops
from megarl.models.shape import ModelShape

PEAK_TFLOPS = 989.5
"""Peak of an H100 SXM and of an H200 in bfloat16 without sparsity."""

KINDS = {
    "communication": ("nccl",),
    "optimizer": ("adam", "multi_tensor", "l2norm", "clip"),
    "attention": ("flash", "fmha", "attention", "softmax", "sdp"),
    "matrix products": ("gemm", "cutlass", "nvjet", "xmma", "cublas", "aten::mm", "addmm", "bmm", "wgrad"),
    "copies": ("memcpy", "memset", "copy", "gather", "index", "cat"),
}
"""Kind of work -> substrings of kernel names. The first match counts; kernels without a match are elementwise."""


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    case = Case(
        arguments.shape,
        equal_lengths(arguments.documents * arguments.microbatches, arguments.prompt, arguments.response),
        arguments.updates,
        len(os.sched_getaffinity(0)),
        arguments.documents * (arguments.prompt + arguments.response),
        [],
        dtype="bfloat16",
        recompute=arguments.recompute,
    )
    plan = arithmetic(case)
    if arguments.dry_run:
        print(json.dumps(plan, indent=2))
        sys.exit()
    with tempfile.TemporaryDirectory(prefix="mfu-") as name:
        figures = measure_case(case, Path(name) / "case")
    seconds = median(figures["seconds"])
    tflops = plan["flops_per_update"] / seconds / 1e12
    return {
        "shape": arguments.shape,
        "recompute": arguments.recompute,
        "peak_tflops": arguments.peak_tflops,
        "median_seconds": seconds,
        "tokens_per_second": case.num_tokens / seconds,
        "tflops": tflops,
        "mfu": tflops / arguments.peak_tflops,
        **plan,
        **figures,
    }


def arithmetic(case: Case) -> dict[str, Any]:
    """Return the figures that depend only on the shapes."""
    lengths = [prompt + response for prompt, response in case.lengths]
    return {
        "tokens_per_microbatch": case.microbatch,
        "tokens_per_update": case.num_tokens,
        "flops_per_update": training_flops(
            ModelShape.of(case.hf_config),
            num_tokens=case.num_tokens,
            num_scored=sum(response for _, response in case.lengths),
            num_attended=sum(n * (n + 1) // 2 for n in lengths),
        ),
    }


def measure_case(case: Case, folder: Path) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from megarl_side import RandomActor, closed_form, config_of, lengths_of, samples_of

    from megarl.core import device
    from megarl.data.local_batch import LocalBatch
    from megarl.data.packing import schedule

    case.write(folder)
    config = config_of(case, folder)
    worker = RandomActor(config, folder, 0, dist.FileStore(str(folder / "store"), 1), case.threads)
    samples = samples_of(case)
    rank_batches = schedule(lengths_of(samples), worker.packing)
    seconds = []
    for _ in range(2 + case.updates):  # two to warm up
        start = time.perf_counter()
        worker.update(LocalBatch(samples, rank_batches[0]))
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    with torch.profiler.profile() as profile:  # profiles all available devices
        worker.update(LocalBatch(samples, rank_batches[0]))
        device.synchronize()
    return {
        "device": torch.cuda.get_device_name() if device.on_cuda() else "CPU",
        "kernels": worker.kernels,
        "seconds": seconds[2:],
        "shares_of_time": shares_of_time(profile.key_averages(), on_device=device.on_cuda()),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.on_cuda() else None,
        "closed_form_bytes": closed_form(case, config, 0, rank_batches, samples),
        "versions": {"torch": torch.__version__},
    }


def shares_of_time(events: Any, on_device: bool) -> dict[str, float]:
    """Return each kind of work's share of the time of all kernels (on CPU: of all operators)."""
    times: Counter[str] = Counter()
    for event in events:
        times[_kind(event.key)] += event.self_device_time_total if on_device else event.self_cpu_time_total
    return {kind: spent / times.total() for kind, spent in times.most_common()}


def _kind(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "elementwise")


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        measure,
        option("--shape", choices=SHAPES, default="qwen2.5-1.5b"),
        option("--documents", type=int, default=8, help="documents of a microbatch (%(default)s)"),
        option("--microbatches", type=int, default=4, help="microbatches of an update (%(default)s)"),
        option("--prompt", type=int, default=256, help="prompt tokens of a document (%(default)s)"),
        option("--response", type=int, default=768, help="response tokens of a document (%(default)s)"),
        option("--updates", type=int, default=5, help="timed updates, after two to warm up (%(default)s)"),
        option("--recompute", choices=("none", "selective", "full"), default="none"),
        option("--peak-tflops", type=float, default=PEAK_TFLOPS, help="peak of the GPU (%(default)s)"),
        option("--dry-run", action="store_true", help="print the figures that depend only on the shapes"),
    )
