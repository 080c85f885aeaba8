"""Soft over-long punishment: a response that comes near the longest possible one loses reward, the more the nearer."""

from __future__ import annotations


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """Returns 0 up to max_tokens − buffer tokens, and from there on a line down to −1 at max_tokens.

    DAPO (https://arxiv.org/abs/2503.14476, eq. 13).
    """
    return -min(max(num_tokens - (max_tokens - buffer), 0) / buffer, 1.0)
