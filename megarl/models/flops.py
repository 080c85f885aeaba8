"""Count the floating-point operations for training, following the convention for model FLOPs utilization (MFU)."""

from __future__ import annotations

from megarl.models.shape import ModelShape


def training_flops(shape: ModelShape, num_tokens: int, num_scored: int, num_attended: int) -> float:
    """Return the number of operations for one forward and backward pass. See `forward_flops` for the arguments. The
    backward pass takes twice as many operations as the forward pass. Recomputation is not counted (PaLM,
    arXiv:2204.02311, appendix B)."""
    return 3 * forward_flops(shape, num_tokens, num_scored, num_attended)


def forward_flops(shape: ModelShape, num_tokens: float, num_scored: float, num_attended: float) -> float:
    """Return the number of operations for one forward pass. A multiply-add counts as two operations.

    Args:
        num_tokens: number of tokens that the model processes.
        num_scored: number of rows that go through the language head.
        num_attended: number of (query, key) pairs in attention: Σ n(n + 1) / 2 over documents with n tokens.
    """
    linear = shape.num_layers * (attention_weights(shape) + 3 * shape.hidden * shape.active_intermediate)
    return (
        2 * linear * num_tokens
        + 2 * shape.vocab * shape.hidden * num_scored
        + 2 * (shape.query + shape.value) * shape.num_layers * num_attended  # q·k, and the weighted sum of the values
    )


def expert_flops(shape: ModelShape, num_tokens: float) -> float:
    """Return the number of operations in routed experts for one forward pass."""
    if shape.experts is None:
        return 0.0
    rows = shape.experts.active * shape.experts.intermediate * sum(shape.experts.layers)
    return 2 * 3 * shape.hidden * rows * num_tokens


def attention_weights(shape: ModelShape) -> int:
    """Return the number of weights in a layer's attention projections. These are the query, key, value and output
    projections. Latent attention has down- and up-projections for its latents instead."""
    latent, output = shape.latent, shape.value * shape.hidden
    if latent is None:
        return shape.hidden * (shape.query + 2 * shape.key) + output
    rank = latent.query_rank
    query = shape.hidden * shape.query if rank is None else rank * (shape.hidden + shape.query)
    return query + shape.hidden * shape.latent_and_position + latent.kv_rank * shape.latent_keys_and_values + output
