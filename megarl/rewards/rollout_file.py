"""The file of a step's rollouts, for people to read: a line of JSON for each sample.

A line begins with the sample's id, and ends with its advantage, which is null until the sample is trained on. It is
written in then, without reading what is between: a response may have a million log-probs. Of a few samples of a step,
whole groups, lines have what people ask of single tokens: the text of each, its advantage, and how the trainer's
log-prob differs from the engine's; and the ids of all tokens, of which `megarl diagnose` computes the sample again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megarl.core.files import append_rows
from megarl.core.types import Sample, Score

LOGPROB_DECIMALS = 4
ADVANTAGE_DIGITS = 6
TOKEN_DIGITS = 4
PROMPT_IDS, RESPONSE_IDS = "prompt_ids", "response_ids"
"""The names of the ids in the row of a sample with details of its tokens."""

NO_DETAILS: Mapping[str, Mapping[str, Sequence[float]]] = {}
NO_ADVANTAGE = b"null}\n"
"""The end of a line without an advantage."""


MAX_TOKENS = 800
"""The tokens of a sample, from its first on, whose texts are listed: to find them takes time in which a step waits."""

LONGEST_CHARACTER = 8
"""More tokens than the bytes of one character never complete it."""

TokenTexts = Callable[[Sample], "list[str] | None"]


def no_texts(sample: Sample) -> None:
    return None


def append_rollouts(
    path: Path, step: int, scored: Iterable[tuple[Sample, Score]], texts_of: TokenTexts = no_texts
) -> None:
    """Appends the samples, decoded, with their scores. texts_of: returns the texts of a sample's tokens, None for one
    without."""
    append_rows(path, (_row(step, sample, score, texts_of(sample)) for sample, score in scored))


def has_token_details(sample_id: str, num_groups: int) -> bool:
    """Returns whether the line of a sample has details of its tokens: those of a step's first groups have. sample_id:
    STEP.GROUP.NUMBER."""
    group = sample_id.split(".")[1:2]
    return bool(group) and int(group[0]) < num_groups


def token_texts(decode: Callable[[tuple[int, ...]], str], ids: Sequence[int]) -> list[str]:
    """Returns the text that each token adds to those before it. A token that ends within a character adds nothing, and
    the one that completes it the whole."""
    texts: list[str] = []
    begin = read = 0  # a token's text may depend on the one before
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
    """Writes the advantages, by sample id, into the samples' lines. A new file takes the old one's place when it is
    whole.

    details: values of each response token, by sample id and name, of samples that have an advantage."""
    new = path.with_name(f".{path.name}")
    with path.open("rb") as lines, new.open("wb") as out:
        for line in lines:
            _, _, _, sample_id, _ = line.split(b'"', 4)
            advantage = advantages.get(sample_id.decode())
            if advantage is not None:
                more = "".join(
                    f', "{name}": [{_numbers(row)}]' for name, row in details.get(sample_id.decode(), {}).items()
                )
                line = line.removesuffix(NO_ADVANTAGE) + f"{advantage:.{ADVANTAGE_DIGITS}g}{more}}}\n".encode()
            out.write(line)
    new.replace(path)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.{TOKEN_DIGITS}g}" if math.isfinite(value) else "null" for value in values)


def _row(step: int, sample: Sample, score: Score, texts: Sequence[str] | None) -> dict[str, Any]:
    return {
        "sample_id": sample.id,
        "step": step,
        "prompt_id": sample.prompt.id,
        "prompt": sample.prompt.text,
        "response": sample.text,
        "answer": sample.prompt.answer,
        "reward": score.value,
        "parts": score.parts,
        "failure": score.failure,
        "version": [asdict(run) for run in sample.versions],
        "finish_reason": sample.finish_reason,
        "num_response_tokens": len(sample.response_ids),
        "rollout_logprobs": np.round(np.asarray(sample.response_logprobs, np.float64), LOGPROB_DECIMALS).tolist(),
        **_episode_fields(sample),
        **({} if texts is None else {"tokens": texts, **_token_ids(sample)}),
        "advantage": None,
    }


def _token_ids(sample: Sample) -> dict[str, list[int]]:
    return {PROMPT_IDS: sample.prompt.token_ids.tolist(), RESPONSE_IDS: sample.response_ids.tolist()}


def _episode_fields(sample: Sample) -> dict[str, Any]:
    """Returns the fields of a sample of a rollout in an environment. mask: lengths of runs of tokens, of which those of
    the policy come first and then every second one."""
    if sample.episode is None:
        return {}
    changes = np.flatnonzero(np.diff(sample.response_mask)) + 1
    return {
        "rollout_id": sample.rollout_id,
        "stop_reason": str(sample.episode.info.stop_reason),
        "first_turn": sample.episode.first_turn,
        "turn_rewards": sample.episode.rewards,
        "tool_calls": sample.episode.info.tool_calls,
        "mask": np.diff([0, *changes, len(sample.response_ids)]).tolist(),
        "messages": sample.episode.messages,
        **({"stack": sample.episode.stack} if sample.episode.stack else {}),
    }
