"""Log-prob and entropy of sampled tokens, computed from hidden states and a vocabulary-sharded output weight.

Logits are computed in tiles of tokens × vocabulary and never stored. The forward pass folds each tile into a running
log-sum-exp; the backward pass recomputes the tile. With logits z, L = log Σ exp z, p = exp(z − L) and entropy H:

    log-prob  = z[y] − L                  ∂ log-prob / ∂z = 1[y] − p
    H         = L − Σ p·z                 ∂ H / ∂z        = −p · (log p + H)

If the sampling policy was truncated to candidate tokens (top-k, top-p), both quantities refer to the truncated policy:
the sums run over the candidates, and the logits of all other tokens have no gradient. The target is always a candidate,
whether it is listed or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megarl.core import device
from megarl.ops import head_tile
from megarl.ops.head_tile import NEVER, rescale
from megarl.ops.output_layer import (
    Gradients,
    OutputLayer,
    held_tokens,
    is_sharded,
    raise_over_ranks,
    scale_of,
    tile,
)


def plain_log_prob_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float | torch.Tensor,
    vocab_size: int,
    bias: torch.Tensor | None = None,
    candidate_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob and entropy, [N] each, from the full logits [N, V] for an unsharded weight. This is the plain
    reference for `log_prob_and_entropy`."""
    logits = plain_logits(hidden, weight, bias, temperature, vocab_size)
    if candidate_ids is not None:
        listed = F.one_hot(torch.cat((candidate_ids, targets[:, None]), 1) + 1, vocab_size + 1).sum(1)[:, 1:] > 0
        logits = logits.where(listed | (candidate_ids < 0).all(1, keepdim=True), -torch.inf)
    log_probs = torch.log_softmax(logits, dim=-1)
    entropy = -(log_probs.exp() * log_probs.where(log_probs > -torch.inf, 0)).sum(-1)
    return log_probs.gather(1, targets[:, None])[:, 0], entropy


def plain_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float | torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Return the full logits divided by the temperature, [N, V]."""
    logits = F.linear(hidden, weight, bias)[:, :vocab_size].float()
    return logits / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)


def log_prob_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float | torch.Tensor,
    vocab_size: int,
    process_group: dist.ProcessGroup | None = None,
    bias: torch.Tensor | None = None,
    candidate_ids: torch.Tensor | None = None,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return each target's log-prob and the entropy of its distribution, float32 [N, 2].

    Args:
        hidden: [N, h], identical on all ranks of `process_group`. Its gradient is only this shard's contribution; the
            caller must reduce it.
        weight: [V / tp, h], this rank's rows in the output weight. If it has a `main_grad` buffer (Megatron's gradient
            accumulation), the gradient is added to it and `grad_added_to_main_grad` is set.
        targets: int64 [N], ids in the full vocabulary.
        temperature: divisor of the logits, a float, or float32 [N] with one temperature per token.
        vocab_size: number of token rows in the unsharded weight. Rows beyond it are padding with probability 0.
        process_group: the tensor-parallel ranks that hold the shards, in order.
        bias: [V / tp], this rank's part of the output bias; None if the layer has none.
        candidate_ids: int64 [N, K], the only tokens with nonzero probability, as ids in the full vocabulary, padded
            with −1. A row that contains only −1, or None, makes every token a candidate.
        logits_dtype: float32, or a narrower dtype that logits are rounded to before the temperature is applied, as if
            the matrix product returned that dtype. The gradient ignores the rounding.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"expected hidden [N, h], weight [V, h] and targets [N], but got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)} and {tuple(targets.shape)}"
        )
    if candidate_ids is not None and (candidate_ids.dim() != 2 or candidate_ids.shape[0] != len(targets)):
        raise ValueError(f"expected candidate_ids [{len(targets)}, K], but got {tuple(candidate_ids.shape)}")
    scale = scale_of(temperature, hidden)
    return _LinearHead.apply(
        hidden, weight, bias, targets, scale, candidate_ids, vocab_size, process_group, logits_dtype
    )


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A set of tokens and their per-token inputs. Vocabulary ids are relative to this rank's first row, so ids that
    belong to other ranks are negative or beyond this rank's last row.

    Attributes:
        targets: int64 [n].
        scale: float32 [n], 1 / temperature; None means 1.
        candidate_ids: int64 [n, K + 1]; None makes every token a candidate.
        all_candidates: bool [n], true where every token is a candidate.
    """

    targets: torch.Tensor
    scale: torch.Tensor | None
    candidate_ids: torch.Tensor | None
    all_candidates: torch.Tensor | None

    @classmethod
    def of(cls, targets, scale, candidate_ids, first_row: int) -> _Tokens:
        targets = targets - first_row
        if candidate_ids is None:
            return cls(targets, scale, None, None)
        listed = torch.cat((candidate_ids - first_row, targets[:, None]), 1)
        return cls(targets, scale, listed, (candidate_ids < 0).all(1))

    def split(self) -> Iterator[tuple[slice, _Tokens]]:
        """Yield the indices of the tokens for each tile, and these tokens."""
        size, _ = tile()
        for start in range(0, len(self.targets), size):
            part, optional = slice(start, start + size), (self.scale, self.candidate_ids, self.all_candidates)
            yield part, _Tokens(self.targets[part], *(None if x is None else x[part] for x in optional))

    def keeps(self, start: int, width: int) -> torch.Tensor | None:
        """Return the candidate mask for the tile at column `start`, bool [n, width]; None keeps all columns."""
        if self.candidate_ids is None or self.all_candidates is None:
            return None
        columns = self.candidate_ids - start
        columns = columns.where((columns >= 0) & (columns < width), width)  # column `width` is cut off below
        mask = columns.new_zeros(len(columns), width + 1, dtype=torch.bool)
        return mask.scatter_(1, columns, True)[:, :width] | self.all_candidates[:, None]


