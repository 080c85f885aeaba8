"""The same updates on a GPU as in plain torch on the CPU. Needs nothing but the GPU: a group of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.interpreted_head import CASES, check
from tests.parity import config_of, plain_training, random_groups, train
from tests.tiny_model import write_tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch finds none"),
]


def test_updates_equal_plain_torch(tmp_path):
    folder = write_tiny_llama(tmp_path / "model")
    updates = [random_groups(seed) for seed in range(2)]
    # TF32 would round the products of matrices to 10 bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    rank = train(dist.FileStore(str(tmp_path / "store"), 1), 0, config_of(folder), folder, updates)
    reference = plain_training(folder, updates, 0.0)
    assert rank.metrics["policy/loss"].value == pytest.approx(reference.loss, rel=1e-4, abs=1e-6)
    assert rank.metrics["policy/grad_norm"].value == pytest.approx(reference.norm, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_on_its_kernels_equals_full_logits(dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    for case in CASES:
        check(dtype, *case, device="cuda")
