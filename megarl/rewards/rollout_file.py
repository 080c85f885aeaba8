"""A step's rollouts in a human-readable file with one JSON line per sample.

A line begins with the sample's id and ends with its advantage, which is null until the sample is trained on. The
advantage is then inserted without parsing the rest of the line, since a response may have a million log-probs. The
lines of a step's first groups also have per-token details: each token's text and advantage, and the difference between
the trainer's log-prob and the engine's. These lines contain all token ids, so that `megarl diagnose` can recompute the
sample. The line of an image names its file, see `rollout_images`. The images of prompts and observations have
thumbnails, see `prompt_thumbnails`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.files import replacement
from megarl.core.latents import LatentSample
from megarl.core.optional_logs import OptionalLog
from megarl.core.sample import GIVEN, Sample
from megarl.core.score import Score
from megarl.rewards.prompt_thumbnails import (
    Decode,
    Fetch,
    available_files,
    observation_fields,
    prompt_fields,
    write_thumbnails,
)
from megarl.rewards.rollout_images import write_images

LOGPROB_DECIMALS = 4
DENOISING_DECIMALS = 7
"""Decimals of a denoising step's log-prob. It is a mean over elements, and objectives clip its ratio to within 1e-4."""

ADVANTAGE_DIGITS = 6
TOKEN_DIGITS = 4
PROMPT_IDS, RESPONSE_IDS = "prompt_ids", "response_ids"
"""Keys of the token ids in a line with per-token details."""

TOKEN_ADVANTAGES, LOGPROB_DIFFERENCES = "token_advantages", "logprob_differences"
"""Keys of the per-token details. A log-prob difference is the trainer's log-prob before the step minus the engine's."""

NO_DETAILS: Mapping[str, Mapping[str, Sequence[float]]] = {}
NO_ADVANTAGE = b"null}\n"
"""End of a line without an advantage."""


ROLLOUTS, ADVANTAGES = OptionalLog("rollouts"), OptionalLog("advantages")

MAX_TOKENS = 800
"""Maximum number of tokens per sample whose texts are written. Decoding more would delay the step."""

LONGEST_CHARACTER = 8
"""Maximum number of tokens to decode for one character. A character has fewer bytes."""

TokenTexts = Callable[[Sample], "list[str] | None"]


def append_rollouts(
    path: Path,
    step: int,
    scored: Sequence[tuple[Sample | LatentSample, Score]],
    texts_of: TokenTexts = lambda _: None,
    feedback: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    decode: Decode | None = None,
    fetch: Fetch = available_files,
) -> bool:
    """Append samples with their scores, and write their images and the thumbnails of images that they contain, unless
    the disk is full. Return whether the lines were written.

    Args:
        texts_of: returns the text of each token in a text sample, or None.
        feedback: the feedback on samples, by sample id and source.
        decode: returns the text of token ids, which locates the images in a prompt.
        fetch: yields the encoded images for which thumbnails are written.
    """
    images, thumbnails = write_images(path, scored), write_thumbnails(path, scored, fetch)

    def row(sample: Sample | LatentSample, score: Score) -> dict[str, Any]:
        prompt = prompt_fields(sample.prompt, decode, thumbnails)
        if isinstance(sample, LatentSample):
            return _image_row(step, sample, score, prompt | images.get(sample.id, {}))
        contents = prompt | observation_fields(sample, thumbnails)
        return _text_row(step, sample, score, contents, texts_of(sample), feedback.get(sample.id))

    rows = (row(sample, score) for sample, score in scored)
    return ROLLOUTS.append(path, rows, len(scored))


def has_token_details(sample_id: str, num_groups: int) -> bool:
    """Return whether the sample STEP.GROUP.NUMBER has token details: it is in one of its step's first `num_groups`
    groups, and is not a given response, because no engine has computed log-probs for those."""
    group = sample_id.split(".")[1:2]
    return bool(group) and int(group[0]) < num_groups and not sample_id.endswith(f".{GIVEN}")


