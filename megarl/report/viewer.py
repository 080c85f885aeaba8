"""Selects samples for the rollout viewer. Steps and rewards are evenly spaced and include both extremes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.core.jsonl import read_objects
from megarl.report.images import IMAGE, embed_images, image_fields
from megarl.report.prompts import embed_thumbnails, images_in, select_prompt, select_turns, shorten

MAX_STEPS = 20
MAX_SAMPLES = 128  # per step
MAX_CHARACTERS = 3000  # per prompt or response
FIELDS = (
    *("sample_id", "response", "reward", "parts", "failure", "version", "finish_reason", "answer"),
    *("num_response_tokens", "advantage", "prompt_id", "rollout_id", "stop_reason"),
)
MAX_DETAILED = 24  # samples per step with token details
MAX_IMAGES = 96  # maximum number of samples per step that are selected because they have images
MAX_TOKENS = 800  # leading tokens with details, per sample
DIGITS = 3
ARRAYS = {"logprobs": "rollout_logprobs", "differences": "logprob_differences", "advantages": "token_advantages"}
"""Maps the name that the page uses for each per-token value to the corresponding field in a rollout row."""


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """Selected samples from one step, in descending order of reward. Samples without a reward come last.

    Attributes:
        num_samples: total number of samples in the step.
        unreadable: number of lines in the step's rollout file that could not be parsed.
        num_omitted_images: number of images of these samples that exceed the page's limit or were removed. Images in
            prompts are not included.
        thumbnails: stored images of prompts, by thumbnail name. Those that exceed the limit or were removed are empty.
    """

    step: int
    samples: list[dict[str, Any]]
    num_samples: int
    unreadable: int
    num_omitted_images: int
    thumbnails: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Rollouts from selected steps of a run. num_steps: total number of steps with rollout files."""

    steps: list[StepRollouts]
    num_steps: int

    @property
    def num_omitted_images(self) -> int:
        """Number of stored images, including those in prompts, that exceed the page's limit or were removed."""
        names = {name for step in self.steps for name in step.thumbnails}
        num_omitted_thumbnails = len(names - merged_thumbnails(self.steps).keys())
        return sum(step.num_omitted_images for step in self.steps) + num_omitted_thumbnails


def page_data(steps: Sequence[StepRollouts]) -> dict[str, Any]:
    """Return the page's data. Each step has the names of its thumbnails, and all steps share one copy of their data."""
    return {
        "steps": [asdict(step) | {"thumbnails": [*step.thumbnails]} for step in steps],
        "thumbnails": merged_thumbnails(steps),
    }


def merged_thumbnails(steps: Iterable[StepRollouts]) -> dict[str, dict[str, Any]]:
    """Return the thumbnails that at least one step embeds, by name."""
    return {name: fields for step in steps for name, fields in step.thumbnails.items() if fields}


def read_rollouts(files: Mapping[int, Path], cache: FileCache | None = None) -> Rollouts:
    """Read the rollouts from evenly spaced steps. `files` maps each step to its rollout file."""
    cache = FileCache() if cache is None else cache
    steps = spread_stably(sorted(files), MAX_STEPS)
    return Rollouts([cache.get(partial(_read_step, step), files[step]) for step in steps], len(files))


class FileCache:
    """Cached contents of files. A file is read again when it has changed."""

    def __init__(self) -> None:
        self._values: dict[tuple[Path, int, int], Any] = {}
        self._used: dict[tuple[Path, int, int], Any] = {}

    def get(self, read: Callable[[Path], Any], path: Path) -> Any:
        status = path.lstat()
        key = path, status.st_size, status.st_mtime_ns
        self._used[key] = value = self._values[key] if key in self._values else read(path)
        return value

    def drop_unused(self) -> None:
        """Drop the files that have not been used since the last call."""
        self._values, self._used = self._used, {}


def spread_stably(items: Sequence[Any], limit: int) -> list[Any]:
    """Return evenly spaced items and the last one, at most `limit` in total. When items are appended, most of the
    selection stays the same."""
    stride = 1
    while (len(items) - 1) // stride + 2 > limit and len(items) > limit:
        stride *= 2
    chosen = list(items[::stride])
    return chosen if not items or (len(items) - 1) % stride == 0 else [*chosen, items[-1]]


def spread(items: Sequence[Any], limit: int) -> list[Any]:
    """Return at most `limit` evenly spaced items, including the first and the last. `limit` must be at least 2."""
    if len(items) <= limit:
        return list(items)
    return [items[index * (len(items) - 1) // (limit - 1)] for index in range(limit)]


def _read_step(step: int, path: Path) -> StepRollouts:
    records, unreadable = read_objects(path, keep=_select_fields)
    detailed = [record for record in records if "detail" in record]
    for record in detailed[MAX_DETAILED:]:
        del record["detail"]
    pictured = [record for record in records if IMAGE in record][:MAX_IMAGES]  # whole groups
    pictured += spread(_with_thumbnails(records), MAX_IMAGES)
    preferred = [*detailed[:MAX_DETAILED], *pictured]
    is_preferred = set(map(id, preferred))
    others = sorted((record for record in records if id(record) not in is_preferred), key=score_of, reverse=True)
    chosen = [*preferred, *spread(others, MAX_SAMPLES - len(preferred))]
    num_omitted_images = embed_images(path, chosen)
    thumbnails = embed_thumbnails(path, chosen)
    chosen.sort(key=score_of, reverse=True)
    return StepRollouts(step, chosen, len(records), len(unreadable), num_omitted_images, thumbnails)


def _with_thumbnails(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples without token details that have images in their prompts, in descending order of reward."""
    pictured = (record for record in records if "detail" not in record and IMAGE not in record)
    chosen = [record for record in pictured if any("thumbnail" in image for image in images_in([record]))]
    return sorted(chosen, key=score_of, reverse=True)


def score_of(record: Mapping[str, Any]) -> float:
    """Return a sample's reward, or −∞ if it has none."""
    return -math.inf if record["reward"] is None else record["reward"]


def number_or_none(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _select_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sample fields that the page shows. Log-probs are reduced to their mean."""
    sample = {field: record.get(field) for field in FIELDS} | {"reward": number_or_none(record.get("reward"))}
    if isinstance(steps := record.get("num_denoising_steps"), int):
        sample |= image_fields(record) | {"num_denoising_steps": steps, "response": ""}
    sample |= select_prompt(record, MAX_CHARACTERS) | {"response": shorten(str(sample["response"]), MAX_CHARACTERS)}
    sample["mean_logprob"] = _mean(record.get("rollout_logprobs"))
    if turns := select_turns(record, MAX_CHARACTERS):
        sample["turns"] = turns
    if record.get("tokens"):
        sample["detail"] = _detail(record)
    return sample


def _detail(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leading tokens of a sample together with their per-token values."""
    tokens = record["tokens"][:MAX_TOKENS]
    detail: dict[str, Any] = {"tokens": tokens}
    if record.get("mask") is not None:
        is_turn = (1 - number % 2 for number, length in enumerate(record["mask"]) for _ in range(length))
        detail["mask"] = list(islice(is_turn, len(tokens)))
    for name, field in ARRAYS.items():
        if record.get(field):
            values = record[field][: len(tokens)]
            detail[name] = [None if value is None else float(f"{value:.{DIGITS}g}") for value in values]
    return detail


def _mean(values: Sequence[float | None] | None) -> float | None:
    """Return the mean of the values. Return None if there are no values or any value is missing."""
    present = [value for value in values or () if value is not None]
    return fmean(present) if values and len(present) == len(values) else None
