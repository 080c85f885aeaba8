"""Floating-point operations of training, counted as papers count them for model FLOPs utilization."""

from __future__ import annotations

from megarl.models.shape import ModelShape


def training_flops(shape: ModelShape, num_tokens: int, num_scored: int, num_attended: int) -> float:
    """Return the operations of one forward and backward pass. The arguments are those of `forward_flops`.

    The backward pass takes twice as many operations as the forward pass. Recomputation does not count (PaLM,
    arXiv:2204.02311, appendix B).
    """
    return 3 * forward_flops(shape, num_tokens, num_scored, num_attended)


def forward_flops(shape: ModelShape, num_tokens: float, num_scored: float, num_attended: float) -> float:
    """Return the operations of one forward pass. A multiply-add counts as 2.

    Args:
        num_scored: rows that go through the language head.
        num_attended: pairs of a query and a key that it attends to: Σ n(n + 1) / 2 over documents of n tokens.
    """
    linear = shape.num_layers * (attention_weights(shape) + 3 * shape.hidden * shape.active_intermediate)
    return (
        2 * linear * num_tokens
        + 2 * shape.vocab * shape.hidden * num_scored
        + 2 * (shape.query + shape.value) * shape.num_layers * num_attended  # q·k, and the weighted values
    )


def expert_flops(shape: ModelShape, num_tokens: float) -> float:
    """Return the operations of a forward pass in routed experts."""
    if shape.experts is None:
        return 0.0
    rows = shape.experts.active * shape.experts.intermediate * sum(shape.experts.layers)
    return 2 * 3 * shape.hidden * rows * num_tokens


def attention_weights(shape: ModelShape) -> int:
    """Return the number of weights in a layer's attention projections.

    These are query, key, value and output; latent attention has down- and up-projections of its latents instead.
    """
    latent, output = shape.latent, shape.value * shape.hidden
    if latent is None:
        return shape.hidden * (shape.query + 2 * shape.key) + output
    rank = latent.query_rank
    query = shape.hidden * shape.query if rank is None else rank * (shape.hidden + shape.query)
    return query + shape.hidden * shape.latent_and_position + latent.kv_rank * shape.latent_keys_and_values + output
