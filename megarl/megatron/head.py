"""The output layer: log-prob and entropy of the wanted tokens, in place of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megarl.ops.linear_head import log_prob_and_entropy


@dataclass(frozen=True, slots=True)
class HeadRequest:
    """What the next forward pass wants: rows of the pack (int64 [N]) and the token to score at each (int64 [N])."""

    rows: torch.Tensor
    targets: torch.Tensor


class LogProbHead(ColumnParallelLinear):
    """Stands in for GPTModel's output layer. GPTModel only transposes what it returns, so [N, 1, 2] reaches the loss
    as [1, N, 2]: log-prob and entropy, float32.

    The request is set right before each call of the model and taken out in it, so that none is ever used twice.
    """

    temperature: float
    vocab_size: int
    request: HeadRequest | None = None

    def forward(self, input_, weight=None, runtime_gather_output=None):
        request, self.request = self.request, None
        assert request is not None, "the model was called without a head request"
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        scored = log_prob_and_entropy(
            hidden[:, 0][request.rows],
            self.weight if weight is None else weight,
            request.targets,
            self.temperature,
            self.vocab_size,
            self.tp_group,
        )
        return scored[:, None], None


def replace_output_layer(model, temperature: float, vocab_size: int) -> None:
    """Turns a GPTModel's output layer into a LogProbHead, before DDP wraps the model. Other stages have none."""
    if model.post_process:
        model.output_layer.__class__ = LogProbHead
        model.output_layer.temperature = temperature
        model.output_layer.vocab_size = vocab_size
