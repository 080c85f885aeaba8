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

from megarl.ops.linear_head import log_prob_and_entropy, plain_log_prob_and_entropy


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    sizes = {name: getattr(arguments, name) for name in ("vocabulary", "hidden", "tokens")}
    measured = (
        in_new_process(measure_side, is_tiled, *sizes.values(), arguments.repeats) for is_tiled in (False, True)
    )
    sides = dict(zip(("plain", "tiled"), measured, strict=True))
    logits_bytes = arguments.tokens * arguments.vocabulary * 4
    return {
        **sizes,
        "dtype": "float32",
        "logits_bytes": logits_bytes,
        "ratio_of_seconds": sides["tiled"]["median_seconds"] / sides["plain"]["median_seconds"],
        "share_of_logits": {side: of_side["extra_bytes"] / logits_bytes for side, of_side in sides.items()},
        **sides,
    }


def measure_side(is_tiled: bool, vocabulary: int, hidden_size: int, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Measure one side with all cores. The peak memory is that of the first pass, including the libraries' setup; that
    pass is not timed."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator, requires_grad=True)
    weight = torch.empty(vocabulary, hidden_size).normal_(std=hidden_size**-0.5, generator=generator).requires_grad_()
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator)
    gradients = torch.randn(num_tokens, 2, generator=generator)
    before = peak_rss_bytes()
    if is_tiled:
        weight.main_grad = torch.ones(weight.shape).zero_()  # commits its memory

    def forward_backward() -> None:
        hidden.grad = weight.grad = None
        if is_tiled:
            scored = log_prob_and_entropy(hidden, weight, targets, 1.0, vocabulary)
        else:
            scored = torch.stack(plain_log_prob_and_entropy(hidden, weight, targets, 1.0, vocabulary), -1)
        (scored * gradients).sum().backward()

    forward_backward()
    extra_bytes = peak_rss_bytes() - before - 4 * (hidden.numel() + weight.numel())
    seconds = timed(forward_backward, repeats)
    return {"median_seconds": median(seconds), "seconds": seconds, "extra_bytes": extra_bytes}


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        measure,
        option("--vocabulary", type=int, default=151_936),
        option("--hidden", type=int, default=1024),
        option("--tokens", type=int, default=4096),
        option("--repeats", type=int, default=3, help="timed passes of each side (%(default)s)"),
    )
