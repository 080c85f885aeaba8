"""Floating-point operations of training, as papers count them for the utilisation of a machine."""

from __future__ import annotations

from megarl.models.shape import ModelShape


def training_flops(shape: ModelShape, num_tokens: int, num_scored: int, num_attended: int) -> float:
    """Return the operations of one forward and backward pass. The backward pass takes twice the forward pass's;
    operations that are repeated to save memory do not count (PaLM, arXiv:2204.02311, appendix B). The arguments are
    those of `forward_flops`."""
    return 3 * forward_flops(shape, num_tokens, num_scored, num_attended)


def forward_flops(shape: ModelShape, num_tokens: float, num_scored: float, num_attended: float) -> float:
    """Return the operations of one forward pass. A multiply-add counts 2.

    num_scored     rows that go through the language head
    num_attended   pairs of a query and a key that it sees: Σ n(n + 1) / 2 over documents of n tokens
    """
    linear = shape.num_layers * (attention_weights(shape) + 3 * shape.hidden * shape.active_intermediate)
    return (
        2 * linear * num_tokens
        + 2 * shape.vocab * shape.hidden * num_scored
        + 2 * (shape.query + shape.value) * shape.num_layers * num_attended  # q·k, and its share of the value
    )


def expert_flops(shape: ModelShape, num_tokens: float) -> float:
    """Return those of a forward pass that are in routed experts."""
    if shape.experts is None:
        return 0.0
    rows = shape.experts.active * shape.experts.intermediate * sum(shape.experts.layers)
    return 2 * 3 * shape.hidden * rows * num_tokens


def attention_weights(shape: ModelShape) -> int:
    """Return the weights of a layer's linear projections in attention: of query and output, key and value; in latent
    attention down to the latents and up from them."""
    latent, output = shape.latent, shape.value * shape.hidden
    if latent is None:
        return shape.hidden * (shape.query + 2 * shape.key) + output
    rank = latent.query_rank
    query = shape.hidden * shape.query if rank is None else rank * (shape.hidden + shape.query)
    return query + shape.hidden * shape.latent_and_position + latent.kv_rank * shape.latent_keys_and_values + output
