"""The recording of a session: token sequences that grow turn by turn, exactly as sampled.

Clients send the whole conversation with every request. The recording matches it, message by message, against the
session's turns. If the conversation continues a turn, its new messages are appended to the token ids of that turn's
sample. Recorded token ids never change. A sample has no branches. If a request continues an earlier turn, or a turn
that another request already continues, it starts a new sample whose prompt is the token ids up to that turn. A
conversation that continues no turn, because the context was summarized, a turn was rewritten or another agent started,
starts a new sample rendered by the chat template.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from megarl.core.completion import Completion
from megarl.environments.images import PlacedTokens
from megarl.environments.message_end import message_end
from megarl.environments.sessions.messages import Message, canonical
from megarl.environments.states import state_of
from megarl.environments.transcript import Context, Part, Transcript


@dataclass(slots=True, eq=False)
class Turn:
    """A sampled turn.

    Attributes:
        number: number of the turn within the session, in the order of requests.
        context: tokens between the sample's previous turn and this one.
        messages: the context in the form of messages.
        message: the assistant message that the client received.
        text: text of the turn, including tool calls.
        end: number of tokens in the sample up to the end of this turn.
        is_delivered: whether the client received the turn.
    """

    number: int
    context: Context
    messages: Sequence[Message]
    completion: Completion
    message: Message
    text: str
    end: int
    is_delivered: bool = True


@dataclass(slots=True, eq=False)
class _OpenSample:
    """A growing token sequence.

    Attributes:
        inherited: messages of the earlier sample whose token ids this sequence starts with, if any.
        is_reserved: whether its next turn is being sampled.
        find_message_end: as in Part.
    """

    tokens: Context
    turns: list[Turn] = field(default_factory=list)
    inherited: tuple[Message, ...] = ()
    is_reserved: bool = False
    find_message_end: Callable[[], int | None] | None = None


@dataclass(slots=True, eq=False)
class TurnSlot:
    """A reserved position for a turn that is about to be sampled.

    Attributes:
        tokens: all tokens before the turn.
        num_response_tokens: number of these tokens that follow the sample's prompt.
        number: number of the turn within the session, in the order of requests.
    """

    tokens: Context
    num_response_tokens: int
    number: int
    _sample: _OpenSample
    _context: Context
    _messages: Sequence[Message]
    _key: bytes

    @property
    def ids(self) -> Sequence[int]:
        return self.tokens.ids


class TurnLimit(Exception):
    """Raised if a session has no turns left."""


class Recording:
    """Token sequences of one session."""

    def __init__(self) -> None:
        self._samples: list[_OpenSample] = []
        self._turns: dict[bytes, list[tuple[_OpenSample, Turn]]] = defaultdict(list)
        """Turns, keyed by a hash of the conversation that ends with them."""
        self.num_turns = 0
        self._numbers = count()
        self._reserving = asyncio.Lock()
        """Makes concurrent requests reserve turns in the order of their arrival."""
        self.num_context_tokens = self.num_cached_tokens = 0
        self.counts: Counter[str] = Counter()
        """Number of samples after the first, by origin: `forked` from the token ids of another sample, `rewritten` if
        the conversation has assistant messages that were not sampled, `fresh` if it has none."""

    async def reserve(
        self, tokens: PlacedTokens, tools_key: str, messages: Sequence[Message], max_turns: int
    ) -> TurnSlot:
        """Reserve a slot for the turn that responds to these messages. Fill it with `add` or free it with `release`.
        Messages are tokenized in a thread. Raise TurnLimit if the session has `max_turns` turns, including reserved
        ones, and UserError if the chat template rejects the messages."""
        keys = _prefix_keys(tools_key, messages)
        async with self._reserving:
            if self.num_turns >= max_turns:
                raise TurnLimit
            slot = await self._reserve(tokens, keys, messages)
            if not slot._sample.turns:
                begin = tokens.begin
                find_end = partial(message_end, lambda changed: begin(changed).ids, messages, slot.ids)
                slot._sample.find_message_end = find_end
            return slot

    async def _reserve(self, tokens: PlacedTokens, keys: Sequence[bytes], messages: Sequence[Message]) -> TurnSlot:
        for length in range(len(messages), 0, -1):
            if keys[length - 1] in self._turns:
                slot = await self._continue(tokens, self._turns[keys[length - 1]], messages[length:], keys[-1])
                if slot is not None:
                    return slot
        if self._samples:
            is_rewritten = any(message["role"] == "assistant" for message in messages)
            self.counts["rewritten" if is_rewritten else "fresh"] += 1
        prompt = await asyncio.to_thread(tokens.begin, messages)
        return self._start_sample(prompt, await asyncio.to_thread(tokens.shown, messages), keys[-1])

    async def _continue(
        self, tokens: PlacedTokens, turns: Sequence[tuple[_OpenSample, Turn]], messages: Sequence[Message], key: bytes
    ) -> TurnSlot | None:
        """Reserve a slot after `messages` that continue one of `turns`, preferably the latest turn that ends its
        sample. Return None if the chat template cannot append the messages."""
        ends = [pair for pair in turns if not pair[0].is_reserved and pair[0].turns[-1] is pair[1]]
        sample, turn = (ends or turns)[-1]
        context = await asyncio.to_thread(tokens.extend, turn.completion.token_ids.tolist(), messages)
        if context is None:
            return None
        if ends:
            return self._new_slot(sample, context, messages, key)
        self.counts["forked"] += 1
        inherited = [*sample.inherited]
        for previous in sample.turns[: sample.turns.index(turn) + 1]:
            inherited += [*previous.messages, previous.message]
        return self._start_sample(sample.tokens.before(turn.end) + context, messages, key, tuple(inherited))

    def _start_sample(
        self, prompt: Context, messages: Sequence[Message], key: bytes, inherited: tuple[Message, ...] = ()
    ) -> TurnSlot:
        sample = _OpenSample(Context([]), inherited=inherited)
        self._samples.append(sample)
        return self._new_slot(sample, prompt, messages, key)

    def _new_slot(self, sample: _OpenSample, context: Context, messages: Sequence[Message], key: bytes) -> TurnSlot:
        sample.is_reserved = True
        self.num_turns += 1
        tokens = sample.tokens + context
        num_response_tokens = len(tokens.ids) - len((sample.turns[0].context if sample.turns else tokens).ids)
        return TurnSlot(tokens, num_response_tokens, next(self._numbers), sample, context, messages, key)

    def release(self, slot: TurnSlot) -> None:
        """Free a slot that received no turn."""
        slot._sample.is_reserved = False
        self.num_turns -= 1
        if not slot._sample.turns:
            self._samples.remove(slot._sample)

    def add(self, slot: TurnSlot, completion: Completion, message: Message, text: str) -> Turn:
        """Record a sampled turn in its slot. The client receives `message`; `text` also includes tool calls."""
        sample, key = slot._sample, _next_key(slot._key, message)
        sample.tokens = slot.tokens + Context(completion.token_ids.tolist())
        end = len(sample.tokens.ids)
        turn = Turn(slot.number, slot._context, slot._messages, completion, message, text, end)
        sample.turns.append(turn)
        sample.is_reserved = False
        self._turns[key].append((sample, turn))
        if slot.number:
            self.num_context_tokens += len(slot.ids)
            self.num_cached_tokens += completion.num_cached_tokens
        return turn

    def parts(self) -> list[Part]:
        """Return the sequences in the order of their first turns, without trailing turns that were not delivered."""
        recorded = []
        for sample in self._samples:
            turns = sample.turns[:]
            while turns and not turns[-1].is_delivered:
                turns.pop()
            if turns:
                recorded.append(_part(sample, turns))
        return sorted(recorded, key=lambda part: part.first_turn)


def _part(sample: _OpenSample, turns: Sequence[Turn]) -> Part:
    """Return the sample as a Part that contains only these turns."""
    transcript = Transcript(turns[0].context.ids, turns[0].context.images)
    messages = [*sample.inherited]
    for turn in turns:
        if transcript.num_turns:
            transcript.add_context(turn.context)
        transcript.add_turn(turn.completion)
        messages += [*turn.messages, turn.message]
    states = [(turn.number, state_of(turn.messages)) for turn in turns]
    return Part(transcript, turns[-1].text, tuple(messages), states, sample.find_message_end)


def _prefix_keys(tools_key: str, messages: Sequence[Message]) -> list[bytes]:
    """Return one key per prefix of the conversation."""
    keys, key = [], hashlib.sha256(tools_key.encode()).digest()
    for message in messages:
        key = _next_key(key, message)
        keys.append(key)
    return keys


def _next_key(key: bytes, message: Message) -> bytes:
    return hashlib.sha256(key + canonical(message).encode()).digest()
