"""Values and gradients of the linear head, and of full logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megarl.ops.linear_head import plain_log_prob_and_entropy

Leaves = Mapping[str, torch.Tensor]


def plain_head(
    leaves: Leaves, gradients: torch.Tensor, rounds: torch.dtype | None = None, **inputs: Any
) -> dict[str, torch.Tensor]:
    """Return log-probs and entropies, [N, 2], and their gradients, computed from full logits in the default dtype.

    Args:
        leaves: hidden, weight and perhaps bias.
        gradients: [N, 2], of the outputs.
        rounds: dtype to which the logits are rounded. The gradients ignore the rounding.
    """
    dtype = torch.get_default_dtype()
    leaves = {name: leaf.detach().cpu().to(dtype, copy=True).requires_grad_() for name, leaf in leaves.items()}
    if rounds is None:
        scored = plain_log_prob_and_entropy(**leaves, **inputs)
    else:
        logits = torch.nn.functional.linear(*leaves.values())
        logits = logits + (logits.to(rounds) - logits).detach()
        scored = plain_log_prob_and_entropy(logits, torch.eye(logits.shape[1]), **inputs)
    return head_results(torch.stack(scored, -1), gradients, leaves)


def head_results(outputs: torch.Tensor, gradients: torch.Tensor, leaves: Leaves) -> dict[str, torch.Tensor]:
    """Return the outputs and the leaves' gradients."""
    found = torch.autograd.grad((outputs * gradients).sum(), list(leaves.values()))
    return {"outputs": outputs.detach()} | dict(zip(leaves, found, strict=True))
