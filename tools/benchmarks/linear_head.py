"""The tiled head against full logits on this machine's CPU: time and memory of a forward and a backward pass.

.venv/bin/python tools/benchmarks/linear_head.py --out tools/benchmarks/results/linear_head.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from machine import QUIET_PERCENT, children_cpu_seconds, machine, machine_cpu_seconds
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 3600
SIDES = ("plain", "tiled")


def main() -> None:
    arguments = _parse()
    if arguments.side:
        print(json.dumps(measure(arguments)))
        return
    start, machine_before, own_before = time.perf_counter(), machine_cpu_seconds(), children_cpu_seconds()
    sides = {side: run(side) for side in SIDES}
    elsewhere = machine_cpu_seconds() - machine_before - (children_cpu_seconds() - own_before)
    logits_bytes = arguments.tokens * arguments.vocabulary * 4
    result = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "cpu_percent_elsewhere": 100 * elsewhere / ((time.perf_counter() - start) * os.cpu_count()),
        **{name: getattr(arguments, name) for name in ("vocabulary", "hidden", "tokens", "dtype")},
        "logits_bytes": logits_bytes,
        "ratio_of_seconds": sides["tiled"]["median_seconds"] / sides["plain"]["median_seconds"],
        "share_of_logits": {side: of_side["extra_bytes"] / logits_bytes for side, of_side in sides.items()},
        **sides,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    show(result)
    print(f"result: {arguments.out}")
    if result["cpu_percent_elsewhere"] > QUIET_PERCENT:
        print(
            f"warning: {result['cpu_percent_elsewhere']:.0f} % of the CPU time went elsewhere; measure when it is quiet"
        )


def run(side: str) -> dict[str, Any]:
    """Runs a side in a process of its own, with all cores, and returns its figures."""
    print(f"running: {side}", flush=True)
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    done = subprocess.run(
        command, env=variables | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        sys.exit(f"linear_head: error: exit status {done.returncode} of {side}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The peak is that of the first pass, together with what the libraries set up in it; it is not timed."""
    import torch

    from megarl.ops.linear_head import log_prob_and_entropy, plain_log_prob_and_entropy

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    hidden = torch.empty(arguments.tokens, arguments.hidden, dtype=dtype).normal_(generator=generator)
    weight = torch.empty(arguments.vocabulary, arguments.hidden, dtype=dtype)
    weight.normal_(std=arguments.hidden**-0.5, generator=generator)
    targets = torch.randint(arguments.vocabulary, (arguments.tokens,), generator=generator)
    gradients = torch.randn(arguments.tokens, 2, generator=generator)
    hidden.requires_grad_()
    weight.requires_grad_()
    before = _peak_bytes()
    if arguments.side == "tiled":
        weight.main_grad = torch.ones(weight.shape).zero_()  # ones, so that its memory is there

    def forward_backward() -> None:
        hidden.grad = weight.grad = None
        if arguments.side == "tiled":
            scored = log_prob_and_entropy(hidden, weight, targets, 1.0, arguments.vocabulary)
        else:
            scored = torch.stack(plain_log_prob_and_entropy(hidden, weight, targets, 1.0, arguments.vocabulary), -1)
        (scored * gradients).sum().backward()

    forward_backward()
    gradient_bytes = hidden.numel() * hidden.element_size() + weight.numel() * 4
    extra_bytes = _peak_bytes() - before - gradient_bytes
    seconds = []
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        forward_backward()
        seconds.append(time.perf_counter() - start)
    return {"median_seconds": median(seconds), "seconds": seconds, "extra_bytes": extra_bytes}


def show(result: dict[str, Any]) -> None:
    title = ", ".join(f"{name} {result[name]:,}" for name in ("vocabulary", "hidden", "tokens"))
    table = Table("", "seconds", "memory beyond inputs and gradients", "of the logits", title=title)
    for side in SIDES:
        memory, share = result[side]["extra_bytes"] / 1e6, 100 * result["share_of_logits"][side]
        table.add_row(side, f"{result[side]['median_seconds']:.2f}", f"{memory:,.0f} MB", f"{share:.1f} %")
    table.add_row("ratio", f"{result['ratio_of_seconds']:.2f}", "", "")
    Console().print(table)


def _peak_bytes() -> int:
    """Highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("linear_head.json"), help="the JSON file (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=4096, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes of each side (default: %(default)s)")
    parser.add_argument("--side", choices=SIDES, help="measure this side alone, in this process, and print the result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