def token_texts(decode: Callable[[tuple[int, ...]], str], ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds to the previous ones. If a character consists of several tokens, its last
    token adds the whole character and the others add nothing."""
    texts: list[str] = []
    begin = read = 0  # decoding starts one token early, since a token's text may depend on the previous one
    for end in range(1, len(ids) + 1):
        text = decode(tuple(ids[begin:end]))
        if text.endswith("\ufffd") and end < len(ids) and end - read < LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text[len(decode(tuple(ids[begin:read]))) :])
        begin, read = read, end
    return texts


def write_advantages(
    path: Path, advantages: Mapping[str, float], details: Mapping[str, Mapping[str, Sequence[float]]] = NO_DETAILS
) -> None:
    """Write advantages, keyed by sample id, into the lines of their samples. The file is replaced atomically. `details`
    contains one value per response token, keyed by sample id and name, for samples that have an advantage. If the disk
    is full, the lines stay without advantages."""
    if path.exists():  # missing if the step's samples were not written
        ADVANTAGES.attempt(path, lambda: _write_advantages(path, advantages, details), len(advantages))


def _write_advantages(
    path: Path, advantages: Mapping[str, float], details: Mapping[str, Mapping[str, Sequence[float]]]
) -> None:
    with path.open("rb") as lines, replacement(path) as out:
        for line in lines:
            _, _, _, sample_id, _ = line.split(b'"', 4)
            advantage = advantages.get(sample_id.decode())
            if advantage is not None:
                more = "".join(
                    f', "{name}": [{_numbers(row)}]' for name, row in details.get(sample_id.decode(), {}).items()
                )
                line = line.removesuffix(NO_ADVANTAGE) + f"{advantage:.{ADVANTAGE_DIGITS}g}{more}}}\n".encode()
            out.write(line)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.{TOKEN_DIGITS}g}" if math.isfinite(value) else "null" for value in values)


def _text_row(
    step: int,
    sample: Sample,
    score: Score,
    prompt: Mapping[str, Any],
    texts: Sequence[str] | None,
    feedback: Mapping[str, str] | None,
) -> dict[str, Any]:
    sampled = {
        **({"feedback": feedback} if feedback else {}),
        "finish_reason": sample.finish_reason,
        "num_response_tokens": len(sample.response_ids),
        "rollout_logprobs": _rounded(sample.response_logprobs, LOGPROB_DECIMALS),
        **_mask_field(sample),
        **_episode_fields(sample),
        **({} if texts is None else {"tokens": texts, **_token_ids(sample)}),
    }
    return _row(step, sample, score, {**prompt, "response": sample.text}, sampled)


def _image_row(step: int, sample: LatentSample, score: Score, contents: Mapping[str, Any]) -> dict[str, Any]:
    sampled = {
        "num_denoising_steps": len(sample.sigmas) - 1,
        "trained_denoising_steps": sample.steps.tolist(),
        "rollout_logprobs": _rounded(sample.logprobs, DENOISING_DECIMALS),
    }
    return _row(step, sample, score, contents, sampled)


def _row(
    step: int, sample: Sample | LatentSample, score: Score, contents: Mapping[str, Any], sampled: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "sample_id": sample.id,
        "step": step,
        "prompt_id": sample.prompt.id,
        **contents,
        "answer": sample.prompt.answer,
        "reward": score.value,
        "parts": score.parts,
        "failure": score.failure,
        **({"issues": issues} if (issues := {name: text for name, text in score.issues.items() if text}) else {}),
        "version": [asdict(run) for run in sample.versions],
        **sampled,
        "advantage": None,
    }


def _rounded(logprobs: NDArray[np.float32], decimals: int) -> list[float]:
    return np.round(np.asarray(logprobs, np.float64), decimals).tolist()


def _token_ids(sample: Sample) -> dict[str, list[int]]:
    return {PROMPT_IDS: sample.prompt.token_ids.tolist(), RESPONSE_IDS: sample.response_ids.tolist()}


def _mask_field(sample: Sample) -> dict[str, list[int]]:
    """Return a run-length encoding of the mask: lengths of alternating runs of trained and untrained tokens, trained
    first. Empty for a single response without untrained tokens."""
    mask = sample.response_mask
    if sample.episode is None and mask.all():
        return {}
    changes = np.flatnonzero(np.diff(mask, prepend=True))  # the first length is 0 if the first token is untrained
    return {"mask": np.diff([0, *changes, len(mask)]).tolist()}


def _episode_fields(sample: Sample) -> dict[str, Any]:
    """Return the fields for a sample from an environment rollout."""
    if sample.episode is None:
        return {}
    return {
        "rollout_id": sample.rollout_id,
        "stop_reason": str(sample.episode.info.stop_reason),
        "first_turn": sample.episode.first_turn,
        "turn_rewards": sample.episode.rewards,
        "tool_calls": sample.episode.info.tool_calls,
        "messages": sample.episode.messages,
        **({"stack": sample.episode.stack} if sample.episode.stack else {}),
    }
