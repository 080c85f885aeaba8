"""Output layer of the last stage. For the requested rows in a pack, it returns the target tokens' log-probs, the
entropies and, if requested, the divergences from teachers, or a classifier's scores. In a teacher, it returns hidden
states or the most probable tokens if the divergence needs them. It never returns logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.algorithms.kl import UNSCORED
from megarl.megatron.model.mtp import MtpInput, mtp_of
from megarl.models.classifier import ScoreHead, score_head_of
from megarl.models.shape import ModelShape
from megarl.models.value_head import value_head_shapes
from megarl.ops.divergence import DivergenceKind, divergence
from megarl.ops.linear_head import log_prob_and_entropy
from megarl.ops.output_layer import OutputLayer
from megarl.ops.packed_attention import take
from megarl.ops.top_divergence import top_divergence
from megarl.ops.top_tokens import TopTokens, top_tokens


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The requested rows that a teacher scores.

    Attributes:
        rows: int64 [n], ascending indices among the requested rows.
        states: [n, h'], the teacher's final hidden states, or packed TopTokens, float32 [n, 2k + 1], for a divergence
            over these tokens; [0, 0] if there are no such rows.
    """

    rows: torch.Tensor
    states: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadRequest:
    """The rows that a forward pass requests from the head.

    Attributes:
        rows: int64 [N], row indices in the pack.
        targets: int64 [N], the token to score at each row.
        candidate_ids: int64 [N, K], candidate tokens, as in TokenBatch; None means the full vocabulary.
        mtp: the input of the MTP layer; None if it is not trained in this pass.
        scored_rows: the rows that each teacher scores; empty if the pass computes no divergence.
    """

    rows: torch.Tensor
    targets: torch.Tensor
    candidate_ids: torch.Tensor | None = None
    mtp: MtpInput | None = None
    scored_rows: Sequence[ScoredRows] = ()


@dataclass(frozen=True, slots=True)
class TeacherDivergence:
    """The divergence from teachers that the head computes.

    Attributes:
        kind, beta: as in ops.divergence.
        weights: each teacher's output weight for this rank's shard of the vocabulary, [V/tp, h']; None: the divergence
            is over the teachers' most probable tokens and the rest.
        vocab_sizes: for each exact divergence, the number of tokens that both distributions are normalized over.
    """

    kind: DivergenceKind
    beta: float
    weights: Sequence[torch.Tensor] | None = None
    vocab_sizes: Sequence[int] = ()


