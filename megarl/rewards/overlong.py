"""Soft overlong punishment: responses lose reward as they approach the maximum length."""

from __future__ import annotations


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """Return 0 up to max_tokens − buffer tokens, then decrease linearly to −1 at max_tokens. DAPO
    (https://arxiv.org/abs/2503.14476, eq. 13)."""
    return -min(max(num_tokens - (max_tokens - buffer), 0) / buffer, 1.0)
