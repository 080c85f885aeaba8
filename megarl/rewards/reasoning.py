"""The rewards of reasoning-gym's tasks, by the package's own judgement of an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megarl.data.reasoning import Task, load_gym

READS = ("tags", "response")


class ReasoningGym:
    """The score, mostly from 0 to 1, that the row's task of reasoning-gym gives the response
    (https://github.com/open-thought/reasoning-gym).

    Its columns are those of data.source=reasoning_gym:TASK: the task's name, its options and the metadata of the entry.
    Some tasks raise an error for text that they cannot read: it is worth 0 if they can read the entry's own answer, and
    else the failure of the sample. Of game_of_life_halting, for which the package takes any text as True, the answer is
    compared as text.
    """

    def __init__(self, reads: str = "tags"):
        """reads: tags: what stands in the last `<answer>…</answer>`, a response without one being an empty answer |
        response: all of it."""
        if reads not in READS:
            raise ValueError(f"options.reads={reads!r} is none of {', '.join(READS)}")
        self._extract = load_gym().utils.extract_answer if reads == "tags" else str.strip

    def __call__(
        self, prompt: str, response: str, answer: Any, *, task: str, options: Mapping[str, Any], metadata: Any
    ) -> float:
        said, entry = self._extract(response), {"question": prompt, "answer": answer, "metadata": metadata}
        if task == "game_of_life_halting":
            return float(said == answer)
        dataset = _dataset(task, json.dumps(options, sort_keys=True))
        try:
            return float(dataset.score_answer(said, entry))
        except Exception:
            dataset.score_answer(answer or "", entry)
            return 0.0


@lru_cache(maxsize=256)
def _dataset(task: str, options: str) -> Any:
    return Task(task, json.loads(options)).dataset(seed=0, size=1)
