"""Functions of vLLM's CPU build that megarl replaces."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.sample import rejection_sampler

from megarl.rollout.vllm import cpu_support


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_sampling_parameters_are_repeated_for_draft_tokens(monkeypatch, dtype):
    """The last request has a temperature of 0, and the second has no drafts."""
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", None)
    cpu_support.install()
    values, ends = torch.tensor([3, 5, 7, 0], dtype=dtype), torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    found = rejection_sampler.expand_batch_to_tokens(values, ends, 6, replace_from=0, replace_to=1)
    assert found.dtype == dtype and found.tolist() == [3, 3, 7, 7, 7, 1]
    assert rejection_sampler.expand_batch_to_tokens(values, ends, 6).tolist() == [3, 3, 7, 7, 7, 0]
