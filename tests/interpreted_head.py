"""Compare the linear head on Triton kernels with full logits: TRITON_INTERPRET=1 python -m tests.interpreted_head"""

import itertools
import sys

import torch

from megarl.ops import head_tile_triton, linear_head, output_layer
from megarl.ops.linear_head import log_prob_and_entropy, plain_log_prob_and_entropy
from tests.closeness import relative_error

TOKENS, HIDDEN, VOCAB, PADDED = 6, 8, 43, 48
CASES = list(itertools.product((False, True), repeat=3))
"""Combinations of three flags: whether there are temperatures, a bias, and candidate tokens."""

PAIRWISE = [case for case in CASES if sum(case) % 2 == 0]
"""Cases that cover all combinations of each pair of flags."""


def check(dtype: torch.dtype, has_scale: bool, has_bias: bool, has_candidates: bool, device: str = "cpu") -> None:
    """Compare the head's values and gradients on a device with full logits in float32 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, generator=generator).to(dtype) / 2 for n in (TOKENS, PADDED))
    leaves = [x.to(device).requires_grad_() for x in (hidden, weight, torch.linspace(-1, 1, PADDED).to(dtype))]
    candidate_ids = torch.randint(-VOCAB, VOCAB, (TOKENS, 9), generator=generator).clamp(min=-1)
    candidate_ids[::3] = -1
    inputs = dict(
        targets=torch.randint(VOCAB, (TOKENS,), generator=generator),
        temperature=torch.rand(TOKENS, generator=generator) + 0.5 if has_scale else 1.0,
        vocab_size=VOCAB,
        candidate_ids=candidate_ids if has_candidates else None,
    )
    gradients = torch.randn(TOKENS, 2, generator=generator)
    wide = [x.detach().float().cpu().requires_grad_() for x in leaves]
    parts = slice(None) if has_bias else slice(0, 2)
    on_device = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    outputs = log_prob_and_entropy(*leaves[:2], bias=leaves[2] if has_bias else None, **on_device).cpu()
    expected = torch.stack(plain_log_prob_and_entropy(*wide[:2], bias=wide[2] if has_bias else None, **inputs), -1)
    actual_grads = torch.autograd.grad((outputs * gradients).sum(), leaves[parts])
    expected_grads = torch.autograd.grad((expected * gradients).sum(), wide[parts])
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert relative_error(outputs.detach(), expected.detach()) <= 1e-5  # logits are float32 for both dtypes
    for a, b in zip(actual_grads, expected_grads, strict=True):
        assert relative_error(a.float().cpu(), b) <= tolerance


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
