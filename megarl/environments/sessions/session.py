"""A session: one rollout of an agent that reaches the policy by HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.core.types import Completion
from megarl.data.tool_calls import MalformedCall, ToolCall
from megarl.environments.protocol import StopReason
from megarl.environments.sessions.errors import ApiError, invalid
from megarl.environments.sessions.messages import Message
from megarl.environments.sessions.recording import Place, RecordedSample, Recording, Tokens, Turn
from megarl.environments.sessions.request import ChatRequest, tools_key

if TYPE_CHECKING:
    from megarl.environments.runner import Sampler


class TurnTokens(Tokens, Protocol):
    """What renders conversations and reads turns: `ChatTokens` or `PlainTokens`."""

    def read(
        self, turn_ids: Sequence[int], context_ids: Sequence[int] = ()
    ) -> tuple[str, tuple[ToolCall | MalformedCall, ...]]: ...

    def before_calls(self, turn_ids: Sequence[int]) -> str: ...


CLOSED = ApiError(401, "invalid_api_key", "no session is open under this api_key, or it has been closed")

TokensOf = Callable[[Sequence[Mapping[str, Any]]], TurnTokens]
"""Returns what renders conversations with these tools. Raises UserError for tools that the model has no place for."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The limits of a rollout.

    max_turns        turns of the policy, of all its samples together
    turn_tokens      most tokens of a turn; None: what the sample has left
    max_new_tokens   most tokens of a sample after its prompt
    context_length   most tokens of a sample
    """

    max_turns: int
    turn_tokens: int | None
    max_new_tokens: int
    context_length: int

    @classmethod
    def of(cls, config: Config) -> SessionLimits:
        environment, rollout = config.environment, config.rollout
        return cls(environment.max_turns, environment.turn_tokens, rollout.max_new_tokens, rollout.context_length)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answered request. message: as chat templates take it; num_prompt_tokens: those before the turn."""

    turn: Turn
    message: Message
    finish_reason: str
    num_prompt_tokens: int


class Session:
    """The rollout that a token stands for: what its agent may do, and the record of it."""

    def __init__(self, tokens_of: TokensOf, sample: Sampler, limits: SessionLimits, seed: int):
        self.token = secrets.token_urlsafe(32)
        """The secret by which the agent is known, its api_key."""
        self.limits = limits
        self.stop_reason = StopReason.DONE
        """Why no further turn was possible, if a request came to a limit."""
        self.error: BaseException | None = None
        """An error of the engine, or of ours, which no agent can mend: it is to end the run."""
        self.recording = Recording()
        self.counts: Counter[str] = Counter()
        """How often a parameter was ignored, `ignored.NAME`, calls were malformed, `malformed_calls`, a request came
        again and got its first answer, `replayed`, and why requests were refused, `refused.CODE`."""
        self._tokens_of, self._sample, self._seed = tokens_of, sample, seed
        self._call_numbers = count()
        """Numbers of calls, for ids of the nine letters and digits that Mistral's chat templates ask for."""
        self._answers: dict[bytes, asyncio.Task[Answer]] = {}

    async def answer(self, request: ChatRequest, body: Any, is_retry: bool) -> Answer:
        """Return the answer to a request. Raises ApiError for one that is refused.

        body       that of the request
        is_retry   whether its client sends it again, as the answer did not come: it then gets the same one
        """
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
        if is_retry and digest in self._answers:
            self.counts["replayed"] += 1
        else:
            self._answers[digest] = asyncio.create_task(self._take_turn(request))
        turn = self._answers[digest]
        # A client that ends its connection does not end the turn, for which it may ask again.
        await asyncio.wait([turn])
        if turn.cancelled():
            raise CLOSED
        error = turn.exception()
        if error is not None and not isinstance(error, ApiError):  # the agent gets an answer, and the run the error
            self.error = error
            raise self._failure() from error
        return turn.result()

    async def close(self) -> list[RecordedSample]:
        """End the session. Return what is to be trained on."""
        under_way = [task for task in self._answers.values() if not task.done()]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        return self.recording.samples()

    async def _take_turn(self, request: ChatRequest) -> Answer:
        for name in request.ignored:
            self.counts[f"ignored.{name}"] += 1
        if self.error is not None:
            raise self._failure()
        if self.recording.num_turns >= self.limits.max_turns:
            self.stop_reason = StopReason.MAX_TURNS
            said = f"the rollout has had its {self.limits.max_turns} turns (environment.max_turns)"
            raise ApiError(400, "turn_limit_reached", said)
        try:
            tokens = self._tokens_of(request.tools)
            place = self.recording.place(tokens, tools_key(request.tools), request.messages)
        except UserError as error:
            raise invalid("messages", str(error)) from error
        try:
            completion = await self._complete(place, request)
        except BaseException:
            self.recording.give_back(place)
            raise
        return self._record(request, tokens, place, completion)

    async def _complete(self, place: Place, request: ChatRequest) -> Completion:
        room = self._room(place)
        seed = self._seed if place.number == 0 else random.Random(repr((self._seed, place.number))).getrandbits(31)
        return await self._sample(place.ids, min(room, request.max_tokens or room), seed, request.stop)

    def _room(self, place: Place) -> int:
        """Return the tokens that a turn may have. Raises ApiError if there are none."""
        limits = self.limits
        left = min(limits.max_new_tokens - place.num_response_tokens, limits.context_length - len(place.ids))
        if left > 0:
            return min(left, limits.turn_tokens or left)
        self.stop_reason = StopReason.MAX_TOKENS
        raise ApiError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {limits.context_length} tokens (rollout.context_length), "
            f"{limits.max_new_tokens} of them after the prompt (rollout.max_new_tokens). However, your messages "
            f"resulted in {len(place.ids)} tokens, {place.num_response_tokens} of them after the prompt.",
            "messages",
        )

    def _record(self, request: ChatRequest, tokens: TurnTokens, place: Place, completion: Completion) -> Answer:
        shown = completion.text_ids.tolist()
        text, calls = tokens.read(shown, place.ids)
        is_malformed = any(isinstance(call, MalformedCall) for call in calls)
        if is_malformed:
            self.counts["malformed_calls"] += 1
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls and request.reads_calls and not is_malformed:
            message["content"] = tokens.before_calls(shown)
            message["tool_calls"] = [_call(call, f"call{next(self._call_numbers):05}") for call in calls]
        elif completion.stop:
            message["content"] = text[: text.rfind(completion.stop)] if completion.stop in text else text
        reason = "tool_calls" if "tool_calls" in message else completion.finish_reason
        turn = self.recording.add(place, completion, message, text)
        return Answer(turn, message, "length" if completion.finish_reason == "length" else reason, len(place.ids))

    def _failure(self) -> ApiError:
        return ApiError(500, "engine_failed", f"the policy cannot answer: {self.error}")


def _call(call: ToolCall | MalformedCall, number: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": call.id or number, "type": "function", "function": function}
