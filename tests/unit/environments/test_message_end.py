"""The end of the last message in prompts of many chat formats."""

from __future__ import annotations

import pytest

from megarl.core.errors import UserError
from megarl.data.plain_turns import PlainTokens
from megarl.data.turns import ChatTokens
from megarl.environments.message_end import message_end
from tests.chat_templates import FAMILIES
from tests.tiny_model import tiny_tokenizer

TALK = [{"role": "user", "content": "What is 2 + 2?"}]
LONGER = [*TALK, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And b?"}]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("messages", [TALK, LONGER], ids=["first turn", "later turn"])
def test_text_at_the_end_extends_the_last_message(family, messages):
    """The prompt with the text equals the rendering of the longer message."""
    tokenizer = FAMILIES[family].tokenizer()
    tokens = ChatTokens(tokenizer)
    ids = tokens.begin(messages)
    end = message_end(tokens.begin, messages, ids)
    assert end is not None
    *others, last = messages
    with_feedback = tokens.begin([*others, {**last, "content": f"{last['content']}\n\nNo."}])
    added = tokenizer("\n\nNo.", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode([*ids[:end], *added, *ids[end:]]) == tokenizer.decode(with_feedback)


def test_plain_prompt_ends_with_its_message():
    tokens = PlainTokens(tiny_tokenizer())
    ids = tokens.begin(TALK)
    assert message_end(tokens.begin, TALK, ids) == len(ids)


def test_end_is_unknown_if_the_tokens_differ():
    tokens = ChatTokens(FAMILIES["qwen3-coder"].tokenizer())
    ids = tokens.begin(TALK)
    assert message_end(tokens.begin, TALK, [*ids, ids[0]]) is None
    assert message_end(tokens.begin, (), ids) is None
    assert message_end(tokens.begin, [{"role": "user", "content": [{"type": "text", "text": "a"}]}], ids) is None


@pytest.mark.parametrize("error", [UserError, ZeroDivisionError])
def test_end_is_unknown_if_the_template_rejects_the_text(error):
    def begin(messages):
        raise error("too long")

    assert message_end(begin, TALK, [1, 2]) is None


@pytest.mark.parametrize("messages", [[{"role": "note", "content": "c"}], [*TALK, {"role": "note", "content": "c"}]])
def test_end_is_unknown_if_the_template_drops_the_message(messages):
    template = "{% for m in messages if m.role != 'note' %}{{ m.content }}{% endfor %}<|assistant|>"
    tokens = ChatTokens(tiny_tokenizer(chat_template=template))
    assert message_end(tokens.begin, messages, tokens.begin(messages)) is None
