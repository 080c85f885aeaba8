"""Divergences between a student's and a teacher's next-token distributions over the teacher's k most probable tokens
and the rest.

Let T be the k tokens with the largest probability under the teacher at a position. The classes of the divergence are
the tokens in T, and one class for all other tokens, with probability p_rest = 1 − Σ_{i∈T} p_i under the student and
q_rest = 1 − Σ_{i∈T} q_i under the teacher. p and q are normalized over the full vocabulary, not over T. The divergence
over these k + 1 classes is never negative and never exceeds the one over the full vocabulary. The two are equal if k is
the vocabulary size. A sum over T alone is not a divergence: it can be negative, and the student can lower it by
moving probability into T (forward KL) or out of T (reverse KL).

T comes from the teacher, as in SDFT (https://arxiv.org/abs/2601.19897) and TRL's server distillation. SDPO
(https://arxiv.org/abs/2601.20802) has the same class for the rest, but takes T from the student. The sampled token is
in T only if the teacher considers it likely.

With z, the student's logits after division by the temperature:

    ∂ log p_i / ∂z_j = 1[i = j] − p_j        ∂ log p_rest / ∂z_j = 1[j ∉ T] · p_j / p_rest − p_j

Logits are computed in the tiles of linear_head.py. Tokens in T are masked, so the sums run over the rest, and p_rest is
accurate even if T has almost all of the student's probability.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from megarl.algorithms.kl import DivergenceKind
from megarl.ops.divergence import divergence_of_log_probs
from megarl.ops.head_tile import NEVER, add_at, pick
from megarl.ops.linear_head import head_coefficients, new_sums, reduce_sums, tile_functions
from megarl.ops.output_layer import Gradients, OutputLayer, held_tokens, is_sharded, scale_of, tile
from megarl.ops.top_tokens import TopTokens

SMALLEST_LOG_PROB = -69.0
"""Lower bound for the log-prob of the rest, a probability of about 1e-30. Below it, 1 / p_rest could overflow, so the
rest has no gradient."""


def top_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: TopTokens,
    kind: DivergenceKind,
    temperature: float | torch.Tensor,
    vocab_size: int,
    beta: float = 0.5,
    process_group: dist.ProcessGroup | None = None,
    bias: torch.Tensor | None = None,
    logits_dtype: torch.dtype = torch.float32,
    targets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the divergence of each token, float32 [N]. With `targets`, return each target's log-prob, the entropy of
    the student's distribution over the full vocabulary, and the divergence, float32 [N, 3], without additional matrix
    products.

    Only the student has gradients; the teacher is constant. The other arguments are as in `divergence`.

    Args:
        teacher: the teacher's tokens at the same positions, with the same temperature. Tokens outside the student's
            vocabulary count as part of the rest.
    """
    if len(teacher.ids) != len(hidden):
        raise ValueError(f"expected the teacher's tokens at {len(hidden)} positions, but got {len(teacher.ids)}")
    teacher = teacher.within(vocab_size)
    scored = _ListedHead.apply(
        hidden,
        weight,
        bias,
        hidden.new_full(hidden.shape[:1], -1, dtype=torch.int64) if targets is None else targets,
        teacher.ids,
        scale_of(temperature, hidden),
        vocab_size,
        process_group,
        logits_dtype,
    )
    listed = scored[:, 2:-1].where(teacher.ids >= 0, NEVER)
    value = _over_classes(listed, scored[:, -1], teacher, kind, beta)
    return value if targets is None else torch.cat((scored[:, :2], value[:, None]), -1)


def _over_classes(
    log_probs: torch.Tensor, rest: torch.Tensor, teacher: TopTokens, kind: DivergenceKind, beta: float
) -> torch.Tensor:
    """Return the divergence over the tokens, whose log-probs are [N, k], and the rest, [N]."""
    log_p, log_q = (
        torch.cat((of_tokens, of_rest.clamp(min=SMALLEST_LOG_PROB)[:, None]), -1)
        for of_tokens, of_rest in ((log_probs, rest), (teacher.log_probs, teacher.rest))
    )
    return divergence_of_log_probs(log_p, log_q.detach(), kind, beta)


