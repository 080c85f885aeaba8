"""The file of a step's rollouts."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.core.types import Prompt, Sample, Score, VersionRun
from megarl.rewards.rollout_file import append_rollouts, write_advantages


def sample(name: str, text: str, logprobs: tuple[float, ...]) -> Sample:
    num_tokens = len(logprobs)
    run = (VersionRun(0, num_tokens),)
    return Sample(name, Prompt("p", "?", [5]), [7] * num_tokens, logprobs, [True] * num_tokens, run, "stop", text)


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def test_rows_have_the_engines_log_probs_of_response_tokens(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    append_rollouts(file, 1, [(sample("1.0.0", "a", (-0.123456, -2.0)), Score(1.0, {}))])
    [row] = rows(file)
    assert row["rollout_logprobs"] == [-0.1235, -2.0] and row["advantage"] is None


def test_advantages_are_written_into_the_lines_of_their_samples(tmp_path: Path) -> None:
    """A step may sample in several rounds. A sample that was not trained on has no advantage."""
    file = tmp_path / "step_000001.jsonl"
    texts = {"1.0.0": 'null}\n{"advantage": null}', "1.0.1": "b\udfff \u2028 é", "1.1.0": "", "1.1.1": "c"}
    samples = [sample(name, text, (-1.0,)) for name, text in texts.items()]
    for half in (samples[:2], samples[2:]):
        append_rollouts(file, 1, [(item, Score(1.0, {})) for item in half])
    before = rows(file)
    write_advantages(file, {"1.0.0": 0.70710678, "1.1.0": 0.0, "1.0.1": -1.5e-7})
    advantages = [0.707107, -1.5e-07, 0.0, None]
    assert rows(file) == [row | {"advantage": a} for row, a in zip(before, advantages, strict=True)]
    assert [row["response"] for row in rows(file)] == list(texts.values())
    assert list(tmp_path.iterdir()) == [file]
