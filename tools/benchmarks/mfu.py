"""Model FLOPs utilisation of the training step on one GPU, and where the time goes.

.venv/bin/python tools/benchmarks/mfu.py --out tools/benchmarks/results/mfu.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from machine import machine
from rich.console import Console
from rich.table import Table
from training_case import SHAPES, Case, equal_lengths

from megarl.models.flops import training_flops
from megarl.models.shape import ModelShape

PEAK_TFLOPS = 989.5
"""The peak of an H100 SXM and of an H200 in bfloat16 without sparsity."""

KINDS = {
    "communication": ("nccl",),
    "optimizer": ("adam", "multi_tensor", "l2norm", "clip"),
    "attention": ("flash", "fmha", "attention", "softmax", "sdp"),
    "matrix products": ("gemm", "cutlass", "nvjet", "xmma", "cublas", "aten::mm", "addmm", "bmm", "wgrad"),
    "copies": ("memcpy", "memset", "copy", "gather", "index", "cat"),
}
"""Kind of work -> parts of the names of its kernels; the first kind that fits counts, what fits none is elementwise."""


def main() -> None:
    arguments = _parse()
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
        return
    with tempfile.TemporaryDirectory(prefix="mfu-") as name:
        measured = measure(case, Path(name) / "case")
    seconds = median(measured["seconds"])
    tflops = plan["flops_per_update"] / seconds / 1e12
    result = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "shape": arguments.shape,
        "recompute": arguments.recompute,
        "peak_tflops": arguments.peak_tflops,
        "median_seconds": seconds,
        "tokens_per_second": case.num_tokens / seconds,
        "tflops": tflops,
        "mfu": tflops / arguments.peak_tflops,
        **plan,
        **measured,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show(result)
    print(f"result: {arguments.out}")


def arithmetic(case: Case) -> dict[str, Any]:
    """Returns the figures that follow from the shapes alone."""
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


def measure(case: Case, folder: Path) -> dict[str, Any]:
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
    with torch.profiler.profile() as profile:  # of all devices that there are
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
    """Kind of work -> its share of the time of all kernels (on CPU: of all operators)."""
    times: Counter[str] = Counter()
    for event in events:
        times[_kind(event.key)] += event.self_device_time_total if on_device else event.self_cpu_time_total
    return {kind: spent / times.total() for kind, spent in times.most_common()}


def show(result: Mapping[str, Any]) -> None:
    table = Table("", "", title=f"{result['shape']}, bfloat16, on {result['device']}: {result['kernels']}")
    table.add_row("seconds an update", f"{result['median_seconds']:.3f}")
    table.add_row("tokens/s", f"{result['tokens_per_second']:,.0f}")
    table.add_row("TFLOP/s", f"{result['tflops']:.3g}")
    table.add_row("of the peak", f"{100 * result['mfu']:.1f} %")
    for kind, share in result["shares_of_time"].items():
        table.add_row(f"  {kind}", f"{100 * share:.1f} %")
    if result["peak_bytes"]:
        table.add_row("peak memory, GB", f"{result['peak_bytes'] / 1e9:.1f}")
        table.add_row("closed form, GB", f"{result['closed_form_bytes']['total'] / 1e9:.1f}")
    Console().print(table)


def _kind(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "elementwise")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("mfu.json"), help="the JSON file to write (%(default)s)")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-1.5b", help="default: %(default)s")
    parser.add_argument("--documents", type=int, default=8, help="of a microbatch (default: 8)")
    parser.add_argument("--microbatches", type=int, default=4, help="of an update (default: 4)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each document (default: 256)")
    parser.add_argument("--response", type=int, default=768, help="tokens of each document (default: 768)")
    parser.add_argument("--updates", type=int, default=5, help="to time, after two to warm up (default: 5)")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--peak-tflops", type=float, default=PEAK_TFLOPS, help="of the GPU (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print what follows from the shapes, and stop")
    return parser.parse_args()


if __name__ == "__main__":
    main()
