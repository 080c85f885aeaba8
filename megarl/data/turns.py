"""Conversations of several turns as token ids that never change once they are there.

A turn that was sampled is not rendered again: what a tokenizer makes of its text may be other ids, and templates
rewrite earlier turns. In its place stands a sentinel: the chat template renders a short conversation whose assistant
turn is the sentinel, followed by the new messages, and what it writes after the sentinel goes on after the turn. Of the
tags which close a turn only those are appended that the turn lacks.

Where the template has no place for tools, a system message describes them (`tool_formats.instructions`), and answers of
tools are what the user says, between <tool_response> and </tool_response>.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.core.errors import UserError
from megarl.data.tool_calls import MalformedCall, ToolCall
from megarl.data.tool_formats import FORMATS, CallReader, format_of, instructions
from megarl.models.tokenizer import response_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

SENTINEL = "megarlturn"
"""The text of the turn that stands for a sampled one. Letters only, as templates strip and tokenizers drop others."""

MARK = "megarlmark"
"""The text of the message that tells whether a template writes out what a role says."""

OTHER_ENDS = ("<|eom_id|>",)
"""Tokens that a turn may end with in place of the one that the template writes: Llama 3 ends a call of a tool so."""

USER: Message = {"role": "user", "content": "a"}


class ChatTokens:
    """The token ids of conversations of one model.

    tools        the descriptions of the tools, as chat templates take them
    tool_format  the name of the format of calls; None: the one of the chat template
    key          the config key that errors name

    Raises UserError for a chat template that no turn can be appended to, and for tools that it cannot carry.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_format: str | None = None,
        key: str = "environment",
    ):
        if tokenizer.chat_template is None:
            raise UserError(
                f"{key}: the tokenizer has no chat template, which says how turns are written; take an instruct model, "
                "or put a chat_template.jinja into the model's folder"
            )
        self._tokenizer = tokenizer
        self._key = key
        self._special = {n: token.content for n, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._other_ends = [number for number, text in self._special.items() if text in OTHER_ENDS]
        self._shown: dict[str, bool] = {}
        self._template_tools: list[dict[str, Any]] | None = None
        self._instructions = ""
        self._closing: list[int] = []
        self._require_extension()
        self._calls: CallReader | None = None
        if tools or tool_format:
            self._calls = CallReader(tokenizer, FORMATS[self._place_tools(tools, tool_format)])

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of the conversation with what leads to the assistant's turn. Raises UserError where the chat
        template refuses it."""
        if not messages:
            raise UserError(f"{self._key}: a conversation has no message; begin it with one of the user")
        written = self._with_instructions(self._carried(messages))
        text, refusal = self._render(written)
        if text is None:
            raise UserError(f"{self._key}: the model's chat template refuses the messages: {refusal}")
        return self._encode(text)

    def extend(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int] | None:
        """Returns the ids that follow a turn as it was sampled: its closing tags as far as it lacks them, the new
        messages, and what leads to the assistant's next turn. None: the template refuses them, or writes them
        elsewhere, so that a new sample has to begin."""
        carried = self._carried(messages)
        if not all(message["role"] == "assistant" or self._shows(message["role"]) for message in carried):
            return None
        suffix = self._suffix(carried)
        return None if suffix is None else suffix[self._num_closed(turn_ids, suffix) :]

    def read(
        self, turn_ids: Sequence[int], context_ids: Sequence[int] = ()
    ) -> tuple[str, tuple[ToolCall | MalformedCall, ...]]:
        """Returns a turn's text without special tokens, and the calls in it. context_ids: what stands before it, of
        which some tokenizers need the end to decode the turn's first token."""
        text = response_text(self._tokenizer, context_ids, turn_ids)
        return text, () if self._calls is None else self._calls.read(turn_ids)

    def before_calls(self, turn_ids: Sequence[int]) -> str:
        """Returns what a turn with calls says before the first of them."""
        return self._calls.text_before(turn_ids)

    def _render(self, messages: Sequence[Message], for_answer: bool = True) -> tuple[str | None, str]:
        """Returns the conversation's text, or None and why the template refuses it."""
        from jinja2.exceptions import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=self._template_tools,
                add_generation_prompt=for_answer,
                tokenize=False,
            )
        except (TemplateError, TypeError) as error:  # a template that adds a text to what is none raises TypeError
            return None, str(error)
        return text, ""

    def _encode(self, text: str) -> list[int]:
        # The template has written what a sequence begins with.
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _suffix(self, messages: Sequence[Message], for_answer: bool = True) -> list[int] | None:
        """Returns the ids of what the template writes after an assistant's turn; None where it refuses the messages."""
        sentinel = _unused(SENTINEL, (messages, self._template_tools))
        text, _ = self._render([USER, {"role": "assistant", "content": sentinel}, *messages], for_answer)
        if text is not None and sentinel in text:
            return self._after(text, text.index(sentinel) + len(sentinel))
        for calls in _calls_before(messages, sentinel):
            turn = {"role": "assistant", "content": "", "tool_calls": calls}
            text, _ = self._render([USER, turn, *messages], for_answer)
            closing = self._tokenizer.decode(self._closing)
            if text is not None and sentinel in text and closing and closing in text[text.rindex(sentinel) :]:
                return self._after(text, text.index(closing, text.rindex(sentinel)))
        return None

    def _after(self, text: str, place: int) -> list[int] | None:
        """Returns the ids of the text from a place on; None where the tokenizer joins what is before and after it."""
        if text[place:].startswith(tuple(self._special.values())):
            return self._encode(text[place:])
        before, whole = self._encode(text[:place]), self._encode(text)
        return whole[len(before) :] if whole[: len(before)] == before else None

    def _num_closed(self, turn_ids: Sequence[int], suffix: Sequence[int]) -> int:
        """Returns how many of the suffix's first ids the turn ends with. A closing token that the turn ends with counts
        with the text that the template writes before it."""
        turn = list(turn_ids)
        most = min(len(turn), len(suffix))
        found = next((k for k in range(most, 0, -1) if turn[-k:] == list(suffix[:k])), 0)
        shared = _num_shared(self._closing, suffix)
        first = next((i for i in range(shared) if suffix[i] in self._special), None)
        if first is None or not turn or turn[-1] not in (suffix[first], *self._other_ends):
            return found
        return max(found, first + 1)

    def _require_extension(self) -> None:
        """Raises UserError for a template after whose turns of the assistant nothing can be appended."""
        remedy = "give the model's folder another chat_template.jinja, such as that of a later model of its family"
        text, refusal = self._render([USER, {"role": "assistant", "content": SENTINEL}, USER])
        if text is None:
            raise UserError(f"{self._key}: the model's chat template refuses a second turn: {refusal}; {remedy}")
        if text.count(SENTINEL) != 1:
            raise UserError(
                f"{self._key}: the model's chat template does not write an answer out as it is, so that no turn can be "
                f"appended to it; {remedy}"
            )
        if not self._shows("user"):
            raise UserError(
                f"{self._key}: the model's chat template writes what the user says before the answer that it follows; "
                f"{remedy}"
            )
        closing = self._suffix((), for_answer=False)
        if closing is None or self._suffix((USER,)) is None:
            raise UserError(
                f"{self._key}: the tokenizer joins the end of an answer and what the chat template writes after it, so "
                f"that ids would change; {remedy}, which ends turns with a special token"
            )
        self._closing = closing

    def _shows(self, role: str) -> bool:
        """Returns whether the template writes what a role says after the turn before it."""
        if role not in self._shown:
            message = _complete({"role": role, "content": MARK}, 0)
            turns: list[Message] = [{"role": "assistant", "content": SENTINEL}]
            if role == "tool":
                turns += [{"role": "assistant", "content": "", "tool_calls": c} for c in _calls_before((message,), "a")]
            texts = [self._render([USER, turn, message])[0] for turn in turns]
            self._shown[role] = any(text is not None and MARK in text.split(SENTINEL)[-1] for text in texts)
        return self._shown[role]

    def _carried(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages with answers of tools as the template takes them."""
        carried: list[Message] = []
        for place, message in enumerate(messages):
            if message["role"] != "tool":
                is_after_answer = place > 0 and messages[place - 1]["role"] == "tool" and not self._shows("tool")
                if message["role"] == "user" and is_after_answer:
                    message = {"role": "user", "content": f"{carried.pop()['content']}\n{message['content']}"}
            elif self._shows("tool"):
                message = _complete(message, place)
            else:
                answer = f"<tool_response>\n{message['content']}\n</tool_response>"
                if place > 0 and messages[place - 1]["role"] == "tool":
                    answer = f"{carried.pop()['content']}\n{answer}"
                message = {"role": "user", "content": answer}
            carried.append(message)
        return carried

    def _place_tools(self, tools: Sequence[Mapping[str, Any]], name: str | None) -> str:
        """Settles where the tools are described. Returns the name of the format of calls."""
        if name is not None and name not in FORMATS:
            raise UserError(f"{self._key}.tool_format={name}: there is none of that name; give {', '.join(FORMATS)}")
        if not tools:
            return name or "tagged"
        known = format_of(self._tokenizer.get_chat_template(None, [dict(tool) for tool in tools]))
        has_place = self._has_place_for(tools)
        if name is None and has_place and known is None:
            raise UserError(
                f"{self._key}.tool_format: the model's chat template writes calls of tools in a format that is not "
                "known here; set it to tagged, which describes tools in a system message, or to the one of "
                f"{', '.join(name for name in FORMATS if name != 'tagged')} that the model knows"
            )
        name = name or known or "tagged"
        if has_place and name != "tagged":
            self._template_tools = [dict(tool) for tool in tools]
        else:
            self._instructions = instructions(tools, name)
        return name

    def _has_place_for(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        without, _ = self._render([USER])
        self._template_tools = [dict(tool) for tool in tools]
        text, _ = self._render([USER])
        self._template_tools = None
        return text is not None and text != without

    def _with_instructions(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages with what tells of the tools: at the end of the system message, or in one of its own; of
        a template without system messages, before what the user says first."""
        if not self._instructions:
            return list(messages)
        first, *others = messages
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{self._instructions}"}, *others]
        system = {"role": "system", "content": self._instructions}
        text, _ = self._render([system, USER])
        if text is not None and self._instructions in text:
            return [system, *messages]
        return [{**first, "content": f"{self._instructions}\n\n{first['content']}"}, *others]


def _complete(message: Message, number: int) -> Message:
    """Returns a tool's answer with an id of the call that it answers, which some templates ask for."""
    return {"tool_call_id": f"call{number:05}", "name": "tool", **message} if message["role"] == "tool" else message


def _calls_before(messages: Sequence[Message], argument: str) -> list[list[dict[str, Any]]]:
    """Returns the calls that the first messages may answer, as templates take them: with arguments as an object, and as
    JSON."""
    answers = []
    for message in messages:
        if message["role"] != "tool":
            break
        answers.append(message)
    if not answers:
        return []
    return [
        [
            {
                "id": answer["tool_call_id"],
                "type": "function",
                "function": {"name": answer["name"], "arguments": arguments},
            }
            for answer in answers
        ]
        for arguments in ({"a": argument}, f'{{"a": "{argument}"}}')
    ]


def _unused(word: str, where: Any) -> str:
    """Returns the word, with letters after it until it does not occur there."""
    text = str(where)
    while word in text:
        word += "x"
    return word


def _num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many ids both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(map(len, (first, second)))
    )
