"""Hand-written turns and tasks, for environments that run without a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.environments import Task, ToolCall, Turn


def turn(text: str = "", *calls: ToolCall) -> Turn:
    return Turn(np.zeros(1, np.int32), text, "stop", calls)


def task(messages: Sequence[dict[str, Any]] = (), answer: Any = None, seed: int = 0) -> Task:
    return Task("0", messages, answer, {}, seed)


def question(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
