"""Log-prob and entropy of sampled tokens straight from hidden states and a vocabulary-sharded output weight.

Logits are formed in tiles of tokens × vocabulary and never kept: the forward pass folds each tile into a running
log-sum-exp, the backward pass forms the tile again. With z the logits, L = log Σ exp z, p = exp(z − L), H the entropy:

    log-prob  = z[y] − L                  ∂ log-prob / ∂z = 1[y] − p
    H         = L − Σ p·z                 ∂ H / ∂z        = −p · (log p + H)
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.planning.memory import TILE

TOKENS_PER_TILE, VOCABULARY_PER_TILE = TILE


def plain_log_prob_and_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin: the same from full logits [N, V] of the unsharded weight, by torch's own log-softmax."""
    logits = (hidden @ weight[:vocab_size].t()).float() / temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(1, targets[:, None])[:, 0], entropy


def log_prob_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Log-prob of `targets` and entropy of the distribution that they come from, at a temperature.

    hidden       [N, h]; the same on every rank of `group`. Its gradient is this shard's part: the caller reduces it.
    weight       [V / tp, h]: this rank's rows of the output weight. Where it has a `main_grad` buffer (Megatron's
                 gradient accumulation), the gradient is added there and marked by `grad_added_to_main_grad`.
    targets      int64 [N], in the whole vocabulary
    vocab_size   rows of the unsharded weight that are tokens; those above are padding, with probability 0
    group        the tensor-parallel ranks that hold the other shards, in order
    returns      float32 [N, 2]: log-prob, entropy
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"expected hidden [N, h], weight [V, h], targets [N]; got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)}, {tuple(targets.shape)}"
        )
    return _LinearHead.apply(hidden, weight, targets, temperature, vocab_size, group)


class _LinearHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, vocab_size, group):
        first_row = dist.get_rank(group) * weight.shape[0] if _sharded(group) else 0
        num_rows = max(0, min(weight.shape[0], vocab_size - first_row))
        local_targets = targets - first_row
        parts = [
            _forward_tokens(h, weight[:num_rows], y, temperature, group)
            for h, y in zip(hidden.split(TOKENS_PER_TILE), local_targets.split(TOKENS_PER_TILE), strict=True)
        ]
        log_prob, entropy, log_sum_exp = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, local_targets, log_sum_exp, entropy)
        ctx.temperature, ctx.num_rows = temperature, num_rows
        return torch.stack((log_prob, entropy), dim=-1)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, local_targets, log_sum_exp, entropy = ctx.saved_tensors
        trained, into_main_grad = ctx.needs_input_grad[1], getattr(weight, "main_grad", None) is not None
        weight_grad = None
        if trained:
            weight_grad = weight.main_grad if into_main_grad else torch.zeros_like(weight, dtype=torch.float32)
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
        columns = (hidden, local_targets, log_sum_exp, entropy, gradient[:, 0], gradient[:, 1], hidden_grad)
        for tile in zip(*(column.split(TOKENS_PER_TILE) for column in columns), strict=True):
            _backward_tokens(*tile, weight[: ctx.num_rows], weight_grad, ctx.temperature)
        returned = None
        if trained:
            returned = _autograd_dummy(weight) if into_main_grad else weight_grad.to(weight.dtype)
        return hidden_grad.to(hidden.dtype), returned, None, None, None, None


def _sharded(group: dist.ProcessGroup | None) -> bool:
    return group is not None and dist.get_world_size(group) > 1


def _autograd_dummy(weight: torch.Tensor) -> torch.Tensor | None:
    """What autograd gets where the gradient already is in main_grad, so that DDP's hook is called and reads nothing.

    Under zero_out_wgrad it reads all the same: the weight is the embedding's too, whose gradient calls the hook.
    """
    weight.grad_added_to_main_grad = True
    return None if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _forward_tokens(hidden, weight, targets, temperature, group):
    """hidden [n, h], targets [n] relative to this shard. Returns log-prob, entropy, log-sum-exp, each float32 [n]."""
    n = hidden.shape[0]
    maximum = hidden.new_full((n,), -torch.inf, dtype=torch.float32)
    total, total_z, target_z = (hidden.new_zeros(n, dtype=torch.float32) for _ in range(3))
    for start in range(0, weight.shape[0], VOCABULARY_PER_TILE):
        z = _logits(hidden, weight[start : start + VOCABULARY_PER_TILE], temperature)
        raised = torch.maximum(maximum, z.amax(1))
        scale = (maximum - raised).exp()
        exponent = (z - raised[:, None]).exp_()
        total = total * scale + exponent.sum(1)
        total_z = total_z * scale + exponent.mul_(z).sum(1)
        target_z += _pick(z, targets - start)
        maximum = raised
    if _sharded(group):
        maximum, total, total_z, target_z = _reduce(maximum, total, total_z, target_z, group)
    log_sum_exp = maximum + total.log()
    return target_z - log_sum_exp, log_sum_exp - total_z / total, log_sum_exp


def _reduce(maximum, total, total_z, target_z, group):
    """Combines the running sums of the shards: first the maximum, then the sums relative to it."""
    raised = maximum.clone()
    dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=group)
    scale = (maximum - raised).exp()
    sums = torch.stack((total * scale, total_z * scale, target_z))
    dist.all_reduce(sums, group=group)
    return raised, *sums


def _backward_tokens(
    hidden, targets, log_sum_exp, entropy, grad_log_prob, grad_entropy, hidden_grad, weight, weight_grad, temperature
):
    """Adds the tile row's part to hidden_grad [n, h] and weight_grad [≥ v, h] (None: not trained), in place."""
    for start in range(0, weight.shape[0], VOCABULARY_PER_TILE):
        rows = weight[start : start + VOCABULARY_PER_TILE]
        log_p = _logits(hidden, rows, temperature).sub_(log_sum_exp[:, None])
        grad_z = log_p.exp()
        grad_z *= log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_log_prob[:, None])
        _add_at(grad_z, targets - start, grad_log_prob)
        grad_z = grad_z.div_(temperature).to(hidden.dtype)
        hidden_grad += grad_z @ rows
        if weight_grad is not None:
            weight_grad[start : start + len(rows)] += grad_z.t() @ hidden


def _logits(hidden, weight, temperature):
    logits = (hidden @ weight.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _inside(columns, width):
    return (columns >= 0) & (columns < width)


def _pick(z, columns):
    """z[i, columns[i]] where that column is in this tile, else 0."""
    inside = _inside(columns, z.shape[1])
    picked = z.gather(1, columns.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    return torch.where(inside, picked, torch.zeros_like(picked))


def _add_at(grad_z, columns, values):
    """grad_z[i, columns[i]] += values[i] where that column is in this tile."""
    inside = _inside(columns, grad_z.shape[1])
    grad_z.scatter_add_(1, columns.clamp(0, grad_z.shape[1] - 1)[:, None], (values * inside)[:, None])
