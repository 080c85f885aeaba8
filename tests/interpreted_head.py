"""Compare the linear head on Triton kernels with full logits: TRITON_INTERPRET=1 python -m tests.interpreted_head"""

import itertools
import sys

import torch

from megarl.ops import head_tile_triton, linear_head, output_layer
from megarl.ops.linear_head import log_prob_and_entropy
from tests.closeness import assert_matches
from tests.head_reference import head_results, plain_head

TOKENS, HIDDEN, VOCAB, PADDED = 6, 8, 43, 48
CASES = list(itertools.product((False, True), repeat=3))
"""Combinations of three flags: whether there are temperatures, a bias, and candidate tokens."""

PAIRWISE = [case for case in CASES if sum(case) % 2 == 0]
"""Cases that cover all combinations of each pair of flags."""


def check(dtype: torch.dtype, has_scale: bool, has_bias: bool, has_candidates: bool, device: str = "cpu") -> None:
    """Compare the head's values and gradients on a device with full logits on the CPU."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, generator=generator).to(dtype) / 2 for n in (TOKENS, PADDED))
    bias = {"bias": torch.linspace(-1, 1, PADDED).to(dtype)} if has_bias else {}
    leaves = {"hidden": hidden, "weight": weight} | bias
    candidate_ids = torch.randint(-VOCAB, VOCAB, (TOKENS, 9), generator=generator).clamp(min=-1)
    candidate_ids[::3] = -1
    others = dict(
        targets=torch.randint(VOCAB, (TOKENS,), generator=generator),
        temperature=torch.rand(TOKENS, generator=generator) + 0.5 if has_scale else 1.0,
        vocab_size=VOCAB,
        candidate_ids=candidate_ids if has_candidates else None,
    )
    gradients = torch.randn(TOKENS, 2, generator=generator)
    on_device = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in (leaves | others).items()}
    own = {name: on_device[name].requires_grad_() for name in leaves}
    outputs = log_prob_and_entropy(**on_device)
    assert outputs.dtype is torch.float32
    actual = {name: x.cpu() for name, x in head_results(outputs, gradients.to(device), own).items()}
    assert_matches(actual, lambda: plain_head(leaves, gradients, **others), f"{has_scale, has_bias, has_candidates}")


def main() -> None:
    linear_head.tile_functions = lambda: head_tile_triton
    output_layer.CPU_TILE, head_tile_triton.BLOCK = (4, 30), 16
    cases = CASES if "--all" in sys.argv else PAIRWISE
    for dtype in (torch.float32, torch.bfloat16):
        for case in cases:
            check(dtype, *case)
        print(f"{dtype}: {len(cases)} cases")


if __name__ == "__main__":
    main()
