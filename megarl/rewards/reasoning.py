"""Rewards for reasoning-gym tasks, computed by the package's own verifiers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megarl.data.reasoning import Task, load_gym
from megarl.rewards.forked import in_child
from megarl.rewards.gym_text import FORMULAS, make_safe
from megarl.rewards.think_answer import last_answer
from megarl.usercode.failures import ProcessLost

READS = ("tags", "response")

FORMULA_S = 5.0
"""Timeout in seconds for scoring a formula or number. Even the value of a short formula may have billions of digits."""

KILLABLE = (*FORMULAS, "coin_flip")
"""Tasks whose verifiers compute with arbitrarily large numbers."""


class ReasoningGym:
    """Reward function that returns the response's score on the row's reasoning-gym task, usually from 0 to 1.

    See https://github.com/open-thought/reasoning-gym. It uses the data columns of data.source=reasoning_gym:TASK: the
    task's name, its options and the entry's metadata. Some tasks raise an error for text that they cannot parse. The
    response then scores 0 if the task can parse the entry's own answer; otherwise the sample fails. The verifier of
    game_of_life_halting treats any text as True, so its answers are compared as text.
    """

    def __init__(self, reads: str = "tags"):
        """Create the function with its options. With reads="tags", the function scores the last `<answer>…</answer>`
        (None if there is none); with reads="response", the whole response."""
        if reads not in READS:
            raise ValueError(f"options.reads={reads!r}: unknown value. Fix: use one of {', '.join(READS)}")
        gym = load_gym()
        make_safe(gym.factory)
        self._extract = _answer_in_tags if reads == "tags" else str.strip

    def check_row(self, answer: Any, *, task: str, options: Mapping[str, Any], metadata: Any) -> None:
        """Raise ValueError if the task or its options are unknown, or if the task cannot score the row's own answer."""
        dataset = _dataset(task, json.dumps(options, sort_keys=True))
        try:
            dataset.score_answer(answer or "", {"question": "", "answer": answer, "metadata": metadata})
        except ImportError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"reasoning_gym: {task} cannot score the row's own answer ({reason}). Fix: use the "
                "answer and metadata of a generated entry, or drop the row"
            ) from None

    def __call__(
        self, prompt: str, response: str, answer: Any, *, task: str, options: Mapping[str, Any], metadata: Any
    ) -> float:
        text, entry = self._extract(response), {"question": prompt, "answer": answer, "metadata": metadata}
        if task == "game_of_life_halting":
            return float(text == answer)
        # Reject NaN: this task's verifier returns min(1.0, NaN), which is 1.0.
        if task == "complex_arithmetic" and "nan" in (text or "").lower():
            return 0.0
        dataset = _dataset(task, json.dumps(options, sort_keys=True))
        try:
            if task in KILLABLE and text != answer:
                return in_child(lambda: dataset.score_answer(text, entry), FORMULA_S)
            return float(dataset.score_answer(text, entry))
        except ProcessLost:
            raise
        except Exception:
            dataset.score_answer(answer or "", entry)
            return 0.0


def _answer_in_tags(response: str) -> str | None:
    answer = last_answer(response)
    return None if answer is None else answer.strip()


@lru_cache(maxsize=256)
def _dataset(task: str, options: str) -> Any:
    return Task(task, json.loads(options)).dataset(seed=0, size=1)
