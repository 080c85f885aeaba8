"""Divergences between a student's and a teacher's next-token distributions over the full vocabulary, computed from the
hidden states and the vocabulary-sharded output weights of both models.

As in linear_head.py, logits are computed in tiles and never stored. With p for the student, q for the teacher, and
m = β·q + (1 − β)·p, the divergences, and their gradients with respect to the student's logits after division by the
temperature, are:

    forward_kl    KL(q ‖ p)                                 p − q
    reverse_kl    KL(p ‖ q)                                 p · (log(p / q) − KL(p ‖ q))
    jsd           β · KL(q ‖ m) + (1 − β) · KL(p ‖ m)       (1 − β) · p · (log(p / m) − KL(p ‖ m))

`jsd` is the generalized Jensen–Shannon divergence of GKD (Agarwal et al. 2024, https://arxiv.org/abs/2306.13649) with
its β. JSD / β tends to the forward KL as β → 0, and JSD / (1 − β) to the reverse KL as β → 1. At β = 0 and β = 1, where
the formula gives 0, `jsd` returns these limits, as TRL does. It is discontinuous there: for β near 0 or 1, `jsd` itself
is near 0, because it is not divided by β or 1 − β.

The KL divergences need two matrix products in the forward pass. Their sums are relative to both models' running maxima,
so one pass over the vocabulary suffices. `jsd` needs both log-sum-exps first, so it makes a second pass. The backward
pass recomputes both tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import get_args

import torch
import torch.distributed as dist

from megarl.algorithms.kl import DivergenceKind
from megarl.core import device
from megarl.ops import divergence_tile
from megarl.ops.divergence_tile import rebase
from megarl.ops.head_tile import NEVER
from megarl.ops.linear_head import head_coefficients, plain_logits
from megarl.ops.output_layer import (
    Gradients,
    OutputLayer,
    held_tokens,
    is_sharded,
    raise_over_ranks,
    scale_of,
    tile,
)


def plain_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: OutputLayer,
    kind: DivergenceKind,
    temperature: float | torch.Tensor,
    vocab_size: int,
    beta: float = 0.5,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the divergence of each token, [N], from both models' full logits [N, V] for unsharded weights. This is the
    plain reference for `divergence`."""
    log_p = plain_logits(hidden, weight, bias, temperature, vocab_size).log_softmax(-1)
    teacher_logits = plain_logits(teacher.hidden, teacher.weight, teacher.bias, temperature, vocab_size)
    log_q = teacher_logits.log_softmax(-1).detach()
    return divergence_of_log_probs(log_p, log_q, kind, beta)


def divergence_of_log_probs(
    log_p: torch.Tensor, log_q: torch.Tensor, kind: DivergenceKind, beta: float = 0.5
) -> torch.Tensor:
    """Return the divergence of each row, [N], between the student's and the teacher's distributions over C classes,
    given as log-probs, [N, C] each. Classes with probability 0 must have finite log-probs, such as NEVER."""
    kind = _at_limits(kind, beta)
    if kind == "forward_kl":
        return _plain_kl(log_q, log_p)
    if kind == "reverse_kl":
        return _plain_kl(log_p, log_q)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    return beta * _plain_kl(log_q, log_m) + (1 - beta) * _plain_kl(log_p, log_m)


def divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: OutputLayer,
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
    the student's distribution, and the divergence, float32 [N, 3], without additional matrix products.

    Only the student has gradients; the teacher is constant. `hidden`, `weight`, `process_group`, `bias`, `logits_dtype`
    and `targets` describe the student as in `log_prob_and_entropy`, whose candidate tokens are not supported here.

    Args:
        teacher: the teacher's hidden states for the same tokens, and this rank's rows of its output weight, for the
            same part of the vocabulary. The hidden size may differ from the student's. Unsharded weights may have
            different numbers of padding rows.
        kind: forward_kl | reverse_kl | jsd.
        temperature: divisor of both models' logits, a float, or float32 [N] with one temperature per token.
        vocab_size: number of token rows in both unsharded weights. Rows beyond it are padding with probability 0.
        beta: weight of the teacher in the mixture, from 0 to 1. Has no effect unless the kind is jsd.
    """
    shapes = [tuple(x.shape) for x in (hidden, weight, teacher.hidden, teacher.weight)]
    if {len(shape) for shape in shapes} != {2} or hidden.shape[0] != teacher.hidden.shape[0]:
        raise ValueError(f"expected [N, h], [V, h], [N, h'] and [V, h'] for student and teacher, but got {shapes}")
    _, num_rows = held_tokens(weight, vocab_size, process_group)
    is_aligned = not is_sharded(process_group) or len(weight) == len(teacher.weight)
    if not is_aligned or len(teacher.weight) < num_rows:
        raise ValueError(
            f"the student's shard has {len(weight)} rows, {num_rows} of them for tokens, but the teacher's has "
            f"{len(teacher.weight)}"
        )
    if not 0 <= beta <= 1:
        raise ValueError(f"expected beta from 0 to 1, but got {beta}")
    result = _Divergence.apply(
        hidden,
        weight,
        bias,
        teacher,
        hidden.new_full(hidden.shape[:1], -1, dtype=torch.int64) if targets is None else targets,
        scale_of(temperature, hidden),
        _at_limits(kind, beta),
        beta,
        vocab_size,
        process_group,
        logits_dtype,
    )
    return result[:, 2] if targets is None else result


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        teacher: OutputLayer,
        targets,
        scale,
        kind: DivergenceKind,
        beta: float,
        vocab_size: int,
        process_group,
        logits_dtype,
    ):
        first_row, num_rows = held_tokens(weight, vocab_size, process_group)
        layers = OutputLayer(hidden, weight, bias, logits_dtype), teacher
        targets = targets - first_row
        sums = _sums(layers, num_rows, targets, scale)
        if is_sharded(process_group):
            rises = raise_over_ranks(sums[:2], process_group)
            rebase(*rises, *sums[2:7])
            dist.all_reduce(sums[2:], group=process_group)
        maximum, teacher_maximum, total, total_d, total_gap, teacher_total, teacher_total_gap, target_z = sums
        log_total, teacher_log_total = total.log(), teacher_total.log()
        normalizers = torch.stack((maximum, teacher_maximum, log_total, teacher_log_total))
        entropy = log_total - total_d / total
        log_ratio = teacher_log_total - log_total
        student_kl = total_gap / total + log_ratio
        value = student_kl
        if kind == "forward_kl":
            value = -teacher_total_gap / teacher_total - log_ratio
        elif kind == "jsd":
            kls = _mixture_kls(layers, num_rows, scale, normalizers, beta)
            if is_sharded(process_group):
                dist.all_reduce(kls, group=process_group)
            student_kl, teacher_kl = kls
            value = beta * teacher_kl + (1 - beta) * student_kl
        ctx.save_for_backward(
            *(x for layer in layers for x in (layer.hidden, layer.weight, layer.bias)),
            targets,
            scale,
            normalizers,
            entropy,
            student_kl,
        )
        ctx.kind, ctx.beta, ctx.num_rows = kind, beta, num_rows
        ctx.logits_dtypes = [layer.logits_dtype for layer in layers]
        return torch.stack((target_z - maximum - log_total, entropy, value), dim=-1)

    @staticmethod
    def backward(ctx, *grad_outputs):
        [gradient] = grad_outputs
        *tensors, targets, scale, normalizers, entropy, student_kl = ctx.saved_tensors
        student_dtype, teacher_dtype = ctx.logits_dtypes
        student = OutputLayer(*tensors[:3], logits_dtype=student_dtype)
        layers = student, OutputLayer(*tensors[3:], logits_dtype=teacher_dtype)
        gradients = Gradients(student, ctx.needs_input_grad[:3])
        coefficients = _coefficients(gradient, scale, entropy, student_kl, ctx.kind, ctx.beta)
        beta = ctx.beta if ctx.kind == "jsd" else None
        to_gradient = _tile_functions().to_gradient
        for span, start, logits, teacher_logits in _tiles(layers, ctx.num_rows):
            logits_gradient = gradients.buffer(logits)
            to_gradient(
                logits,
                teacher_logits,
                targets[span] - start,
                _part(scale, span),
                normalizers[:, span],
                coefficients[:, span],
                beta,
                logits_gradient,
            )
            gradients.add(span, start, logits_gradient)
        return *gradients.results(), *(None,) * 8


def _tile_functions() -> ModuleType:
    if device.on_cuda():
        from megarl.ops import divergence_tile_triton

        return divergence_tile_triton
    return divergence_tile


def _sums(layers: tuple[OutputLayer, OutputLayer], num_rows: int, targets, scale) -> torch.Tensor:
    """Return the sums of `divergence_tile.fold` over this rank's part of the vocabulary, float32 [8, N]."""
    sums = layers[0].hidden.new_zeros(8, len(targets), dtype=torch.float32)
    sums[:2] = NEVER
    fold = _tile_functions().fold
    for span, start, logits, teacher_logits in _tiles(layers, num_rows):
        fold(logits, teacher_logits, targets[span] - start, _part(scale, span), sums[:, span])
    return sums