class _LinearHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, candidate_ids, vocab_size, process_group, logits_dtype):
        layer = OutputLayer(hidden, weight, bias, logits_dtype)
        first_row, num_rows = held_tokens(weight, vocab_size, process_group)
        tokens = _Tokens.of(targets, scale, candidate_ids, first_row)
        sums = new_sums(hidden)
        for span, part in tokens.split():
            _fold(part, layer.part(span, num_rows), sums[:, span])
        if is_sharded(process_group):
            reduce_sums(sums, process_group)
        maximum, total, total_d, target_z = sums
        log_sum_exp = maximum + total.log()
        entropy = total.log() - total_d / total
        token_fields = (getattr(tokens, field.name) for field in fields(tokens))
        ctx.save_for_backward(*token_fields, hidden, weight, bias, log_sum_exp, entropy)
        ctx.num_rows, ctx.logits_dtype = num_rows, logits_dtype
        return torch.stack((target_z - log_sum_exp, entropy), dim=-1)

    @staticmethod
    def backward(ctx, *grad_outputs):
        [gradient] = grad_outputs
        *token_fields, hidden, weight, bias, log_sum_exp, entropy = ctx.saved_tensors
        tokens = _Tokens(*token_fields)
        layer = OutputLayer(hidden, weight, bias, ctx.logits_dtype)
        gradients = Gradients(layer, ctx.needs_input_grad[:3])
        coefficients = head_coefficients(gradient, tokens.scale, entropy)
        for span, part in tokens.split():
            _add_gradients(
                span, part, layer.part(span, ctx.num_rows), log_sum_exp[span], coefficients[:, span], gradients
            )
        return *gradients.results(), *(None,) * 6


def tile_functions() -> ModuleType:
    if device.on_cuda():
        from megarl.ops import head_tile_triton

        return head_tile_triton
    return head_tile


def new_sums(hidden: torch.Tensor) -> torch.Tensor:
    """Return the initial running sums of `head_tile.fold`, float32 [4, N]."""
    sums = hidden.new_zeros(4, len(hidden), dtype=torch.float32)
    sums[0] = NEVER
    return sums


def _fold(tokens: _Tokens, layer: OutputLayer, sums: torch.Tensor) -> None:
    """Accumulate this rank's part of the vocabulary into the tokens' sums, float32 [4, n], in place."""
    _, num_columns = tile()
    fold = tile_functions().fold
    for start, logits in layer.tiles(num_columns):
        fold(logits, tokens.targets - start, tokens.scale, tokens.keeps(start, logits.shape[1]), sums)


def reduce_sums(sums: torch.Tensor, process_group: dist.ProcessGroup) -> None:
    """Combine the shards' sums in place: first the maximum, then the sums relative to it."""
    [rise] = raise_over_ranks(sums[:1], process_group)
    _, total, total_d, _ = sums
    rescale(rise, total, (total_d, rise))
    dist.all_reduce(sums[1:], group=process_group)


def head_coefficients(gradient: torch.Tensor, scale: torch.Tensor | None, entropy: torch.Tensor) -> torch.Tensor:
    """Return the coefficients a, b, c in the logits' gradient p · (a + b · log p) + c · 1[target], float32 [3, N], from
    the gradients of log-prob and entropy, [N, 2]."""
    grad_log_prob, grad_entropy = gradient.float().unbind(-1)
    coefficients = torch.stack((-grad_entropy * entropy - grad_log_prob, -grad_entropy, grad_log_prob))
    return coefficients if scale is None else coefficients * scale


def _add_gradients(
    span: slice,
    tokens: _Tokens,
    layer: OutputLayer,
    log_sum_exp: torch.Tensor,
    coefficients: torch.Tensor,
    gradients: Gradients,
) -> None:
    """Add the gradients from these tokens, whose indices are `span`."""
    _, num_columns = tile()
    to_gradient = tile_functions().to_gradient
    for start, logits in layer.tiles(num_columns):
        kept, gradient = tokens.keeps(start, logits.shape[1]), gradients.buffer(logits)
        to_gradient(logits, tokens.targets - start, tokens.scale, kept, log_sum_exp, coefficients, gradient)
        gradients.add(span, start, gradient)
