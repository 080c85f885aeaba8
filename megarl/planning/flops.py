"""Floating-point operations of training, as papers count them for the utilisation of a machine."""

from __future__ import annotations

from megarl.resharding.families.shape import ModelShape


def training_flops(shape: ModelShape, num_tokens: int, num_scored: int, num_attended: int) -> float:
    """Returns the operations of one forward and backward pass. A multiply-add counts 2; the backward pass takes twice
    the forward pass's; operations that are repeated to save memory do not count (PaLM, arXiv:2204.02311, appendix B).

    num_scored     rows that go through the language head
    num_attended   pairs of a query and a key that it sees: Σ n(n + 1) / 2 over documents of n tokens
    """
    attention = 2 * shape.hidden * (shape.query + shape.key)
    linear = shape.num_layers * (attention + 3 * shape.hidden * shape.active_intermediate)
    forward = (
        2 * linear * num_tokens
        + 2 * shape.vocab * shape.hidden * num_scored
        + 4 * shape.query * shape.num_layers * num_attended  # q·k, and its share of the value
    )
    return 3 * forward