class _ListedHead(torch.autograd.Function):
    """Log-probs of targets, entropies, and the log-probs of k listed tokens and of all others, float32 [N, 2 + k + 1].
    Negative ids are padding, and the gradient of their columns must be zero."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, listed_ids, scale, vocab_size, process_group, logits_dtype):
        first_row, num_rows = held_tokens(weight, vocab_size, process_group)
        layer = OutputLayer(hidden, weight, bias, logits_dtype)
        is_listed, targets, listed_ids = listed_ids >= 0, targets - first_row, listed_ids - first_row
        sums, picked = new_sums(hidden), hidden.new_zeros(len(targets), listed_ids.shape[1] + 1, dtype=torch.float32)
        fold = tile_functions().fold
        for span, start, logits in _tiles(layer, num_rows):
            columns = torch.cat((listed_ids[span], targets[span, None]), 1) - start
            picked[span] += pick(logits, columns)
            _mask(logits, listed_ids[span] - start)
            fold(logits, targets[span] - start, None if scale is None else scale[span], None, sums[:, span])
        if is_sharded(process_group):
            reduce_sums(sums, process_group)
            dist.all_reduce(picked, group=process_group)
        maximum, total, total_d, _ = sums
        picked = picked if scale is None else picked * scale[:, None]
        listed_z, rest_z = picked[:, :-1].where(is_listed, NEVER), maximum + total.log()
        log_sum_exp = torch.logaddexp(listed_z.logsumexp(-1), rest_z)
        listed, rest = listed_z - log_sum_exp[:, None], rest_z - log_sum_exp
        shift = maximum - log_sum_exp
        entropy = -(listed.exp() * listed).sum(-1) - shift.exp() * (total_d + total * shift)
        ctx.save_for_backward(hidden, weight, bias, targets, listed_ids, scale, log_sum_exp, entropy, listed, rest)
        ctx.num_rows, ctx.logits_dtype = num_rows, logits_dtype
        return torch.cat((torch.stack((picked[:, -1] - log_sum_exp, entropy), -1), listed, rest[:, None]), -1)

    @staticmethod
    def backward(ctx, *grad_outputs):
        gradient = grad_outputs[0].float()
        hidden, weight, bias, targets, listed_ids, scale, log_sum_exp, entropy, listed, rest = ctx.saved_tensors
        layer = OutputLayer(hidden, weight, bias, ctx.logits_dtype)
        gradients = Gradients(layer, ctx.needs_input_grad[:3])
        of_classes = gradient[:, 2:] if scale is None else gradient[:, 2:] * scale[:, None]
        a, b, c = head_coefficients(gradient[:, :2], scale, entropy)
        a = a - of_classes.sum(-1)
        of_listed = of_classes[:, :-1] + listed.exp() * (a[:, None] + b[:, None] * listed)
        coefficients = torch.stack((a + of_classes[:, -1] / rest.clamp(min=SMALLEST_LOG_PROB).exp(), b, c))
        to_gradient = tile_functions().to_gradient
        for span, start, logits in _tiles(layer, ctx.num_rows):
            columns = listed_ids[span] - start
            _mask(logits, columns)
            part_scale = None if scale is None else scale[span]
            to_gradient(
                logits, targets[span] - start, part_scale, None, log_sum_exp[span], coefficients[:, span], logits
            )
            add_at(logits, columns, of_listed[span])
            rounded = gradients.buffer(logits)
            gradients.add(span, start, rounded if rounded is logits else rounded.copy_(logits))
        return *gradients.results(), *(None,) * 6


def _tiles(layer: OutputLayer, num_rows: int) -> Iterator[tuple[slice, int, torch.Tensor]]:
    """Yield each tile's tokens, its first row and its logits."""
    num_tokens, num_columns = tile()
    for first in range(0, len(layer.hidden), num_tokens):
        span = slice(first, first + num_tokens)
        for start, logits in layer.part(span, num_rows).tiles(num_columns):
            yield span, start, logits


def _mask(logits: torch.Tensor, columns: torch.Tensor) -> None:
    """Give these columns probability 0, in place. Columns outside the tile are ignored."""
    add_at(logits, columns, torch.full_like(columns, NEVER, dtype=logits.dtype))
