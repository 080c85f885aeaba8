"""Compare the layers' Triton kernels with plain torch: TRITON_INTERPRET=1 python -m tests.interpreted_layers"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils

from megarl.ops import rotary_triton, swiglu_triton
from tests.closeness import assert_matches

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
    if clamp is not None:
        gate_and_up[..., :1], gate_and_up[..., 1:2] = clamp[1], -clamp[1]

    def plain() -> dict[str, torch.Tensor]:
        leaf = gate_and_up.to(torch.get_default_dtype(), copy=True).requires_grad_()
        if clamp is None:
            gate, up = leaf.chunk(2, -1)
            value = F.silu(gate) * up
        else:
            alpha, limit = clamp
            gate, up = leaf[..., ::2].clamp(max=limit), leaf[..., 1::2].clamp(-limit, limit)
            value = (up + 1) * gate * torch.sigmoid(alpha * gate)
        value.backward(gradient.to(value.dtype))
        return {"value": value.detach(), "gradient": leaf.grad}

    value, gradients = swiglu_triton.forward(gate_and_up, clamp), swiglu_triton.backward(gate_and_up, gradient, clamp)
    assert value.dtype is gradients.dtype is dtype
    assert_matches({"value": value, "gradient": gradients}, plain, f"SwiGLU {shape}, clamp {clamp}")


def check_rotation(dtype: torch.dtype, heads: int, size: int, rotated: int, factor: float, device: str = "cpu") -> None:
    """Compare with Megatron's own rotation. The input is a view, like the query in the fused QKV output."""
    torch.manual_seed(0)
    x = torch.randn(6, heads, 3 * size).to(dtype).to(device)[:, :, size : 2 * size]
    angles = torch.rand(6, 1, 1, rotated // 2, device=device).mul(100).repeat(1, 1, 1, 2)
    gradient = torch.randn(6, 1, heads, size).to(dtype).to(device)

    def results(rotate: Callable[..., torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaf = x.to(dtype, copy=True).requires_grad_()
        # Angles are at least float32.
        value = rotate(leaf.unsqueeze(1), angles.double() if dtype is torch.float64 else angles)
        value.backward(gradient.to(dtype))
        return {"value": value.detach(), "gradient": leaf.grad}

    def plain() -> dict[str, torch.Tensor]:
        return results(partial(rope_utils._apply_rotary_pos_emb_bshd, mscale=factor), torch.get_default_dtype())

    actual = results(partial(rotary_triton.rotate, factor=factor), dtype)
    assert actual["value"].dtype is dtype
    assert torch.equal(rotary_triton.rotate(x.unsqueeze(1), angles, factor), actual["value"])
    assert_matches(actual, plain, f"{heads} heads")


def main() -> None:
    swiglu_triton.BLOCK, rotary_triton.HEADS = 16, 4
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SWIGLU_SHAPES:
            for clamp in SWIGLU_CLAMPS:
                check_swiglu(dtype, shape, clamp)
        for case in ROTATIONS:
            check_rotation(dtype, *case)
        print(f"{dtype}: {len(SWIGLU_SHAPES) * len(SWIGLU_CLAMPS)} + {len(ROTATIONS)} cases")


if __name__ == "__main__":
    main()
