"""A whole run in which engine and trainer share one GPU and take turns in its memory."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.test_train import metrics_of, train
from tests.tiny_model import write_tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch finds none"),
]


@pytest.mark.parametrize("offload", ["[]", "[gradients, optimizer]", "[parameters, gradients, optimizer]"])
def test_a_run_on_one_gpu(tmp_path, offload):
    """Every refit's weights are verified by their checksums: those that stay are read again, and those that have moved
    are published anew."""
    run = train(
        tmp_path,
        write_tiny_llama(tmp_path / "model"),
        *("run.steps=3", "model.dtype=bfloat16", "rollout.vllm_overrides={enforce_eager: true}"),
        *("cluster.placement=colocated", "rollout.sleep=true", f"actor.offload={offload}"),
        "rollout.verify_refit=always",
    )
    steps = metrics_of(run)
    assert [step["weights/version"] for step in steps] == [1, 2, 3]
    assert all(step["refit/gb"] > 0 and step["refit/staging_mib"] == 0 for step in steps)
    assert all(step["mismatch/logprob_abs_mean"] <= 0.05 for step in steps), "of bfloat16"
    parts = offload.strip("[]").split(", ") if offload != "[]" else []
    assert all(steps[-1][f"memory/actor_{part}_offloaded_gb"] > 0 for part in parts)
