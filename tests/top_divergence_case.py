"""The results of `top_divergence` and of full logits for random inputs."""

from __future__ import annotations

import math
from typing import Any

import torch

from megarl.ops.divergence import DivergenceKind
from megarl.ops.linear_head import plain_log_prob_and_entropy
from megarl.ops.top_divergence import top_divergence
from megarl.ops.top_tokens import TopTokens, top_tokens
from tests.divergence_case import DivergenceCase, leaves_of, results_of


def tiled_tokens(case: DivergenceCase, k: int, process_group: Any = None) -> TopTokens:
    teacher = case.teacher
    return top_tokens(teacher.hidden, teacher.weight, k, case.temperature, case.vocab, process_group, teacher.bias)


def tiled(case: DivergenceCase, k: int, kind: DivergenceKind, beta: float, process_group: Any = None) -> dict:
    """Return the values and gradients of `top_divergence` for the tokens from `top_tokens`."""
    leaves = leaves_of(case.student)
    values = top_divergence(
        leaves["hidden"],
        leaves["weight"],
        TopTokens.unpacked(tiled_tokens(case, k, process_group).packed),
        kind,
        case.temperature,
        case.vocab,
        beta,
        process_group,
        leaves.get("bias"),
        targets=case.targets,
    )
    return results_of(values, case.gradient, leaves)


def plain_tokens(case: DivergenceCase, k: int) -> dict[str, torch.Tensor]:
    """Return the teacher's most probable tokens and their log-probs from full logits, in the default dtype. A rest
    without tokens has a log-prob of −100."""
    top, rest = _classes(_log_probs(case.to(torch.get_default_dtype()), "teacher"), None, k)
    return {"ids": top[0], "log_probs": top[1], "rest": rest.clamp(min=-100)}


def plain(case: DivergenceCase, k: int, kind: DivergenceKind, beta: float) -> dict[str, torch.Tensor]:
    """Return the values and gradients from full logits, computed in the default dtype."""
    case = case.to(torch.get_default_dtype())
    leaves = leaves_of(case.student)
    hidden, weight, bias = leaves["hidden"], leaves["weight"], leaves.get("bias")
    scores = plain_log_prob_and_entropy(hidden, weight, case.targets, case.temperature, case.vocab, bias)
    (ids, of_teacher), teacher_rest = _classes(_log_probs(case, "teacher"), None, k)
    (_, of_student), rest = _classes(_log_probs(case, "student", leaves), ids, k)
    log_p, log_q = (
        torch.cat((top, other[:, None]), 1) if k < case.vocab else top
        for top, other in ((of_student, rest), (of_teacher, teacher_rest))
    )
    return results_of(torch.stack((*scores, _by_definition(log_p, log_q, kind, beta)), -1), case.gradient, leaves)


def _log_probs(case: DivergenceCase, model: str, leaves: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    layer = getattr(case, model)
    tensors = leaves or {"hidden": layer.hidden, "weight": layer.weight, "bias": layer.bias}
    logits = torch.nn.functional.linear(tensors["hidden"], tensors["weight"], tensors.get("bias"))[:, : case.vocab]
    temperature = case.temperature
    return (logits / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)).log_softmax(-1)


def _classes(log_probs: torch.Tensor, ids: torch.Tensor | None, k: int):
    """Return the tokens with their log-probs, and the logarithm of the total probability of all others. Without ids,
    the tokens are the most probable ones."""
    if ids is None:
        ids = log_probs.topk(min(k, log_probs.shape[1])).indices
    others = log_probs.scatter(1, ids, -torch.inf)
    return (ids, log_probs.gather(1, ids)), others.logsumexp(-1)


def _by_definition(log_p: torch.Tensor, log_q: torch.Tensor, kind: DivergenceKind, beta: float) -> torch.Tensor:
    p, q = log_p.exp(), log_q.exp()
    if kind == "jsd" and beta in (0, 1):
        kind = "reverse_kl" if beta else "forward_kl"
    if kind == "forward_kl":
        return (q * (log_q - log_p)).sum(-1)
    if kind == "reverse_kl":
        return (p * (log_p - log_q)).sum(-1)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    return beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)
