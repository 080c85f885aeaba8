"""The output layer of the last stage, which gives for the requested rows of a pack log-prob and entropy of their tokens
in place of logits, or the scores of a classifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.models.classifier import ScoreHead, score_head_of
from megarl.models.shape import ModelShape
from megarl.models.value_head import value_head_shapes
from megarl.ops.linear_head import log_prob_and_entropy
from megarl.ops.packed_attention import take


@dataclass(frozen=True, slots=True)
class HeadRequest:
    """The request of a forward pass to the head.

    rows            int64 [N], rows of the pack
    targets         int64 [N], the token to score at each row
    candidate_ids   int64 [N, K], the tokens that it is normalised over, as in TokenBatch; None: the whole vocabulary
    """

    rows: torch.Tensor
    targets: torch.Tensor
    candidate_ids: torch.Tensor | None = None


class LogProbHead(ColumnParallelLinear):
    """The head of a language model. GPTModel only transposes its output, so [N, 1, 2] reaches the loss as [1, N, 2]:
    log-prob and entropy, float32.

    The request is set right before each call of the model and taken out in it, so that none is ever used twice.
    """

    temperature: float
    vocab_size: int
    logits_dtype: torch.dtype
    request: HeadRequest | None = None
    value_head: ValueHead | None
    """The head that adds a third column, the value."""

    def forward(self, input_, weight=None, runtime_gather_output=None):
        request, self.request = self.request, None
        assert request is not None, "the model was called without a head request"
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        scored = log_prob_and_entropy(
            take(hidden[:, 0], request.rows),
            self.weight if weight is None else weight,
            request.targets,
            self.temperature,
            self.vocab_size,
            self.tp_group,
            self.bias,
            request.candidate_ids,
            self.logits_dtype,
        )
        if self.value_head is not None:
            scored = torch.cat((scored, self.value_head(input_, request.rows)), -1)
        return scored[:, None], None


class ScoreLayer(torch.nn.Module):
    """A classifier's head, which gives scores of the requested rows, float32 [N, 1, labels]: values, if it is a
    critic's.

    It is too small to be shared out: every tensor-parallel rank has all of it, and computes the same scores.
    """

    request: HeadRequest | None = None

    def __init__(self, head: ScoreHead, config: TransformerConfig, tp_group):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(head.num_labels, config.hidden_size, dtype=config.params_dtype))
        if head.bias:
            self.bias = torch.nn.Parameter(torch.zeros(head.num_labels, dtype=config.params_dtype))
        else:
            self.register_parameter("bias", None)
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group

    def forward(self, input_, weight=None, runtime_gather_output=None):
        request, self.request = self.request, None
        assert request is not None, "the model was called without a head request"
        rows = _replicated_rows(input_, request.rows, self.sequence_parallel, self.tp_group)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(rows, self.weight.float(), bias)[:, None], None


class Float32Linear(torch.nn.Linear):
    """A linear layer that computes in float32, whatever the dtype of its parameters.

    It must be called, and its parameters not read from outside: DDP waits for parameters that overlapped communication
    still fetches when their module is called.
    """

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight.float(), self.bias.float())


class ValueHead(torch.nn.Module):
    """An MLP on a language model's hidden states that gives values of rows, float32 [N, 1]; whole on every rank,
    too."""

    def __init__(self, config: TransformerConfig, tp_group):
        super().__init__()
        self.fc1 = Float32Linear(config.hidden_size, config.hidden_size, dtype=config.params_dtype)
        self.fc2 = Float32Linear(config.hidden_size, 1, dtype=config.params_dtype)
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Initialises the weights alike on every rank. Values start at 0; if fc1 were zero as well, it would stay
        so."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(self.fc1.weight.shape, generator=generator) / self.fc1.in_features**0.5
        self.fc1.weight.copy_(weight)
        for parameter in (self.fc1.bias, self.fc2.weight, self.fc2.bias):
            parameter.zero_()

    def forward(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        wanted = _replicated_rows(hidden, rows, self.sequence_parallel, self.tp_group)
        return self.fc2(F.gelu(self.fc1(wanted)))


def _replicated_rows(hidden: torch.Tensor, rows: torch.Tensor, sequence_parallel: bool, tp_group) -> torch.Tensor:
    """Returns rows of the pack, float32 [N, hidden], for a head that every tensor-parallel rank has and computes whole.

    Each rank then has the whole gradient of the head's weight, and of the hidden states: under sequence parallelism the
    rank's part of these goes back, and nothing is summed over the ranks.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=tp_group)
    return take(hidden[:, 0], rows).float()


@contextmanager
def scored_at(chunks: Sequence[torch.nn.Module], temperature: float) -> Iterator[None]:
    """Makes the head of a language model, wrapped or not, divide its logits by another temperature while it is
    entered."""
    heads = [module for chunk in chunks for module in chunk.modules() if isinstance(module, LogProbHead)]
    before = [head.temperature for head in heads]
    for head in heads:
        head.temperature = temperature
    try:
        yield
    finally:
        for head, own in zip(heads, before, strict=True):
            head.temperature = own


def replace_output_layer(
    model: GPTModel, hf_config: Mapping[str, Any], temperature: float, logits_dtype: torch.dtype = torch.float32
) -> None:
    """Gives a GPTModel our head in place of its output layer, before DDP wraps it. Only the last stage has one.

    temperature, logits_dtype: of a language model's head, as in log_prob_and_entropy
    """
    if not model.post_process:
        return
    score_head = score_head_of(hf_config)
    if score_head is not None:
        model.output_layer = ScoreLayer(score_head, model.config, model.output_layer.tp_group)
        return
    model.output_layer.__class__ = LogProbHead
    model.output_layer.temperature, model.output_layer.logits_dtype = temperature, logits_dtype
    model.output_layer.vocab_size = ModelShape.of(hf_config).vocab
    has_values = bool(value_head_shapes(hf_config))
    model.output_layer.value_head = ValueHead(model.config, model.output_layer.tp_group) if has_values else None
