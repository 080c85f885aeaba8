"""Compare time and memory of the tiled head with full logits, for a forward and a backward pass.

.venv/bin/python tools/benchmarks/linear_head.py --out tools/benchmarks/results/linear_head.json
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from typing import Any

import torch
from benchmark import in_new_process, option, run_benchmark
from training_case import peak_rss_bytes, timed

from megarl.core import device
from megarl.ops.linear_head import log_prob_and_entropy, plain_log_prob_and_entropy

SIDES = ("plain", "tiled", "compiled")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    sizes = {name: getattr(arguments, name) for name in ("vocabulary", "hidden", "tokens", "dtype")}
    sides = {side: in_new_process(measure_side, side, *sizes.values(), arguments.repeats) for side in arguments.sides}
    logits_bytes = arguments.tokens * arguments.vocabulary * 4
    return {
        **sizes,
        "logits_bytes": logits_bytes,
        "ratio_of_seconds": sides["tiled"]["median_seconds"] / sides[arguments.sides[0]]["median_seconds"],
        "share_of_logits": {side: of_side["extra_bytes"] / logits_bytes for side, of_side in sides.items()},
        **sides,
    }


def measure_side(
    side: str, vocabulary: int, hidden_size: int, num_tokens: int, dtype: str, repeats: int
) -> dict[str, Any]:
    """Measure one side with all cores or on the GPU. The peak memory is that of the first pass, including the
    libraries' setup; that pass is not timed. "compiled" is the plain head compiled by torch."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    generator = torch.Generator(device.device()).manual_seed(0)
    given = dict(dtype=getattr(torch, dtype), device=device.device())
    hidden = torch.empty(num_tokens, hidden_size, **given).normal_(generator=generator)
    weight = torch.empty(vocabulary, hidden_size, **given)
    weight.normal_(std=hidden_size**-0.5, generator=generator)
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator, device=device.device())
    gradients = torch.randn(num_tokens, 2, generator=generator, device=device.device())
    hidden.requires_grad_()
    weight.requires_grad_()
    before = _peak_bytes()
    if side == "tiled":
        weight.main_grad = torch.ones(weight.shape, device=device.device()).zero_()  # commits its memory
    plain = torch.compile(plain_log_prob_and_entropy) if side == "compiled" else plain_log_prob_and_entropy

    def forward_backward() -> None:
        hidden.grad = weight.grad = None
        if side == "tiled":
            scored = log_prob_and_entropy(hidden, weight, targets, 1.0, vocabulary)
        else:
            scored = torch.stack(plain(hidden, weight, targets, 1.0, vocabulary), -1)
        (scored * gradients).sum().backward()
        device.synchronize()

    forward_backward()
    gradient_bytes = hidden.numel() * hidden.element_size() + weight.numel() * 4
    extra_bytes = _peak_bytes() - before - gradient_bytes
    seconds = timed(forward_backward, repeats)
    return {"median_seconds": median(seconds), "seconds": seconds, "extra_bytes": extra_bytes}


def _peak_bytes() -> int:
    """Return the peak memory of this process: allocated on the GPU, or resident."""
    return torch.cuda.max_memory_allocated() if device.on_cuda() else peak_rss_bytes()


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        measure,
        option("--vocabulary", type=int, default=151_936),
        option("--hidden", type=int, default=1024),
        option("--tokens", type=int, default=4096),
        option("--dtype", choices=("float32", "bfloat16"), default="float32"),
        option("--sides", choices=SIDES, nargs="+", default=SIDES[:2], help="tiled, and what to compare it with"),
        option("--repeats", type=int, default=3, help="timed passes of each side (%(default)s)"),
    )
