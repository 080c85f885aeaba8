"""Conversations as token ids, by a model's chat template, and which of these ids the assistant says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.core.errors import UserError
from megarl.data.row import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MARK = "\ue000"
"""A response of Unicode's private use, which no template looks into: it shows what a template writes around one."""


def as_messages(said: str | list[Message], role: str) -> list[Message]:
    """Returns the messages as they are, and plain text as one message of the role."""
    return [{"role": role, "content": said}] if isinstance(said, str) else said


def after_system_prompt(system_prompt: str | None, prompt: str | list[Message], place: str) -> str | list[Message]:
    """Returns the prompt after a message of the system, or as it is without one. Raises UserError for a prompt that has
    such a message already."""
    if system_prompt is None:
        return prompt
    messages = as_messages(prompt, "user")
    if any(message["role"] == "system" for message in messages):
        raise UserError(
            f"{place}: the prompt has a system message of its own beside that of key system_prompt; remove one of them"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], place: str, *, for_answer: bool
) -> list[int]:
    """Returns the messages' token ids by the model's chat template.

    for_answer   whether what leads to the assistant's next turn follows them
    place        the row that the error names

    Raises UserError where the template refuses the messages.
    """
    from jinja2.exceptions import TemplateError

    try:
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=for_answer, return_dict=False)
    except TemplateError as error:
        raise UserError(f"{place}: the model's chat template refuses the messages: {error}") from error


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[Message], chat_template: bool, place: str
) -> list[int]:
    """Returns the prompt's token ids: by the chat template with what leads to the assistant's answer, or without the
    template of the text as it is. Raises UserError for a prompt without tokens."""
    if chat_template:
        ids = render(tokenizer, as_messages(prompt, "user"), place, for_answer=True)
    else:
        ids = tokenizer(plain(prompt, place))["input_ids"]
    if not ids:
        raise UserError(f"{place}: the prompt has no tokens; give it text, or drop the row")
    return ids


def plain(said: str | list[Message], place: str) -> str:
    """Returns plain text as it is. Raises UserError for messages, which only a chat template can write out."""
    if not isinstance(said, str):
        raise UserError(f"{place}: a list of messages needs data.chat_template: true, or give plain text")
    return said


def conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], place: str, first: int = 0
) -> tuple[list[int], list[bool]]:
    """Returns the token ids up to the end of the last turn of the assistant, and for each a flag whether the assistant
    says it: in its turns from message number `first` on, the end of the sequence included if the template ends a turn
    with it.

    A turn is what its message adds to the conversation before it. Raises UserError where there is no such turn, or
    where the template writes earlier turns otherwise once a later one is there, so that no id belongs to one turn.
    """
    ids: list[int] = []
    said: list[bool] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < first:
            continue
        before = render(tokenizer, messages[:number], place, for_answer=True)
        after = render(tokenizer, messages[: number + 1], place, for_answer=False)
        for longer, shorter in ((before, ids), (after, before)):
            _require_beginning(longer, shorter, number, place)
        num_said = _up_to_end(after[len(before) :], tokenizer.eos_token_id)
        said += [False] * (len(before) - len(ids)) + [True] * num_said
        ids = after
        said += [False] * (len(ids) - len(said))
    if True not in said:
        raise UserError(f"{place}: the assistant says nothing there that could be learned; drop the row")
    length = len(said) - said[::-1].index(True)
    return ids[:length], said[:length]


def response_span(text: str, marked: str, response: str) -> tuple[int, int, int] | None:
    """Returns where a response begins and ends in a conversation's text, and how many of its first characters the text
    lacks, as templates may trim what is said. None where the template has changed more.

    text     what the chat template writes of the conversation that ends with the response
    marked   what it writes with MARK in the response's place
    """
    before, _, after = marked.rpartition(MARK)
    start, stop = len(before), len(text) - len(after)
    if not (text.startswith(before) and text.endswith(after) and text[start:stop] in response):
        return None
    return start, stop, response.index(text[start:stop])


def _up_to_end(turn: Sequence[int], eos: int | None) -> int:
    """Returns how many ids of a turn are sampled: templates go on after the end of the sequence, with a line break."""
    ends = [i for i, token in enumerate(turn) if token == eos]
    return ends[-1] + 1 if ends else len(turn)


def _require_beginning(longer: Sequence[int], shorter: Sequence[int], number: int, place: str) -> None:
    if list(longer[: len(shorter)]) != list(shorter):
        raise UserError(
            f"{place}: the chat template's ids of message {number + 1} do not begin with those of the conversation "
            "before it, so that they cannot be told apart (it changes or leaves out parts of earlier turns, or the "
            "tokenizer joins the two); drop the row, or split it after its first answer"
        )
