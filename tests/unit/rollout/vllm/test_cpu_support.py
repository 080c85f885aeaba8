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


def test_steps_without_draft_tokens_are_not_truncated(monkeypatch):
    monkeypatch.setattr(rejection_sampler, "apply_top_k_top_p", None)
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", None)
    cpu_support.install()
    none = torch.empty(0, dtype=torch.int32)
    assert rejection_sampler.apply_top_k_top_p(torch.empty(0, 4), none, None).shape == (0, 4)
    logits = rejection_sampler.apply_top_k_top_p(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([2]), None)
    assert logits.tolist() == [[float("-inf"), 1.0, 2.0]]
