"""Multi-turn conversations as token ids that never change once appended.

A sampled turn is never rendered again, because tokenizing its text may yield different ids and templates rewrite
earlier turns. Instead, the chat template renders a short conversation in which a sentinel stands for the turn, followed
by the new messages. The text that the template writes after the sentinel is appended to the turn; closing tags that the
turn already contains are omitted.

Special tokens in the text of messages are tokenized as ordinary text, because a tool result may repeat text that the
policy wrote.

If the template does not support tools, a system message describes them (`tool_formats.instructions`), and tool results
are user messages between <tool_response> and </tool_response>.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from megarl.core.errors import UserError
from megarl.data.image_parts import join_contents
from megarl.data.tool_calls import MalformedCall, ToolCall
from megarl.data.tool_formats import FORMATS, CallReader, format_of, instructions
from megarl.data.typed_tokens import typed_tokens
from megarl.models.tokenizer import response_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

SENTINEL = "megarlturn"
"""Text that stands for a sampled turn. Letters only, since templates and tokenizers may strip other characters."""

MARK = "megarlmark"
"""Text of a test message that shows whether the template renders messages with a given role."""

OTHER_ENDS = ("<|eom_id|>", "<|call|>", "<|return|>", "<|end|>")
"""Tokens that may end a turn instead of the one that the template writes. Llama 3 ends tool calls with <|eom_id|>.
gpt-oss ends tool calls with <|call|>, answers with <|return|> and reasoning with <|end|>."""

USER: Message = {"role": "user", "content": "a"}


class ChatTokens:
    """Token ids for conversations with one model. Raise a UserError if turns cannot be appended with this chat
    template, or it cannot present the tools.

    Args:
        tools: tool descriptions in the form that chat templates accept.
        tool_format: name of the tool-call format; None selects the chat template's own.
        key: the config key, for error messages.
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
                f"{key}: the tokenizer has no chat template, which is needed to render turns. Fix: use an instruct "
                "model, or add a chat_template.jinja to the model's folder"
            )
        self._tokenizer = tokenizer
        self._key = key
        self._typed = typed_tokens(tokenizer)
        self._special = {n: token.content for n, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._other_ends = [number for number, text in self._special.items() if text in OTHER_ENDS]
        self._shown: dict[str, bool] = {}
        self._template_tools: list[dict | Callable] | None = None
        self._instructions = ""
        self._closing: list[int] = []
        self._require_extension()
        self._native = format_of(tokenizer.get_chat_template(None, [dict(tool) for tool in tools] or None))
        self._calls: CallReader | None = None
        if tools or tool_format:
            self._calls = CallReader(tokenizer, FORMATS[self._place_tools(tools, tool_format)], tools)
        native = FORMATS.get(self._native or "")
        self._answers = CallReader(tokenizer, native) if native is not None and native.answer is not None else None

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the conversation, including the header of the assistant's turn. Raise a UserError if the
        chat template rejects the conversation."""
        if not messages:
            raise UserError(f"{self._key}: the conversation has no messages. Fix: begin it with a user message")
        self._require_open_turn(messages)
        written = self._with_instructions(self._carried(messages), self._instructions)
        text, refusal = self._render(written)
        if text is None:
            raise UserError(
                f"{self._key}: the model's chat template rejects the messages: {refusal}. Fix: change the messages "
                "that begin the conversation"
            )
        return self._encode(text)

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the description of the tools that `begin` renders. If the chat template writes the
        description, it is extracted from the rendered text and stripped of special tokens."""
        if self._template_tools is None:
            return self._with_instructions(messages, self._typed.text(self._instructions))
        carried = self._carried(messages)
        special = set(self._special.values())
        # Treat each special token as a unit, so that the comparison does not split it.
        unit = re.compile("|".join([*map(re.escape, sorted(special, key=len, reverse=True)), "."]), re.DOTALL)
        texts = (self._render(carried, with_tools=with_tools)[0] or "" for with_tools in (True, False))
        description = "".join(part for part in _inserted(*map(unit.findall, texts)) if part not in special)
        description = self._typed.text(description)
        return _with_system(messages, description.strip().removeprefix("system").strip())

    def extend(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int] | None:
        """Return the ids that follow a sampled turn. They consist of the closing tags that the turn lacks, the new
        messages and the header of the assistant's next turn. Return None if the template rejects the messages or does
        not render them after the turn; a new sample must then be started. Raise a UserError if the last message is the
        assistant's or there are no messages."""
        self._require_open_turn(messages)
        carried = self._carried(messages)
        if not all(message["role"] == "assistant" or self._shows(message["role"]) for message in carried):
            return None
        suffix = self._suffix(carried)
        return None if suffix is None else suffix[self._num_closed(turn_ids, suffix) :]

    def read(
        self, turn_ids: Sequence[int], context_ids: Sequence[int] = ()
    ) -> tuple[str, tuple[ToolCall | MalformedCall, ...]]:
        """Return a turn's text without special tokens, and its tool calls. If the model's format marks the text for the
        user, the text excludes reasoning and calls. `context_ids` are the ids before the turn. Some tokenizers need the
        last of them to decode the turn's first token."""
        answer = None if self._answers is None else self._answers.answer(turn_ids)
        text = response_text(self._tokenizer, context_ids, turn_ids) if answer is None else answer
        return text, () if self._calls is None else self._calls.read(turn_ids)

    def before_calls(self, turn_ids: Sequence[int]) -> str:
        """Return the text of a turn before its first call."""
        calls = self._calls
        return response_text(self._tokenizer, (), turn_ids) if calls is None else calls.text_before(turn_ids)

    def _require_open_turn(self, messages: Sequence[Message]) -> None:
        """Raise a UserError if there are no messages, or if the last one is the assistant's."""
        if not messages or messages[-1]["role"] == "assistant":
            raise UserError(
                f"{self._key}: the conversation ends with an assistant message, which the chat template would close "
                "before the next turn. Fix: end it with another message"
            )

    def _render(
        self, messages: Sequence[Message], for_answer: bool = True, with_tools: bool = True
    ) -> tuple[str | None, str]:
        """Return the conversation's text, or None and the template's error if it rejects the messages."""
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=self._template_tools if with_tools else None,
                add_generation_prompt=for_answer,
                tokenize=False,
            )
        except Exception as error:  # a template is a program and may raise any exception
            return None, str(error)
        return str(text), ""

    def _encode(self, text: str) -> list[int]:
        # Do not add special tokens: the template has already written the beginning-of-sequence token.
        return self._typed.ids(text)

    def _suffix(self, messages: Sequence[Message], for_answer: bool = True) -> list[int] | None:
        """Return the ids that the template writes after an assistant turn; None if it rejects the messages."""
        sentinel = SENTINEL
        while sentinel in str((messages, self._template_tools)):
            sentinel += "x"
        text, _ = self._render([USER, {"role": "assistant", "content": sentinel}, *messages], for_answer)
        if text is not None and sentinel in text:
            return self._after(text, text.index(sentinel) + len(sentinel))
        for calls in _calls_before(messages, sentinel):
            turn = {"role": "assistant", "content": "", "tool_calls": calls}
            text, _ = self._render([USER, turn, *messages], for_answer)
            ends = [str(self._tokenizer.decode(ids)) for ids in (self._closing, *([end] for end in self._other_ends))]
            if text is not None and sentinel in text:
                places = [text.find(end, text.rindex(sentinel)) for end in ends if end]
                if found := [place for place in places if place >= 0]:
                    return self._after(text, min(found))
        return None

    def _after(self, text: str, place: int) -> list[int] | None:
        """Return the ids of the text from position `place` on; None if the tokenizer merges text across that
        position."""
        if text[place:].startswith(tuple(self._special.values())):
            return self._encode(text[place:])
        before, all_ids = self._encode(text[:place]), self._encode(text)
        return all_ids[len(before) :] if all_ids[: len(before)] == before else None

    def _num_closed(self, turn_ids: Sequence[int], suffix: Sequence[int]) -> int:
        """Return the number of leading suffix ids that the turn already ends with. A closing token in the turn also
        counts for the text that the template writes before that token."""
        turn = list(turn_ids)
        most = min(len(turn), len(suffix))
        # Copying and comparing all slices would take seconds for long turns and observations.
        ends = (k for k in range(most, 0, -1) if turn[-k] == suffix[0] and turn[-1] == suffix[k - 1])
        overlap = next((k for k in ends if turn[-k:] == list(suffix[:k])), 0)
        shared = takewhile(self._is_same_end, zip(self._closing, suffix, strict=False))
        first = next((place for place, (_, token) in enumerate(shared) if token in self._special), None)
        if first is None or not turn or turn[-1] not in (suffix[first], *self._other_ends):
            return overlap
        return max(overlap, first + 1)

    def _is_same_end(self, pair: tuple[int, int]) -> bool:
        """Return whether two tokens both end a turn: the first closes the last turn of a conversation, and the second
        follows an earlier turn. gpt-oss's template ends these turns with different tokens."""
        last, earlier = pair
        return last == earlier or (last in self._other_ends and earlier in self._special)

    def _require_extension(self) -> None:
        """Raise a UserError if nothing can be appended to an assistant turn with this template."""
        remedy = (
            "add a different chat_template.jinja to the model's folder, for example from a later model of the same "
            "family"
        )
        text, refusal = self._render([USER, {"role": "assistant", "content": SENTINEL}, USER])
        problem = None
        if text is None:
            problem = f"rejects a second turn: {refusal}"
        elif text.count(SENTINEL) != 1:
            problem = "does not render assistant turns verbatim, so nothing can be appended to them"
        elif not self._shows("user"):
            problem = "renders a user message before the answer that precedes it"
        if problem is not None:
            raise UserError(f"{self._key}: the model's chat template {problem}. Fix: {remedy}")
        closing = self._suffix((), for_answer=False)
        if closing is None or self._suffix((USER,)) is None:
            raise UserError(
                f"{self._key}: the tokenizer merges the end of an answer with the text that the chat template writes "
                f"after it, so token ids would change. Fix: {remedy}, which ends turns with a special token"
            )
        self._closing = closing

    def _shows(self, role: str) -> bool:
        """Return whether the template renders a message with this role after the turn that precedes it."""
        if role not in self._shown:
            message = _complete({"role": role, "content": MARK}, 0)
            turns: list[Message] = [{"role": "assistant", "content": SENTINEL}]
            if role == "tool":
                turns += [{"role": "assistant", "content": "", "tool_calls": c} for c in _calls_before((message,), "a")]
            texts = [self._render([USER, turn, message])[0] for turn in turns]
            self._shown[role] = any(text is not None and MARK in text.split(SENTINEL)[-1] for text in texts)
        return self._shown[role]

    def _carried(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with marked special tokens, and with tool results in the form that the template
        accepts."""
        carried: list[Message] = []
        for place, message in enumerate(map(self._typed.mark, messages)):
            if message["role"] != "tool":
                is_after_answer = place > 0 and messages[place - 1]["role"] == "tool" and not self._shows("tool")
                if message["role"] == "user" and is_after_answer:
                    content = join_contents(carried.pop()["content"], "\n", message["content"])
                    message = {"role": "user", "content": content}
            elif self._shows("tool"):
                message = _complete(message, place)
            else:
                answer = join_contents("<tool_response>\n", message["content"], "\n</tool_response>")
                if place > 0 and messages[place - 1]["role"] == "tool":
                    answer = join_contents(carried.pop()["content"], "\n", answer)
                message = {"role": "user", "content": answer}
            carried.append(message)
        return carried

    def _place_tools(self, tools: Sequence[Mapping[str, Any]], name: str | None) -> str:
        """Decide where the tools are described. Return the name of the tool-call format."""
        if name is not None and name not in FORMATS:
            raise UserError(f"{self._key}.tool_format={name}: unknown format. Fix: use one of {', '.join(FORMATS)}")
        if not tools:
            return name or "tagged"
        without, _ = self._render([USER])
        self._template_tools = [self._typed.mark(tool) for tool in tools]
        text, _ = self._render([USER])
        has_place = text is not None and text != without
        if name is None and has_place and self._native is None:
            raise UserError(
                f"{self._key}.tool_format=null: the model's chat template writes tool calls in an unknown format. Fix: "
                f"set {self._key}.tool_format=tagged, which describes tools in a system message, or the format that "
                f"the model was trained on: {', '.join(name for name in FORMATS if name != 'tagged')}"
            )
        name = name or self._native or "tagged"
        if not has_place or name == "tagged":
            self._template_tools, self._instructions = None, self._typed.mark(instructions(tools, name))
        return name

    def _with_instructions(self, messages: Sequence[Message], instructions: str) -> list[Message]:
        """Return the messages with these tool instructions, whose special tokens may be marked. They are appended to
        the system message, which is added if missing. If the template does not support system messages, they precede
        the first message."""
        if not self._instructions:
            return list(messages)
        text, _ = self._render([{"role": "system", "content": self._instructions}, USER])
        if messages[0]["role"] == "system" or (text is not None and self._instructions in text):
            return _with_system(messages, instructions)
        first, *others = messages
        return [{**first, "content": join_contents(f"{instructions}\n\n", first["content"])}, *others]


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with the text appended to the system message, which is added if missing."""
    first, *others = messages
    if first["role"] == "system":
        return [{**first, "content": join_contents(first["content"], f"\n\n{text}")}, *others]
    return [{"role": "system", "content": text}, *messages]


def _inserted(text: Sequence[str], plain: Sequence[str]) -> Sequence[str]:
    """Remove the longest suffix, and then the longest prefix, that `text` shares with `plain`. Return the rest."""
    num_after = _num_equal(text[::-1], plain[::-1])
    num_before = _num_equal(text[: len(text) - num_after], plain[: len(plain) - num_after])
    return text[num_before : len(text) - num_after]


def _num_equal(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _complete(message: Message, number: int) -> Message:
    """Return a tool result with a call id, which some templates require; return any other message unchanged."""
    return {"tool_call_id": f"call{number:05}", "name": "tool", **message} if message["role"] == "tool" else message


def _calls_before(messages: Sequence[Message], argument: str) -> list[list[dict[str, Any]]]:
    """Return the calls that the leading tool results may answer, in both forms that templates accept: arguments as an
    object and as JSON text."""
    answers = list(takewhile(lambda message: message["role"] == "tool", messages))

    def call(answer: Message, arguments: Any) -> dict[str, Any]:
        function = {"name": answer["name"], "arguments": arguments}
        return {"id": answer["tool_call_id"], "type": "function", "function": function}

    forms = ({"a": argument}, f'{{"a": "{argument}"}}') if answers else ()
    return [[call(answer, arguments) for answer in answers] for arguments in forms]
