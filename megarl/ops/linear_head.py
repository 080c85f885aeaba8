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
from megarl.ops.head_tile import NEVER
from megarl.ops.products import add_product, put_product
from megarl.ops.tile import TILE

CPU_TILE = (1024, 4096)
"""Size of a tile on CPU, (tokens, vocabulary entries). CPU caches favor smaller tiles than GPU matrix products do."""


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
    logits = F.linear(hidden, weight, bias)[:, :vocab_size].float()
    logits = logits / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)
    if candidate_ids is not None:
        listed = F.one_hot(torch.cat((candidate_ids, targets[:, None]), 1) + 1, vocab_size + 1).sum(1)[:, 1:] > 0
        logits = logits.where(listed | (candidate_ids < 0).all(1, keepdim=True), -torch.inf)
    log_probs = torch.log_softmax(logits, dim=-1)
    entropy = -(log_probs.exp() * log_probs.where(log_probs > -torch.inf, 0)).sum(-1)
    return log_probs.gather(1, targets[:, None])[:, 0], entropy


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
        logits_dtype: float32, or a narrower dtype to which logits are rounded before the temperature is applied, as
            if the matrix product returned that dtype. The gradient ignores the rounding.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"expected hidden [N, h], weight [V, h] and targets [N], but got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)} and {tuple(targets.shape)}"
        )
    if candidate_ids is not None and (candidate_ids.dim() != 2 or candidate_ids.shape[0] != len(targets)):
        raise ValueError(f"expected candidate_ids [{len(targets)}, K], but got {tuple(candidate_ids.shape)}")
    scale = None
    if isinstance(temperature, torch.Tensor) or temperature != 1:
        scale = 1 / torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(len(targets))
    return _LinearHead.apply(
        hidden, weight, bias, targets, scale, candidate_ids, vocab_size, process_group, logits_dtype
    )


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A set of tokens and their per-token inputs. Vocabulary ids are relative to this rank's first row, so ids that
    belong to other ranks are negative or beyond this rank's last row.

    Attributes:
        hidden: [n, h].
        targets: int64 [n].
        scale: float32 [n], 1 / temperature; None means 1.
        candidate_ids: int64 [n, K + 1]; None makes every token a candidate.
        all_candidates: bool [n], true where every token is a candidate.
    """

    hidden: torch.Tensor
    targets: torch.Tensor
    scale: torch.Tensor | None
    candidate_ids: torch.Tensor | None
    all_candidates: torch.Tensor | None

    @classmethod
    def of(cls, hidden, targets, scale, candidate_ids, first_row: int) -> _Tokens:
        targets = targets - first_row
        if candidate_ids is None:
            return cls(hidden, targets, scale, None, None)
        return cls(
            hidden,
            targets,
            scale,
            torch.cat((candidate_ids - first_row, targets[:, None]), 1),
            (candidate_ids < 0).all(1),
        )

    def split(self) -> Iterator[_Tokens]:
        """Yield the tokens for each tile."""
        size, _ = _tile()
        for start in range(0, len(self.targets), size):
            part, optional = slice(start, start + size), (self.scale, self.candidate_ids, self.all_candidates)
            yield _Tokens(self.hidden[part], self.targets[part], *(None if x is None else x[part] for x in optional))

    def keeps(self, start: int, width: int) -> torch.Tensor | None:
        """Return the candidate mask, bool [n, width], for the tile at column `start`; None for all candidates."""
        if self.candidate_ids is None or self.all_candidates is None:
            return None
        columns = self.candidate_ids - start
        columns = columns.where((columns >= 0) & (columns < width), width)  # column `width` is cut off below
        mask = columns.new_zeros(len(columns), width + 1, dtype=torch.bool)
        return mask.scatter_(1, columns, True)[:, :width] | self.all_candidates[:, None]


class _LinearHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, candidate_ids, vocab_size, process_group, logits_dtype):
        first_row = dist.get_rank(process_group) * weight.shape[0] if _sharded(process_group) else 0
        num_rows = max(0, min(weight.shape[0], vocab_size - first_row))
        tokens = _Tokens.of(hidden, targets, scale, candidate_ids, first_row)
        sums = hidden.new_zeros(4, len(targets), dtype=torch.float32)
        sums[0] = NEVER
        num_tokens, _ = _tile()
        for part, part_sums in zip(tokens.split(), sums.split(num_tokens, 1), strict=False):
            _fold(part, weight[:num_rows], bias, logits_dtype, part_sums)
        if _sharded(process_group):
            _reduce(sums, process_group)
        maximum, total, total_d, target_z = sums
        log_sum_exp = maximum + total.log()
        entropy = total.log() - total_d / total
        token_fields = (getattr(tokens, field.name) for field in fields(tokens))
        ctx.save_for_backward(*token_fields, weight, bias, log_sum_exp, entropy)
        ctx.num_rows, ctx.logits_dtype = num_rows, logits_dtype
        return torch.stack((target_z - log_sum_exp, entropy), dim=-1)

    @staticmethod
    def backward(ctx, *grad_outputs):
        [gradient] = grad_outputs
        *token_fields, weight, bias, log_sum_exp, entropy = ctx.saved_tensors
        tokens = _Tokens(*token_fields)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.zeros_like(tokens.hidden, dtype=torch.float32) if needs_hidden else None
        into_main_grad = getattr(weight, "main_grad", None) is not None
        weight_grad = bias_grad = None
        if needs_weight:
            weight_grad = weight.main_grad if into_main_grad else torch.zeros_like(weight, dtype=torch.float32)
        if needs_bias:
            bias_grad = torch.zeros_like(bias, dtype=torch.float32)
        coefficients = _coefficients(gradient, tokens.scale, entropy)
        num_tokens, _ = _tile()
        for number, part in enumerate(tokens.split()):
            span = slice(number * num_tokens, (number + 1) * num_tokens)
            _add_gradients(
                part,
                weight[: ctx.num_rows],
                bias,
                ctx.logits_dtype,
                log_sum_exp[span],
                coefficients[:, span],
                None if hidden_grad is None else hidden_grad[span],
                weight_grad,
                bias_grad,
            )
        if weight_grad is not None:
            weight_grad = _autograd_dummy(weight) if into_main_grad else weight_grad.to(weight.dtype)
        return (
            None if hidden_grad is None else hidden_grad.to(tokens.hidden.dtype),
            weight_grad,
            None if bias_grad is None else bias_grad.to(bias.dtype),
            *(None,) * 6,
        )


def _sharded(process_group: dist.ProcessGroup | None) -> bool:
    return process_group is not None and dist.get_world_size(process_group) > 1


def _tile() -> tuple[int, int]:
    return TILE if device.on_cuda() else CPU_TILE


def _tile_functions() -> ModuleType:
    if device.on_cuda():
        from megarl.ops import head_tile_triton

        return head_tile_triton
    return head_tile


def _autograd_dummy(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the weight gradient for autograd when the actual gradient is already in main_grad: a tensor that triggers
    DDP's hook, which ignores the tensor's values.

    Returns None under zero_out_wgrad. In that case the weight is tied to the embedding, whose gradient triggers the
    hook, and the values of the dummy would be read.
    """
    weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]  # DDP's hook reads it
    return None if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _fold(
    tokens: _Tokens, weight: torch.Tensor, bias: torch.Tensor | None, logits_dtype: torch.dtype, sums: torch.Tensor
) -> None:
    """Accumulate this rank's part of the vocabulary into the tokens' sums, float32 [4, n], in place."""
    fold = _tile_functions().fold
    for start, rows, logits in _tiles(tokens, weight, bias, logits_dtype):
        fold(logits, tokens.targets - start, tokens.scale, tokens.keeps(start, len(rows)), sums)