def _mixture_kls(
    layers: tuple[OutputLayer, OutputLayer], num_rows: int, scale, normalizers: torch.Tensor, beta: float
) -> torch.Tensor:
    """Return this rank's part of the student's and the teacher's KL divergence from the mixture, float32 [2, N]."""
    kls = torch.zeros_like(normalizers[:2])
    fold_mixture = _tile_functions().fold_mixture
    for span, _, logits, teacher_logits in _tiles(layers, num_rows):
        fold_mixture(logits, teacher_logits, _part(scale, span), normalizers[:, span], beta, kls[:, span])
    return kls


def _coefficients(
    gradient: torch.Tensor,
    scale: torch.Tensor | None,
    entropy: torch.Tensor,
    student_kl: torch.Tensor,
    kind: DivergenceKind,
    beta: float,
) -> torch.Tensor:
    """Return the coefficients of `divergence_tile.to_gradient`, float32 [5, N], from the output's gradient [N, 3].

    `student_kl` is the student's KL divergence from the teacher, or from the mixture for jsd.
    """
    of_value = gradient[:, 2].float() * (1 - beta if kind == "jsd" else 1)
    of_value = of_value if scale is None else of_value * scale
    coefficients = of_value.new_zeros(5, len(of_value))
    coefficients[:3] = head_coefficients(gradient[:, :2], scale, entropy)
    if kind == "forward_kl":
        coefficients[0] += of_value
        coefficients[4] = -of_value
    else:
        coefficients[0] -= of_value * student_kl
        coefficients[3] = of_value
    return coefficients


def _tiles(
    layers: tuple[OutputLayer, OutputLayer], num_rows: int
) -> Iterator[tuple[slice, int, torch.Tensor, torch.Tensor]]:
    """Yield each tile's tokens, its first row, and the student's and the teacher's logits. Both tiles are half as wide
    as a tile of the linear head, so together they use the same memory."""
    num_tokens, num_columns = tile()
    for first in range(0, len(layers[0].hidden), num_tokens):
        span = slice(first, first + num_tokens)
        student, teacher = (layer.part(span, num_rows).tiles(num_columns // 2) for layer in layers)
        for (start, logits), (_, teacher_logits) in zip(student, teacher, strict=True):
            yield span, start, logits, teacher_logits


def _part(scale: torch.Tensor | None, tokens: slice) -> torch.Tensor | None:
    return None if scale is None else scale[tokens]


def _at_limits(kind: DivergenceKind, beta: float) -> DivergenceKind:
    """Return the kind to compute: jsd with beta 0 or 1 becomes the corresponding KL divergence."""
    assert kind in get_args(DivergenceKind), kind
    limits: dict[float, DivergenceKind] = {0: "forward_kl", 1: "reverse_kl"}
    return limits.get(beta, kind) if kind == "jsd" else kind


def _plain_kl(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """Return KL(a ‖ b) for each row."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)
