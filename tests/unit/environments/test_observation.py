"""The limit on the length of observations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.load import load
from megarl.config.schema import Environment
from megarl.environments.observation import limit_observation
from tests.paths import QUICKSTART
from tests.tiny_model import merging_tokenizer, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
MERGING = merging_tokenizer("a b", "ab c", "abc d")


def settings(limit: int | None, overlong: str = "cut") -> Environment:
    environment = load(QUICKSTART, ["environment.class=calculator"]).environment
    return environment.model_copy(update={"observation_tokens": limit, "overlong_observation": overlong})


def tools(*texts: str) -> list[dict[str, str]]:
    return [{"role": "tool", "name": f"t{i}", "content": text} for i, text in enumerate(texts)]


def cut(limit: int | None, *texts: str, tokenizer=TOKENIZER) -> list[str]:
    messages = limit_observation(tools(*texts), tokenizer, settings(limit))
    assert messages is not None
    return [message["content"] for message in messages]


@pytest.mark.parametrize(
    ("limit", "texts", "expected"),
    [
        (None, ["abcdef"], ["abcdef"]),
        (6, ["abcdef"], ["abcdef"]),
        (5, ["abcdef"], ["abcde"]),
        (1, ["abcdef"], ["a"]),
        (4, ["abc", "def"], ["abc", "d"]),
        (3, ["abc", "def"], ["abc", ""]),
        (2, ["abc", "def", ""], ["ab", "", ""]),
        (6, ["abc", "def"], ["abc", "def"]),
        (3, ["", "abcd"], ["", "abc"]),
    ],
)
def test_first_tokens_are_kept(limit: int | None, texts: Sequence[str], expected: Sequence[str]) -> None:
    assert cut(limit, *texts) == expected


def test_messages_keep_their_other_keys() -> None:
    assert limit_observation(tools("abc"), TOKENIZER, settings(1)) == [{"role": "tool", "name": "t0", "content": "a"}]


def test_images_are_kept_and_do_not_count() -> None:
    image = {"type": "image", "image": "digest"}
    content = [
        {"type": "text", "text": "ab"},
        image,
        {"type": "text", "text": "cd"},
        image,
        {"type": "text", "text": "e"},
    ]
    expected = [content[0], image, {"type": "text", "text": "c"}, image, {"type": "text", "text": ""}]
    [message] = limit_observation([{"role": "user", "content": content}], TOKENIZER, settings(3)) or []
    assert message["content"] == expected
    refuse = settings(3).model_copy(update={"overlong_observation": "refuse"})
    assert limit_observation([{"role": "user", "content": content}], TOKENIZER, refuse) is None


def test_characters_are_never_split() -> None:
    """Each of these characters has several tokens in a byte-level tokenizer."""
    assert [cut(limit, "aäö", tokenizer=MERGING) for limit in (1, 2, 3, 4, 5)] == [
        ["a"],
        ["a"],
        ["aä"],
        ["aä"],
        ["aäö"],
    ]


@given(text=st.text(max_size=40), limit=st.integers(1, 50))
def test_cut_text_is_a_prefix_within_the_limit(text: str, limit: int) -> None:
    [short] = cut(limit, text, tokenizer=MERGING)
    assert len(MERGING(short, add_special_tokens=False)["input_ids"]) <= limit
    assert text.startswith(short) or "\N{REPLACEMENT CHARACTER}" in text


def test_longer_observation_may_be_refused() -> None:
    assert limit_observation(tools("abc", "def"), TOKENIZER, settings(5, "refuse")) is None
    assert limit_observation(tools("abc", "de"), TOKENIZER, settings(5, "refuse")) == tools("abc", "de")


def test_policy_without_a_limit_needs_the_default() -> None:
    with pytest.raises(
        ValueError, match=r"environment\.overlong_observation=refuse: has no effect unless environment\.obs"
    ):
        load(QUICKSTART, ["environment.class=calculator", "environment.overlong_observation=refuse"])