def _reduce(sums: torch.Tensor, process_group: dist.ProcessGroup) -> None:
    """Combine the shards' sums in place: first the maximum, then the sums relative to it."""
    maximum, total, total_d, _ = sums
    raised = maximum.clone()
    dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=process_group)
    shrunk, rise = (maximum - raised).exp(), raised - maximum
    total_d.sub_(rise * total).mul_(shrunk)
    total.mul_(shrunk)
    maximum.copy_(raised)
    dist.all_reduce(sums[1:], group=process_group)


def _coefficients(gradient: torch.Tensor, scale: torch.Tensor | None, entropy: torch.Tensor) -> torch.Tensor:
    """Return the coefficients a, b, c in the logits' gradient p · (a + b · log p) + c · 1[target], float32 [3, N], from
    the output's gradient [N, 2]."""
    grad_log_prob, grad_entropy = gradient.float().unbind(-1)
    coefficients = torch.stack((-grad_entropy * entropy - grad_log_prob, -grad_entropy, grad_log_prob))
    return coefficients if scale is None else coefficients * scale


def _add_gradients(
    tokens, weight, bias, logits_dtype, log_sum_exp, coefficients, hidden_grad, weight_grad, bias_grad
) -> None:
    """Add the tokens' contribution to each requested gradient, in place: hidden_grad float32 [n, h], weight_grad
    float32 [≥ v, h], bias_grad float32 [≥ v]."""
    to_gradient = _tile_functions().to_gradient
    for start, rows, logits in _tiles(tokens, weight, bias, logits_dtype):
        span = slice(start, start + len(rows))
        candidate_ids = tokens.keeps(start, len(rows))
        # The matrix products below require both factors in the same dtype.
        gradient = logits if rows.dtype is logits.dtype else torch.empty_like(logits, dtype=rows.dtype)
        to_gradient(logits, tokens.targets - start, tokens.scale, candidate_ids, log_sum_exp, coefficients, gradient)
        if hidden_grad is not None:
            add_product(hidden_grad, gradient, rows)
        if weight_grad is not None:
            add_product(weight_grad[span], gradient.t(), tokens.hidden)
        if bias_grad is not None:
            bias_grad[span] += gradient.sum(0, dtype=torch.float32)


def _tiles(
    tokens: _Tokens, weight: torch.Tensor, bias: torch.Tensor | None, logits_dtype: torch.dtype
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield each tile's first row index, its weight rows, and its logits, float32 [n, v], not divided by the
    temperature.

    All tiles share one logits buffer. With logits_dtype=bfloat16, representable values near 20 are 0.125 apart.
    """
    _, size = _tile()
    num_elements = len(tokens.targets) * min(size, len(weight))
    buffer = tokens.hidden.new_empty(num_elements, dtype=torch.float32)
    for start in range(0, len(weight), size):
        rows = weight[start : start + size]
        logits = buffer[: len(tokens.targets) * len(rows)].view(-1, len(rows))
        put_product(logits, tokens.hidden, rows.t())
        if bias is not None:
            logits += bias[start : start + len(rows)]
        if logits_dtype is not logits.dtype:
            logits.copy_(logits.to(logits_dtype))
        yield start, rows, logits
