"""Compare divergences on Triton kernels with full logits: TRITON_INTERPRET=1 python -m tests.interpreted_divergence"""

import sys
from functools import partial

import torch

from megarl.ops import divergence, divergence_tile_triton, output_layer
from megarl.ops.divergence import DivergenceKind
from tests.closeness import assert_matches
from tests.divergence_case import DivergenceCase, plain, tiled

KINDS: list[tuple[DivergenceKind, float]] = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.1), ("jsd", 0.9)]
CASES = [(*kind, has_scale, has_bias) for kind in KINDS for has_scale in (False, True) for has_bias in (False, True)]
"""Kind, beta, and whether there are temperatures and biases."""

FEW = [CASES[number] for number in (0, 7, 11, 12)]
"""Cases that cover KL and JSD, each with and without temperatures and biases."""


def check(
    dtype: torch.dtype,
    kind: DivergenceKind,
    beta: float,
    has_scale: bool,
    has_bias: bool,
    device: str = "cpu",
    size: tuple[int, int] = (6, 43),
) -> None:
    """Compare values and gradients on a device with full logits on the CPU.

    `size`: number of tokens and vocabulary entries.
    """
    temperature, vocab = None if has_scale else 1.0, size[1]
    case = DivergenceCase.random(*size, (vocab + 5, vocab), temperature, (has_bias, has_bias), dtype)
    actual = {name: x.cpu() for name, x in tiled(case.to(device), kind, beta).items()}
    assert {actual[name].dtype for name in ("log_prob", "entropy", "divergence")} == {torch.float32}
    assert_matches(actual, partial(plain, case, kind, beta), f"{kind, beta, has_scale, has_bias}")


def main() -> None:
    divergence._tile_functions = lambda: divergence_tile_triton
    output_layer.CPU_TILE, divergence_tile_triton.BLOCK = (4, 60), 16
    cases = CASES if "--all" in sys.argv else FEW
    for dtype in (torch.float32, torch.bfloat16):
        for case in cases:
            check(dtype, *case)
        print(f"{dtype}: {len(cases)} cases")


if __name__ == "__main__":
    main()