class LogProbHead(ColumnParallelLinear):
    """Language model head. Returns log-prob and entropy, float32 [N, 1, 2], followed by optional columns. GPTModel
    transposes the output, so the loss receives [1, N, 2].

    Set the request right before each call to the model. The call consumes it, so a request is never reused.

    Attributes:
        returns_hidden: whether to return the rows' hidden states instead, [N, 1, h] in the model's dtype.
        top_k: number of most probable tokens to return instead, as packed TopTokens, float32 [N, 1, 2k + 1]; None: the
            head returns scores.
        value_head: optional head that adds a third column, the value.
        teachers: the divergence from teachers; None if it is sampled or there are no teachers. If the request has
            scored rows, each teacher adds a column: the divergence, or UNSCORED in rows that the teacher does not
            score.
        predict_second: maps the input and MtpInput to the hidden states that predict the tokens after the next ones;
            None if the model has no MTP layer. If it is trained, the last column is w·(−log-prob) of these tokens.
    """

    temperature: float
    vocab_size: int
    logits_dtype: torch.dtype
    request: HeadRequest | None = None
    returns_hidden: bool = False
    top_k: int | None = None
    value_head: ValueHead | None
    teachers: TeacherDivergence | None = None
    predict_second: Callable[[torch.Tensor, MtpInput], torch.Tensor] | None

    def forward(self, input_, weight=None, runtime_gather_output=None):
        request, self.request = self.request, None
        assert request is not None, "the model was called without a head request"
        weight = self.weight if weight is None else weight
        assert weight is not None, "the output layer has no weight"
        hidden = self._selected(input_, request.rows)
        if self.returns_hidden:
            return hidden[:, None], None
        if self.top_k is not None:
            bias = self._bias_of(weight)
            options = self.temperature, self.vocab_size, self.process_group, bias, self.logits_dtype
            return top_tokens(hidden, weight, self.top_k, *options).packed[:, None], None
        scored, divergences = self._score(hidden, weight, request)
        if self.value_head is not None:
            scored = torch.cat((scored, self.value_head(input_, request.rows)), -1)
        scored = torch.cat((scored, *divergences), -1)
        if request.mtp is not None:
            assert self.predict_second is not None, "the model has no MTP layer"
            second = self._selected(self.predict_second(input_, request.mtp), request.rows)
            log_prob = self._log_prob_and_entropy(second, weight.detach(), request.mtp.targets)[:, :1]
            scored = torch.cat((scored, -request.mtp.weight[:, None] * log_prob), -1)
        return scored[:, None], None

    def _selected(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the requested rows, [N, h], on every tensor-parallel rank."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        return take(hidden[:, 0], rows)

    def _score(
        self, hidden: torch.Tensor, weight: torch.Tensor, request: HeadRequest
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return log-prob and entropy, float32 [N, 2], and the divergence from each teacher, float32 [N, 1]."""
        targets = request.targets
        covers_rows = len(request.scored_rows) == 1 and len(request.scored_rows[0].rows) == len(targets) > 0
        if covers_rows and self._vocab_size_with(0) == self.vocab_size:
            # There are no candidate tokens: the config rejects them with a divergence between distributions.
            scored = self._divergence(hidden, weight, 0, request.scored_rows[0].states, targets)
            return scored[:, :2], [scored[:, 2:]]
        columns = []
        for number, part in enumerate(request.scored_rows):
            column = torch.full(targets.shape, UNSCORED, device=targets.device)
            if len(part.rows):
                values = self._divergence(take(hidden, part.rows), weight, number, part.states)
                column = column.index_copy(0, part.rows, values)
            columns.append(column[:, None])
        return self._log_prob_and_entropy(hidden, weight, targets, request.candidate_ids), columns

    def _log_prob_and_entropy(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        candidate_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return log_prob_and_entropy(
            hidden,
            weight,
            targets,
            self.temperature,
            self.vocab_size,
            self.process_group,
            self._bias_of(weight),
            candidate_ids,
            self.logits_dtype,
        )

    def _divergence(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        number: int,
        states: torch.Tensor,
        targets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the result of `divergence` for this teacher's hidden states, or that of `top_divergence` for its most
        probable tokens."""
        assert self.teachers is not None, "the head has no divergence. Call prepare_divergence first"
        options = (
            self.teachers.kind,
            self.temperature,
            self._vocab_size_with(number),
            self.teachers.beta,
            self.process_group,
            self._bias_of(weight),
            self.logits_dtype,
            targets,
        )
        if self.teachers.weights is None:
            return top_divergence(hidden, weight, TopTokens.unpacked(states), *options)
        teacher = OutputLayer(states, self.teachers.weights[number], logits_dtype=self.logits_dtype)
        return divergence(hidden, weight, teacher, *options)

    def _vocab_size_with(self, number: int) -> int:
        """Return the number of tokens that the divergence from the teacher with this number covers."""
        sizes = () if self.teachers is None else self.teachers.vocab_sizes
        return sizes[number] if sizes else self.vocab_size

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self.tp_group  # pyright: ignore[reportReturnType]  # Megatron's function may return an int

    def _bias_of(self, weight: torch.Tensor) -> torch.Tensor | None:
        return self.bias if weight.requires_grad or self.bias is None else self.bias.detach()


class ScoreLayer(torch.nn.Module):
    """Classifier head. Returns scores for the requested rows, float32 [N, 1, labels]. A critic's scores are values.

    The head is too small to shard: every tensor-parallel rank has a full copy and computes the same scores.
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
    """A linear layer that computes in float32, regardless of the dtype of its parameters.

    Always call the module instead of reading its parameters from outside: with overlapped communication, DDP waits for
    a parameter's all-gather when its module is called.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight.float(), self.bias.float())


class ValueHead(torch.nn.Module):
    """An MLP that computes a value for each row from hidden states, float32 [N, 1]. Replicated on every rank."""

    def __init__(self, config: TransformerConfig, tp_group):
        super().__init__()
        self.fc1 = Float32Linear(config.hidden_size, config.hidden_size, dtype=config.params_dtype)
        self.fc2 = Float32Linear(config.hidden_size, 1, dtype=config.params_dtype)
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Initialize the weights identically on every rank. Values start at 0. fc1 is random because its gradient would
        stay zero if fc1 were zero as well."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(self.fc1.weight.shape, generator=generator) / self.fc1.in_features**0.5
        self.fc1.weight.copy_(weight)
        for parameter in (self.fc1.bias, self.fc2.weight, self.fc2.bias):
            parameter.zero_()

    def forward(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        selected = _replicated_rows(hidden, rows, self.sequence_parallel, self.tp_group)
        return self.fc2(F.gelu(self.fc1(selected)))


def _replicated_rows(hidden: torch.Tensor, rows: torch.Tensor, sequence_parallel: bool, tp_group) -> torch.Tensor:
    """Return the requested rows, float32 [N, hidden], for a head replicated on every tensor-parallel rank.

    Each rank computes the full gradients for the head's weight and the hidden states. Under sequence parallelism, each
    rank's part of the hidden-state gradient flows back; nothing is summed over the ranks.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=tp_group)
    return take(hidden[:, 0], rows).float()


def heads_of(chunks: Sequence[torch.nn.Module]) -> list[LogProbHead]:
    """Return the language model heads on this rank: one on the last stage. The chunks may be wrapped."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, LogProbHead)]


@contextmanager
def returning_states(chunks: Sequence[torch.nn.Module], hidden: bool, top_k: int | None) -> Iterator[None]:
    """Return a context manager that makes language model heads return hidden states (`hidden`) or their `top_k` most
    probable tokens. With neither, they return scores. The chunks may be wrapped."""
    heads = heads_of(chunks)
    for head in heads:
        head.returns_hidden, head.top_k = hidden, top_k
    try:
        yield
    finally:
        for head in heads:
            head.returns_hidden, head.top_k = False, None


@contextmanager
def scored_at(chunks: Sequence[torch.nn.Module], temperature: float) -> Iterator[None]:
    """Return a context manager that changes the temperature of language model heads. The chunks may be wrapped."""
    heads = heads_of(chunks)
    before = [head.temperature for head in heads]
    for head in heads:
        head.temperature = temperature
    try:
        yield
    finally:
        for head, previous in zip(heads, before, strict=True):
            head.temperature = previous


def replace_output_layer(
    model: GPTModel, hf_config: Mapping[str, Any], temperature: float, logits_dtype: torch.dtype = torch.float32
) -> None:
    """Replace a GPTModel's output layer with our head, before DDP wraps the model. Only the last stage has an output
    layer. `temperature` and `logits_dtype` apply to a language model's head, as in log_prob_and_entropy."""
    if not model.post_process:
        return
    score_head = score_head_of(hf_config)
    layer: Any = model.output_layer  # one of Megatron's classes or Transformer Engine's
    if score_head is not None:
        scores = ScoreLayer(score_head, model.config, layer.tp_group)
        model.output_layer = scores  # pyright: ignore[reportAttributeAccessIssue]  # typed by Megatron's assignment
        return
    layer.__class__ = LogProbHead
    assert isinstance(layer, LogProbHead)
    layer.temperature, layer.logits_dtype = temperature, logits_dtype
    layer.vocab_size = ModelShape.of(hf_config).vocab
    layer.value_head = ValueHead(model.config, layer.tp_group) if value_head_shapes(hf_config) else None
    block = mtp_of(model)

    def predict_second(hidden: torch.Tensor, item: MtpInput) -> torch.Tensor:
        assert block is not None
        # Use the rotary embedding with the positions of the decoder's forward pass.
        angles = None if model.config.multi_latent_attention else model.rotary_pos_emb(item.attention.max_seqlen_q)
        return block(hidden, angles, item)

    layer.predict_second = None if block is None else predict_second
