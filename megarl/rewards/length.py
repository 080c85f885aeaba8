"""Rewards based on the response length in tokens."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from megarl.rewards.exact import exact_match
from megarl.rewards.options import CHECK_ROW, NUM_TOKENS, SINGLE


def length_penalty(
    prompt: str, response: str, answer: Any, num_response_tokens: int, free_tokens: int = 0, per_tokens: float = 1000.0
) -> float:
    """Return −max(0, num_response_tokens − free_tokens) / per_tokens."""
    return -max(0, num_response_tokens - free_tokens) / per_tokens


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """Return 0 up to max_tokens − buffer, then linearly down to −1 at max_tokens (DAPO, arXiv 2503.14476, eq. 13)."""
    return -min(max(num_tokens - (max_tokens - buffer), 0) / buffer, 1.0)


class SoftOverlong:
    """DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, eq. 13) with a configurable token limit. The
    reward is 0 up to max_tokens − buffer and decreases linearly to −1 at max_tokens. rewards.overlong_buffer applies
    the same penalty with the limit rollout.max_new_tokens, but does not affect whether prompts are informative."""

    def __init__(self, max_tokens: int, buffer: int):
        for name, value, most in (("max_tokens", max_tokens, None), ("buffer", buffer, max_tokens)):
            if not isinstance(value, int) or value < 1 or (most is not None and value > most):
                bound = "" if most is None else f" up to max_tokens={most}"
                raise ValueError(f"options.{name}={value!r}: not allowed. Fix: use a positive integer{bound}")
        self._max_tokens, self._buffer = max_tokens, buffer

    def __call__(self, prompt: str, response: str, answer: Any, *, num_response_tokens: int) -> float:
        return overlong_penalty(num_response_tokens, self._max_tokens, self._buffer)


class CosineLength:
    """The cosine reward of "Demystifying Long Chain-of-Thought Reasoning" (https://arxiv.org/abs/2502.03373, §3.1). For
    n tokens, r = end + ½ (start − end) (1 + cos(π n / max_tokens)), which changes from `start` to `end`: right_start to
    right_end for a correct response, wrong_start to wrong_end for a wrong one. From max_tokens on, r is `too_long`. The
    defaults are the paper's: correct responses should be short, wrong ones may be longer."""

    def __init__(
        self,
        max_tokens: int,
        verifier: Callable[..., Any] = exact_match,
        right_start: float = 2.0,
        right_end: float = 1.0,
        wrong_start: float = -10.0,
        wrong_end: float = 0.0,
        too_long: float = -10.0,
    ):
        """verifier: function that returns a positive value for a correct response. In a config, a function name as in
        rewards.functions, or {function, options}."""
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(f"options.max_tokens={max_tokens!r}: must be a positive integer. Fix: use 1 or more")
        self._verifier, self.check_row = verifier, getattr(verifier, CHECK_ROW, None)
        self._max_tokens, self._too_long = max_tokens, too_long
        self._right, self._wrong = (right_start, right_end), (wrong_start, wrong_end)
        # Expose the columns that the verifier requires as parameters of this function.
        columns = list(inspect.signature(self._verifier).parameters.values())[len(SINGLE) :]
        self._reads_length = any(parameter.name == NUM_TOKENS for parameter in columns)
        keyword = inspect.Parameter.KEYWORD_ONLY
        named = (keyword, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        columns = [p.replace(kind=keyword) for p in columns if p.name != NUM_TOKENS and p.kind in named]
        first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in SINGLE]
        self.__signature__ = inspect.Signature([*first, inspect.Parameter(NUM_TOKENS, keyword), *columns])

    def __call__(self, prompt: str, response: str, answer: Any, *, num_response_tokens: int, **columns: Any) -> float:
        arguments = columns | ({"num_response_tokens": num_response_tokens} if self._reads_length else {})
        is_right = self._verifier(prompt, response, answer, **arguments) > 0
        if num_response_tokens >= self._max_tokens:
            return self._too_long
        start, end = self._right if is_right else self._wrong
        return end + (start - end) * (1 + math.cos(math.pi * num_response_tokens / self._max_tokens)) / 2
