"""Compare divergences on Triton kernels with full logits: TRITON_INTERPRET=1 python -m tests.interpreted_divergence"""

import sys

import torch

from megarl.ops import divergence, divergence_tile_triton, output_layer
from megarl.ops.divergence import DivergenceKind
from tests.closeness import relative_error
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
    """Compare values and gradients on a device with full logits in float32 on the CPU.

    `size`: number of tokens and vocabulary entries.
    """
    temperature, vocab = None if has_scale else 1.0, size[1]
    case = DivergenceCase.random(*size, (vocab + 5, vocab), temperature, (has_bias, has_bias), dtype)
    exact, actual = plain(case, kind, beta), tiled(case.to(device), kind, beta)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for name, reference in exact.items():
        is_gradient = name in ("hidden", "weight", "bias")
        error = relative_error(actual[name].float().cpu(), reference)
        assert error <= (tolerance if is_gradient else 1e-5), (name, error)  # logits are float32 for both dtypes


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
