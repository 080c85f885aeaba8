"""Megatron's optimizer: the norm of the gradients without Apex."""

from __future__ import annotations

import torch
from megatron.core.utils import local_multi_tensor_l2_norm

from megarl.megatron.cpu_support import install
from megarl.megatron.optimizer import l2_norm


def test_norm_equals_megatrons_own():
    install()  # Megatron's own function works only on CUDA
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in ((5,), (3, 4), (1,), (200, 30))]
    (ours, per_tensor), (theirs, _) = (
        norm(2048, None, [tensors], False) for norm in (l2_norm, local_multi_tensor_l2_norm)
    )
    assert per_tensor is None and ours.shape == theirs.shape and ours.dtype is theirs.dtype
    torch.testing.assert_close(ours, theirs)
    exact = torch.cat([tensor.flatten() for tensor in tensors]).double().norm()
    torch.testing.assert_close(ours[0].double(), exact, rtol=1e-6, atol=0.0)
