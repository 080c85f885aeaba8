"""The file of a step's rollouts."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.core.score import Score
from megarl.rewards.rollout_file import append_rollouts, has_token_details, token_texts, write_advantages


def sample(name: str, text: str, logprobs: tuple[float, ...]) -> Sample:
    num_tokens = len(logprobs)
    run = (VersionRun(0, num_tokens),)
    return Sample(name, Prompt("p", "?", [5]), [7] * num_tokens, logprobs, [True] * num_tokens, run, "stop", text)


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def test_rows_contain_rollout_logprobs(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    append_rollouts(file, 1, [(sample("1.0.0", "a", (-0.123456, -2.0)), Score(1.0, {}))])
    [row] = rows(file)
    assert row["rollout_logprobs"] == [-0.1235, -2.0] and row["advantage"] is None


def test_advantages_are_written_into_their_samples_lines(tmp_path: Path) -> None:
    """A step may sample in several rounds, and a sample that was not trained on has no advantage."""
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


def test_token_details_follow_the_advantage(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    samples = [sample(name, "", (-1.0, -2.0)) for name in ("1.0.0", "1.0.1", "1.1.0")]
    listed = {"1.0.0": ["a", '"}\n'], "1.0.1": ["", "é"]}
    append_rollouts(file, 1, [(item, Score(1.0, {})) for item in samples], lambda item: listed.get(item.id))
    before = rows(file)
    details = {"1.0.0": {"token_advantages": [0.5, float("nan")], "logprob_differences": [1e-9, -0.25]}}
    write_advantages(file, {"1.0.0": 0.5, "1.1.0": 1.0}, details)
    first = before[0] | {"advantage": 0.5, "token_advantages": [0.5, None], "logprob_differences": [1e-9, -0.25]}
    assert rows(file) == [first, before[1], before[2] | {"advantage": 1.0}]
    assert [row.get("tokens") for row in before] == [*listed.values(), None]
    assert [(row.get("prompt_ids"), row.get("response_ids")) for row in before] == [*[([5], [7, 7])] * 2, (None, None)]


def test_token_details_cover_whole_groups() -> None:
    names = [f"7.{group}.{number}" for group in range(3) for number in ("0", "1", "greedy")]
    assert [name for name in names if has_token_details(name, 2)] == names[:6]
    assert not any(has_token_details(name, 0) for name in names)


@given(st.text(max_size=40))
def test_token_texts_concatenate_to_the_text(text: str) -> None:
    """Tokens are bytes here, so most characters consist of several."""
    ids = list(text.encode())
    texts = token_texts(lambda token_ids: bytes(token_ids).decode(errors="replace"), ids)
    assert len(texts) == len(ids) and "".join(texts) == text
    assert all(piece == "" or len(piece) == 1 for piece in texts)


def test_invalid_bytes_do_not_delay_later_texts() -> None:
    texts = token_texts(lambda token_ids: bytes(token_ids).decode(errors="replace"), [0xFF] * 20 + list(b"ab"))
    assert len(texts) == 22 and texts[-1] == "b"
