"""The samples that the rollout viewer embeds: evenly spaced steps, evenly spaced rewards, both ends included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.core.jsonl import read_objects

MAX_STEPS = 20
MAX_SAMPLES = 128  # of a step
MAX_CHARACTERS = 3000  # of a prompt or a response
FIELDS = (
    "sample_id",
    "prompt",
    "response",
    "reward",
    "parts",
    "failure",
    "version",
    "finish_reason",
    "answer",
    "num_response_tokens",
    "advantage",
    "prompt_id",
    "rollout_id",
    "stop_reason",
)
MAX_DETAILED = 24  # samples of a step whose tokens are shown one by one
MAX_TOKENS = 800  # of such a sample, from its first on
DIGITS = 3
ARRAYS = {"logprobs": "rollout_logprobs", "differences": "logprob_differences", "advantages": "token_advantages"}
"""The values of tokens that the page shows, by its names for them, and the rows' names."""


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """The samples of one step, best reward first, those without a reward last.

    num_samples   samples that the step has, of which `samples` are some
    unreadable    lines of its file that could not be read
    """

    step: int
    samples: list[dict[str, Any]]
    num_samples: int
    unreadable: int


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The rollouts of a run. `num_steps` steps have a rollout file, of which `steps` are some."""

    steps: list[StepRollouts]
    num_steps: int


def read_rollouts(files: Mapping[int, Path]) -> Rollouts:
    """Read the rollouts of evenly spaced steps. `files`: step -> its rollout file."""
    return Rollouts([_read_step(step, files[step]) for step in spread(sorted(files), MAX_STEPS)], len(files))


def spread(items: Sequence[Any], limit: int) -> list[Any]:
    """Return at most `limit` (≥ 2) items, evenly spaced, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    return [items[index * (len(items) - 1) // (limit - 1)] for index in range(limit)]


def _read_step(step: int, path: Path) -> StepRollouts:
    records, unreadable = read_objects(path, keep=_shown)
    detailed = [record for record in records if "detail" in record]
    for record in detailed[MAX_DETAILED:]:
        del record["detail"]
    records.sort(key=_reward, reverse=True)
    others = [record for record in records if "detail" not in record]
    chosen = [*detailed[:MAX_DETAILED], *spread(others, MAX_SAMPLES - min(len(detailed), MAX_DETAILED))]
    chosen.sort(key=_reward, reverse=True)
    return StepRollouts(step, chosen, len(records), len(unreadable))


def _reward(record: Mapping[str, Any]) -> float:
    return -math.inf if record.get("reward") is None else record["reward"]


def _shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a sample: of its log-probs, their mean."""
    sample = {field: record.get(field) for field in FIELDS}
    texts = {field: shorten(str(sample[field]), MAX_CHARACTERS) for field in ("prompt", "response")}
    sample |= texts | {"mean_logprob": _mean(record.get("rollout_logprobs"))}
    turns = record.get("turns") or record.get("messages")
    if turns:
        sample["turns"] = [shown_turn(turn, MAX_CHARACTERS) for turn in turns]
    if record.get("tokens"):
        sample["detail"] = _detail(record)
    return sample


def shown_turn(message: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return what is shown of a message: of its text, so many characters."""
    content = message.get("content")
    shown = {
        "role": str(message.get("role")),
        "content": shorten(content, most) if isinstance(content, str) else content,
    }
    return shown | ({"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {})


def _detail(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first tokens of a sample with what is known of each."""
    tokens = record["tokens"][:MAX_TOKENS]
    detail: dict[str, Any] = {"tokens": tokens}
    if record.get("mask") is not None:
        is_turn = [1 - number % 2 for number, length in enumerate(record["mask"]) for _ in range(length)]
        detail["mask"] = is_turn[: len(tokens)]
    for name, field in ARRAYS.items():
        if record.get(field):
            detail[name] = [_rounded(value) for value in record[field][: len(tokens)]]
    return detail


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _mean(values: Sequence[float | None] | None) -> float | None:
    """Return the mean, None where there is none, or one of the values is not finite."""
    return fmean(values) if values and None not in values else None


def shorten(text: str, most: int) -> str:
    """Leaves out the middle of a long text: its beginning and its end say most."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    half = most // 2
    return f"{text[:half]}\n… {left_out} characters left out …\n{text[-half:]}"
