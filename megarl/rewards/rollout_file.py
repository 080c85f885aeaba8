"""The file of a step's rollouts, for people to read: a line of JSON for each sample.

A line begins with the sample's id, and ends with its advantage, which is null until the sample is trained on. It is
written in then, without reading what is between: a response may have a million log-probs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megarl.core.files import append_rows
from megarl.core.types import Sample, Score

LOGPROB_DECIMALS = 4
ADVANTAGE_DIGITS = 6
NO_ADVANTAGE = b"null}\n"
"""The end of a line without an advantage."""


def append_rollouts(path: Path, step: int, scored: Iterable[tuple[Sample, Score]]) -> None:
    """Appends the samples, decoded, with their scores."""
    append_rows(path, (_row(step, sample, score) for sample, score in scored))


def write_advantages(path: Path, advantages: Mapping[str, float]) -> None:
    """Writes the advantages, by sample id, into the samples' lines. A new file takes the old one's place when it is
    whole."""
    new = path.with_name(f".{path.name}")
    with path.open("rb") as lines, new.open("wb") as out:
        for line in lines:
            _, _, _, sample_id, _ = line.split(b'"', 4)
            advantage = advantages.get(sample_id.decode())
            if advantage is not None:
                line = line.removesuffix(NO_ADVANTAGE) + f"{advantage:.{ADVANTAGE_DIGITS}g}}}\n".encode()
            out.write(line)
    new.replace(path)


def _row(step: int, sample: Sample, score: Score) -> dict[str, Any]:
    return {
        "sample_id": sample.id,
        "step": step,
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
        "advantage": None,
    }


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
