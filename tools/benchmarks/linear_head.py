"""Compare time and memory of the tiled head with full logits on CPU, for a forward and a backward pass.

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
from statistics import median
from typing import Any

from benchmark import ROOT, option, run_benchmark

TIMEOUT_S = 3600
SIDES = ("plain", "tiled")
OPTIONS = (
    option("--vocabulary", type=int, default=151_936),
    option("--hidden", type=int, default=1024),
    option("--tokens", type=int, default=4096),
    option("--dtype", choices=("float32", "bfloat16"), default="float32"),
    option("--repeats", type=int, default=3, help="timed passes of each side (%(default)s)"),
    option("--side", choices=SIDES, help="measure only this side, in this process, and print the result"),
)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.side:  # a child of `run`
        print(json.dumps(measure_side(arguments)))
        sys.exit()
    sides = {side: run(side) for side in SIDES}
    logits_bytes = arguments.tokens * arguments.vocabulary * 4
    return {
        **{name: getattr(arguments, name) for name in ("vocabulary", "hidden", "tokens", "dtype")},
        "logits_bytes": logits_bytes,
        "ratio_of_seconds": sides["tiled"]["median_seconds"] / sides["plain"]["median_seconds"],
        "share_of_logits": {side: of_side["extra_bytes"] / logits_bytes for side, of_side in sides.items()},
        **sides,
    }


def run(side: str) -> dict[str, Any]:
    """Run one side in a separate process with all cores, and return its figures."""
    print(f"running: {side}", flush=True)
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    done = subprocess.run(
        command, env=variables | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        sys.exit(f"linear_head: error: exit status {done.returncode} of {side}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_side(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one side. The peak memory is that of the first pass, including the libraries' setup; that pass is not
    timed."""
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
        weight.main_grad = torch.ones(weight.shape).zero_()  # ones first, so that its memory is committed

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


def _peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    run_benchmark(__doc__, measure, *OPTIONS)
