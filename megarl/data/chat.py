"""Conversations as token ids, rendered by the model's chat template, with a mask for the assistant's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megarl.core.errors import UserError
from megarl.data.row import Content, Message, as_messages
from megarl.data.typed_tokens import typed_tokens
from megarl.models.tokenizer import opening_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MARK = "\ue000"
"""Private-use character that stands in for a response, to find the text that a template writes around it."""


def add_system_prompt(system_prompt: str | None, prompt: Content, place: str) -> Content:
    """Prepend the system prompt, if any, to a prompt. Raise a UserError if the prompt already has a system message."""
    if system_prompt is None:
        return prompt
    messages = as_messages(prompt, "user")
    if any(message["role"] == "system" for message in messages):
        raise UserError(
            f"{place}: the prompt already has a system message, but data.system_prompt is set. Fix: remove the "
            "message, or set data.system_prompt=null"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], place: str, *, for_answer: bool
) -> list[int]:
    """Render messages with the model's chat template and return their token ids. Special tokens in the text of messages
    are tokenized as ordinary text, except in assistant messages. Raise a UserError if the template rejects the
    messages, or if one of them is already rendered.

    Args:
        for_answer: whether to append the header of the assistant's next turn.
        place: the location of the row, for error messages.
    """
    bos: Any = tokenizer.bos_token
    if bos and any(str(message["content"]).startswith(bos) for message in messages):
        raise UserError(
            f"{place}: a message starts with the beginning-of-sequence token {bos}, so it is already rendered. Fix: "
            "remove the token, or set data.chat_template=false for rendered prompts"
        )
    typed = typed_tokens(tokenizer)
    marked = typed.mark_others(messages)
    if marked == list(messages):
        return _apply(tokenizer, messages, place, add_generation_prompt=for_answer, return_dict=False)
    return typed.ids(_apply(tokenizer, marked, place, add_generation_prompt=for_answer, tokenize=False))


def render_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], place: str) -> str:
    """Render messages as text, with typed special tokens marked (see `TypedTokens`). Raise a UserError if the template
    rejects them."""
    return _apply(tokenizer, typed_tokens(tokenizer).mark_others(messages), place, tokenize=False)


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], place: str, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:  # a template is a program and may raise any exception
        raise UserError(
            f"{place}: the model's chat template rejects the messages: {' '.join(str(error).split())}. Fix: change the "
            "messages, or drop the row"
        ) from error


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Content, chat_template: bool, place: str) -> list[int]:
    """Return the prompt's token ids. With a chat template, they end with the header of the assistant's turn. Raise a
    UserError if the prompt renders as empty text, or if the template would close the prompt's last message as a
    complete turn."""
    if chat_template:
        messages = as_messages(prompt, "user")
        if messages and messages[-1]["role"] == "assistant":
            raise UserError(
                f"{place}: the prompt ends with an assistant message, which the chat template would close before the "
                "response. Fix: drop the message, or render the conversation up to the response as text and set "
                "data.chat_template=false"
            )
        ids = render(tokenizer, messages, place, for_answer=True)
    else:
        ids = opening_ids(tokenizer, plain(prompt, place))
    if not ids:
        raise UserError(f"{place}: the prompt renders as empty text. Fix: add text, or drop the row")
    return ids


def plain(content: Content, place: str) -> str:
    """Return plain text unchanged. Raise a UserError for messages, which need a chat template."""
    if not isinstance(content, str):
        raise UserError(
            f"{place}: a list of messages requires a chat template. Fix: set data.chat_template=true, or use plain text"
        )
    return content


def conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], place: str, first: int = 0
) -> tuple[list[int], list[bool]]:
    """Return a conversation's token ids up to the end of the last assistant turn, and a mask for the assistant's
    tokens.

    The mask is True for tokens of assistant turns from message `first` on. This includes the end-of-sequence token if
    the template ends a turn with it. A turn consists of the tokens that its message adds to the preceding conversation.
    Raise a UserError if there is no such turn, or the template renders earlier turns differently once a later one is
    present, so tokens cannot be attributed to turns.
    """
    ids: list[int] = []
    mask: list[bool] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < first:
            continue
        before = render(tokenizer, messages[:number], place, for_answer=True)
        after = render(tokenizer, messages[: number + 1], place, for_answer=False)
        for longer, shorter in ((before, ids), (after, before)):
            _require_prefix(longer, shorter, number, place)
        turn = after[len(before) :]
        # Exclude text that templates append after the EOS token, such as a newline, because it is never sampled.
        ends = [place for place, token in enumerate(turn, start=1) if token == tokenizer.eos_token_id]
        mask += [False] * (len(before) - len(ids)) + [True] * (ends[-1] if ends else len(turn))
        ids = after
        mask += [False] * (len(ids) - len(mask))
    if True not in mask:
        raise UserError(f"{place}: the conversation has no assistant tokens to train on. Fix: drop the row")
    length = len(mask) - mask[::-1].index(True)
    return ids[:length], mask[:length]


def with_response(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Content,
    response: Content,
    prompt_ids: list[int],
    chat_template: bool,
    place: str,
) -> tuple[list[int], list[bool]]:
    """Return the token ids of the prompt and a response, and a mask for the response's tokens, as in `conversation`. A
    plain response ends with an EOS token, like a sampled one. prompt_ids: the result of the function `prompt_ids`."""
    if chat_template:
        prompt_messages, answer = as_messages(prompt, "user"), as_messages(response, "assistant")
        if answer[0]["role"] != "assistant":
            raise UserError(
                f"{place}: the response begins with a message of role {answer[0]['role']!r}. Fix: begin it with an "
                "assistant message"
            )
        return conversation(tokenizer, [*prompt_messages, *answer], place, first=len(prompt_messages))
    ids = tokenizer(plain(response, place), add_special_tokens=False)["input_ids"]
    ids = ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]
    return prompt_ids + ids, [False] * len(prompt_ids) + [True] * len(ids)


def response_span(text: str, marked: str, response: str) -> tuple[int, int, int] | None:
    """Locate a response in the text of a conversation.

    Args:
        text: the rendered conversation, which ends with the response.
        marked: the same conversation rendered with MARK in place of the response.

    Returns:
        The start and end of the response in `text`, and the number of leading characters that the template dropped,
        such as whitespace or reasoning; None if the template also changed the rest of the response.
    """
    before, _, after = marked.rpartition(MARK)
    start, stop = len(before), len(text) - len(after)
    if not (text.startswith(before) and text.endswith(after) and text[start:stop] in response):
        return None
    # Search from the end: the same text may also occur earlier, in reasoning that the template drops.
    return start, stop, response.rindex(text[start:stop])


def _require_prefix(longer: Sequence[int], shorter: Sequence[int], number: int, place: str) -> None:
    if list(longer[: len(shorter)]) != list(shorter):
        raise UserError(
            f"{place}: the tokens up to message {number + 1} do not start with the tokens of the messages before it, "
            "so tokens cannot be attributed to turns. The chat template may change or drop parts of earlier turns, or "
            "the tokenizer may merge tokens across the boundary. Fix: drop the row, or split it after its first answer"
        )
