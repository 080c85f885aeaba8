"""The record of a session: sequences that grow by turns, as they were sampled, and which of them a request goes on.

A program sends the whole conversation with every request. It is compared, message by message, with what the session
has answered. Where it goes on from a turn, what is new is appended to that turn's ids, which never change, and the
sample grows. A sample grows in one direction only: a second request that goes on from the same turn, or one that goes
on from an earlier turn, begins a sample whose prompt is the ids up to there. What goes on from no turn, as the context
was summed up, a turn was rewritten, or another agent speaks, begins a sample that the chat template renders.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from megarl.core.types import Completion
from megarl.environments.sessions.messages import Message, canonical
from megarl.environments.transcript import Transcript


class Tokens(Protocol):
    """What renders conversations: `ChatTokens` or `PlainTokens`."""

    def begin(self, messages: Sequence[Message]) -> list[int]: ...

    def extend(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int] | None: ...


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """A sequence of a session, to train on.

    transcript   its tokens
    text         of its last turn, calls of tools included
    messages     its conversation, for people to read
    first_turn   the session's number of its first turn
    last_turn    and of its last one
    """

    transcript: Transcript
    text: str
    messages: tuple[Message, ...]
    first_turn: int
    last_turn: int


@dataclass(slots=True, eq=False)
class Turn:
    """A turn, after the context that it answers. end: the tokens of its sample up to its own last one."""

    number: int
    context_ids: Sequence[int]
    context: Sequence[Message]
    completion: Completion
    answer: Message
    text: str
    end: int
    is_delivered: bool = True


@dataclass(slots=True, eq=False)
class _Growing:
    """A sequence under way. is_claimed: whether its next turn is being sampled."""

    ids: list[int]
    turns: list[Turn] = field(default_factory=list)
    earlier: tuple[Message, ...] = ()
    """The messages before those of its first turn, whose ids it begins with."""
    is_claimed: bool = False


@dataclass(slots=True, eq=False)
class Place:
    """The place of a turn that is to be sampled: after which ids, and as which sample.

    ids                 all that the turn follows
    num_response_tokens   those of them that are not the sample's prompt
    number              the turn's, in the order of requests
    """

    ids: list[int]
    num_response_tokens: int
    number: int
    _sample: _Growing
    _context_ids: Sequence[int]
    _context: Sequence[Message]
    _key: bytes


class Recording:
    """The sequences of one session."""

    def __init__(self) -> None:
        self._samples: list[_Growing] = []
        self._turns: dict[bytes, list[tuple[_Growing, Turn]]] = defaultdict(list)
        """The turns by the conversation that ends with them."""
        self.num_turns = 0
        self._numbers = count()
        self.num_context_tokens = self.num_cached_tokens = 0
        self.counts: Counter[str] = Counter()
        """How samples after the first have begun: `forked` with the ids of another one, `rewritten` where the
        conversation has a turn of the assistant that was not sampled so, `fresh` without any."""

    def place(self, tokens: Tokens, tools_key: str, messages: Sequence[Message]) -> Place:
        """Return where the policy's answer to these messages belongs. Raises UserError where the chat template refuses
        them. The place is then filled with `add`, or given back."""
        keys = _keys(tools_key, messages)
        for known in range(len(messages), 0, -1):
            if keys[known - 1] in self._turns:
                found = self._after(tokens, self._turns[keys[known - 1]], messages[known:], keys[-1])
                if found is not None:
                    return found
        if self._samples:
            is_rewritten = any(message["role"] == "assistant" for message in messages)
            self.counts["rewritten" if is_rewritten else "fresh"] += 1
        prompt_ids = tokens.begin(messages)
        return self._begin(prompt_ids, (), prompt_ids, messages, keys[-1])

    def _after(
        self, tokens: Tokens, turns: Sequence[tuple[_Growing, Turn]], messages: Sequence[Message], key: bytes
    ) -> Place | None:
        """Return the place of the answer to messages that follow a turn: of one of these, the latest that still is the
        end of its sample. None: the chat template cannot write them after it."""
        ends = [pair for pair in turns if not pair[0].is_claimed and pair[0].turns[-1] is pair[1]]
        sample, turn = (ends or turns)[-1]
        follows = tokens.extend(turn.completion.token_ids.tolist(), messages)
        if follows is None:
            return None
        if ends:
            sample.is_claimed = True
            num_response_tokens = len(sample.ids) - len(sample.turns[0].context_ids) + len(follows)
            return self._new_place([*sample.ids, *follows], num_response_tokens, sample, follows, messages, key)
        self.counts["forked"] += 1
        earlier = [*sample.earlier]
        for before in sample.turns[: sample.turns.index(turn) + 1]:
            earlier += [*before.context, before.answer]
        prompt_ids = [*sample.ids[: turn.end], *follows]
        return self._begin(prompt_ids, tuple(earlier), prompt_ids, messages, key)

    def _begin(
        self,
        prompt_ids: list[int],
        earlier: tuple[Message, ...],
        context_ids: Sequence[int],
        messages: Sequence[Message],
        key: bytes,
    ) -> Place:
        sample = _Growing(ids=[], earlier=earlier, is_claimed=True)
        self._samples.append(sample)
        return self._new_place(prompt_ids, 0, sample, context_ids, messages, key)

    def _new_place(
        self,
        ids: list[int],
        num_response_tokens: int,
        sample: _Growing,
        context_ids: Sequence[int],
        messages: Sequence[Message],
        key: bytes,
    ) -> Place:
        self.num_turns += 1
        return Place(ids, num_response_tokens, next(self._numbers), sample, context_ids, messages, key)

    def give_back(self, place: Place) -> None:
        """Give up a place: nothing was sampled there."""
        place._sample.is_claimed = False
        self.num_turns -= 1
        if not place._sample.turns:
            self._samples.remove(place._sample)

    def add(self, place: Place, completion: Completion, answer: Message, text: str) -> Turn:
        """Append a turn that was sampled at its place. answer: the message that the program gets; text: the whole
        turn."""
        sample = place._sample
        sample.ids = [*place.ids, *completion.token_ids.tolist()]
        turn = Turn(place.number, place._context_ids, place._context, completion, answer, text, len(sample.ids))
        sample.turns.append(turn)
        sample.is_claimed = False
        self._turns[_next_key(place._key, answer)].append((sample, turn))
        if place.number:
            self.num_context_tokens += len(place.ids)
            self.num_cached_tokens += completion.num_cached_tokens
        return turn

    def samples(self) -> list[RecordedSample]:
        """Return the sequences, in the order of their first turns. A last turn that never reached its program is left
        out: nothing came of it."""
        recorded = []
        for sample in self._samples:
            turns = sample.turns[:]
            while turns and not turns[-1].is_delivered:
                turns.pop()
            if turns:
                recorded.append(_recorded(sample.earlier, turns))
        return sorted(recorded, key=lambda sample: sample.first_turn)


def _recorded(earlier: Sequence[Message], turns: Sequence[Turn]) -> RecordedSample:
    transcript = Transcript(turns[0].context_ids)
    messages = [*earlier]
    for turn in turns:
        if transcript.num_turns:
            transcript.add_context(turn.context_ids)
        transcript.add_turn(turn.completion)
        messages += [*turn.context, turn.answer]
    last = turns[-1]
    return RecordedSample(transcript, last.text, tuple(messages), turns[0].number, last.number)


def _keys(tools_key: str, messages: Sequence[Message]) -> list[bytes]:
    """Return a key of each beginning of a conversation, up to each of its messages."""
    keys, key = [], hashlib.sha256(tools_key.encode()).digest()
    for message in messages:
        key = _next_key(key, message)
        keys.append(key)
    return keys


def _next_key(key: bytes, message: Message) -> bytes:
    return hashlib.sha256(key + canonical(message).encode()).digest()
