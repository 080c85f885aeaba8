"""Compare the layers' Triton kernels with plain torch: TRITON_INTERPRET=1 python -m tests.interpreted_layers"""

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils

from megarl.ops import rotary_triton, swiglu_triton
from tests.closeness import relative_error

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SWIGLU_SHAPES = [(1, 1), (7, 1, 17), (5, 40), (0, 4)]
SWIGLU_CLAMPS = [None, (1.5, 2.0)]
ROTATIONS = [(2, 8, 8, 1.0), (5, 12, 12, 1.5), (9, 16, 6, 1.0)]
"""Numbers of heads, of channels and of rotated channels, and the factor of cosines and sines."""


def check_swiglu(
    dtype: torch.dtype, shape: tuple[int, ...], clamp: swiglu_triton.Clamp | None, device: str = "cpu"
) -> None:
    """With `clamp`, channels exceed the limit, and some are exactly at it."""
    torch.manual_seed(0)
    gate_and_up = 2 * torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype).to(device)
    gradient = torch.randn(shape).to(dtype).to(device)
    if clamp is None:
        exact = gate_and_up.double().requires_grad_()
        gate, up = exact.chunk(2, -1)
        expected = F.silu(gate) * up
    else:
        alpha, limit = clamp
        gate_and_up[..., :1], gate_and_up[..., 1:2] = limit, -limit
        exact = gate_and_up.double().requires_grad_()
        gate, up = exact[..., ::2].clamp(max=limit), exact[..., 1::2].clamp(-limit, limit)
        expected = (up + 1) * gate * torch.sigmoid(alpha * gate)
    expected.backward(gradient.double())
    actual = swiglu_triton.forward(gate_and_up, clamp), swiglu_triton.backward(gate_and_up, gradient, clamp)
    for ours, theirs in zip(actual, (expected.detach(), exact.grad), strict=True):
        assert ours.dtype is dtype and ours.shape == theirs.shape
        assert ours.numel() == 0 or relative_error(ours.double(), theirs) <= TOLERANCES[dtype]


def check_rotation(dtype: torch.dtype, heads: int, size: int, rotated: int, factor: float, device: str = "cpu") -> None:
    """Compare with Megatron's own rotation. The input is a view, like the query in the fused QKV output."""
    torch.manual_seed(0)
    x = torch.randn(6, heads, 3 * size).to(dtype).to(device)[:, :, size : 2 * size]
    angles = torch.rand(6, 1, 1, rotated // 2, device=device).mul(100).repeat(1, 1, 1, 2)
    gradient = torch.randn(6, 1, heads, size).to(dtype).to(device)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    exact = theirs.double() if dtype is torch.float32 else theirs
    actual = rotary_triton.rotate(x.unsqueeze(1), angles, factor)
    rotary_triton.rotate(ours.unsqueeze(1), angles, factor).backward(gradient)
    expected = rope_utils._apply_rotary_pos_emb_bshd(exact.unsqueeze(1), angles, mscale=factor)
    expected.backward(gradient.to(expected.dtype))
    assert actual.dtype is dtype
    assert relative_error(actual.double(), expected.detach().double()) <= TOLERANCES[dtype]
    assert relative_error(ours.grad.double(), theirs.grad.double()) <= TOLERANCES[dtype]


def main() -> None:
    swiglu_triton.BLOCK, rotary_triton.HEADS = 16, 4
    for dtype in TOLERANCES:
        for shape in SWIGLU_SHAPES:
            for clamp in SWIGLU_CLAMPS:
                check_swiglu(dtype, shape, clamp)
        for case in ROTATIONS:
            check_rotation(dtype, *case)
        print(f"{dtype}: {len(SWIGLU_SHAPES) * len(SWIGLU_CLAMPS)} + {len(ROTATIONS)} cases")


if __name__ == "__main__":
    main()
