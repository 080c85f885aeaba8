"""A session: one rollout of an agent that calls the policy over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from megarl.config.schema import Config
from megarl.core.completion import Completion
from megarl.core.errors import UserError
from megarl.data.images import ImageError
from megarl.data.tool_calls import MalformedCall, ToolCall
from megarl.environments.images import PlacedTokens, RolloutImages, Tokens
from megarl.environments.protocol import StopReason
from megarl.environments.sessions.errors import ApiError, invalid
from megarl.environments.sessions.messages import Message
from megarl.environments.sessions.recording import Recording, Turn, TurnLimit, TurnSlot
from megarl.environments.sessions.request import ChatRequest, tools_key
from megarl.environments.text_length import ROOM, is_longer, texts_of
from megarl.environments.transcript import Part

if TYPE_CHECKING:
    from megarl.environments.runner import Sampler


class TurnTokens(Tokens, Protocol):
    """Conversation renderer and turn parser: `ChatTokens` or `PlainTokens`."""

    def read(
        self, turn_ids: Sequence[int], context_ids: Sequence[int] = ()
    ) -> tuple[str, tuple[ToolCall | MalformedCall, ...]]: ...

    def before_calls(self, turn_ids: Sequence[int]) -> str: ...


BYTES_PER_TOKEN, MIN_BYTES = 16, 2**20
"""Maximum size of a request: this many bytes per token of the context length, but at least MIN_BYTES. The parser holds
Python's global interpreter lock, so all sessions wait for it: 0.1 s for 1 MiB of empty lists, and more than ten seconds
for 64 MiB."""

CLOSED = ApiError(401, "invalid_api_key", "no session is open for this api_key. The session may have been closed")

TokensOf = Callable[[Sequence[Mapping[str, Any]]], TurnTokens]
"""Function that returns the renderer for a set of tools, or raises UserError if the chat template rejects them."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits for one rollout.

    Attributes:
        max_turns: maximum total number of turns in all samples.
        turn_tokens: maximum number of tokens in a turn. None: all tokens that the sample has left.
        max_new_tokens: maximum number of tokens in a sample after its prompt.
        context_length: maximum number of tokens in a sample.
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
class ChatCompletion:
    """The response to a chat completion request.

    Attributes:
        message: the assistant message in the chat template format.
        finish_reason: "stop", "length" or "tool_calls".
        num_prompt_tokens: number of tokens before the turn.
    """

    turn: Turn
    message: Message
    finish_reason: str
    num_prompt_tokens: int


class Session:
    """One agent rollout: its access token, limits and recording."""

    def __init__(
        self,
        tokens_of: TokensOf,
        num_tokens: Callable[[str], int],
        sample: Sampler,
        limits: SessionLimits,
        seed: int,
        images: RolloutImages,
    ):
        """`num_tokens` returns the number of tokens in a text. It is called in a thread."""
        self.token = secrets.token_urlsafe(32)
        """The agent's api_key."""
        self.limits = limits
        self.stop_reason = StopReason.DONE
        """The limit that a request exceeded, or DONE."""
        self.error: BaseException | None = None
        """An error in the engine or in megarl itself. It must stop the run, because no agent can handle it."""
        self.recording = Recording()
        self.counts: Counter[str] = Counter()
        """Counts of ignored parameters (`ignored.NAME`), turns with malformed tool calls (`malformed_calls`), retries
        that received the original response (`replayed`), and rejected requests (`refused.CODE`)."""
        self._tokens_of, self._num_tokens, self._sample, self._seed = tokens_of, num_tokens, sample, seed
        self._images = images
        self._call_numbers = count()
        """Counter for tool call ids, which have nine alphanumeric characters as Mistral's chat templates require."""
        self._completions: dict[bytes, asyncio.Task[ChatCompletion]] = {}
        """Completions, keyed by the digest of the request body."""

    async def create_completion(self, request: ChatRequest, digest: bytes, is_retry: bool) -> ChatCompletion:
        """Return the completion for a request. A retry, which has the same digest as the earlier request, receives the
        earlier completion. Raise ApiError if the request is rejected."""
        if is_retry and digest in self._completions:
            self.counts["replayed"] += 1
        else:
            self._completions[digest] = asyncio.create_task(self._sample_turn(request))
        task = self._completions[digest]
        # A closed connection must not cancel the turn, because the client may retry the request.
        await asyncio.wait([task])
        # An agent may send rejected requests in a loop, and their errors would keep the requests in memory.
        if (task.cancelled() or task.exception() is not None) and self._completions.get(digest) is task:
            del self._completions[digest]
        if task.cancelled():
            raise CLOSED
        error = task.exception()
        if error is not None and not isinstance(error, ApiError):  # the agent gets an error, and the run fails
            self.error = error
            raise self._engine_error() from error
        return task.result()

    async def close(self) -> list[Part]:
        """Cancel pending turns and return the session's token sequences."""
        pending = [task for task in self._completions.values() if not task.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        return self.recording.parts()

    async def _sample_turn(self, request: ChatRequest) -> ChatCompletion:
        for name in request.ignored:
            self.counts[f"ignored.{name}"] += 1
        if self.error is not None:
            raise self._engine_error()
        if self.recording.num_turns >= self.limits.max_turns:
            raise self._turn_limit_reached()
        await self._require_room(request)
        try:
            tokens = self._tokens_of(request.tools)
            key, max_turns = tools_key(request.tools), self.limits.max_turns
            slot = await self.recording.reserve(PlacedTokens(tokens, self._images), key, request.messages, max_turns)
            if not slot.ids:
                self.recording.release(slot)
                raise invalid("messages", "the chat template renders the messages as empty text")
        except ApiError:
            raise
        except TurnLimit:  # concurrent requests have taken the last turns since the check above
            raise self._turn_limit_reached() from None
        except Exception as error:  # any error that the agent's messages cause
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            raise invalid("messages", reason) from error
        try:
            completion = await self._complete(slot, request)
        except BaseException:
            self.recording.release(slot)
            raise
        try:
            return await self._record(request, tokens, slot, completion)
        except Exception as error:  # any error that the turn's text causes
            self.recording.release(slot)
            raise ApiError(500, "turn_failed", f"the turn cannot be processed: {error}") from error

    @property
    def receives_images(self) -> bool:
        return self._images.are_supported

    async def read_images(self, request: ChatRequest) -> ChatRequest:
        """Return the request with digests in place of images. Raise ApiError for an image that cannot be used."""
        try:
            return replace(request, messages=await self._images.read(request.messages))
        except Exception as error:  # a damaged file can raise almost any exception
            fix = f". Fix: {error.fix}" if isinstance(error, ImageError) else f" ({type(error).__name__})"
            raise invalid("messages", f"an image in the messages: {error}{fix}") from None

    def check_num_bytes(self, num_bytes: int) -> None:
        """Raise ApiError if the body, excluding images, is too large for the context. Called before parsing."""
        most = max(MIN_BYTES, BYTES_PER_TOKEN * self.limits.context_length)
        if num_bytes > most:
            raise self._context_exceeded(f"a request of {num_bytes} bytes, more than {most}")

    async def _require_room(self, request: ChatRequest) -> None:
        """Reject long requests before they are rendered and tokenized, which takes seconds for several megabytes.
        Templates may drop parts of a request, so the limit for its text is several times the context length."""
        most = ROOM * self.limits.context_length
        texts = [text for message in request.messages for text in texts_of(message)]
        texts += map(json.dumps, request.tools)
        # The template writes at least one token per message.
        left = most - len(request.messages) - self._images.num_tokens(request.messages)
        if await is_longer(texts, left, self._num_tokens):
            raise self._context_exceeded(f"more than {most} tokens")

    async def _complete(self, slot: TurnSlot, request: ChatRequest) -> Completion:
        limit, seed = self._token_limit(slot), turn_seed(self._seed, slot.number)
        limit = min(limit, request.max_tokens or limit)
        return await self._sample(slot.ids, limit, seed, request.stop, slot.tokens.images)

    def _token_limit(self, slot: TurnSlot) -> int:
        """Return the maximum number of tokens in a turn. Raise ApiError if the sample is full."""
        limits = self.limits
        left = min(limits.max_new_tokens - slot.num_response_tokens, limits.context_length - len(slot.ids))
        if left > 0:
            return min(left, limits.turn_tokens or left)
        raise self._context_exceeded(f"{len(slot.ids)} tokens, {slot.num_response_tokens} of them after the prompt")

    def _turn_limit_reached(self) -> ApiError:
        self.stop_reason = StopReason.MAX_TURNS
        message = f"the rollout has used all of its {self.limits.max_turns} turns (environment.max_turns)"
        return ApiError(400, "turn_limit_reached", message)

    def _context_exceeded(self, size: str) -> ApiError:
        self.stop_reason = StopReason.MAX_TOKENS
        return ApiError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {self.limits.context_length} tokens (rollout.context_length), "
            f"{self.limits.max_new_tokens} of them after the prompt (rollout.max_new_tokens). However, your messages "
            f"resulted in {size}.",
            "messages",
        )

    async def _record(
        self, request: ChatRequest, tokens: TurnTokens, slot: TurnSlot, completion: Completion
    ) -> ChatCompletion:
        text_ids = completion.text_ids.tolist()
        text, calls = await asyncio.to_thread(tokens.read, text_ids, slot.ids)
        valid = [call for call in calls if isinstance(call, ToolCall)]
        if len(valid) < len(calls):
            self.counts["malformed_calls"] += 1
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if valid and request.parse_tool_calls and len(valid) == len(calls):
            message["content"] = tokens.before_calls(text_ids)
            message["tool_calls"] = [_tool_call(call, f"call{next(self._call_numbers):05}") for call in valid]
        elif completion.stop:
            message["content"] = text[: text.rfind(completion.stop)] if completion.stop in text else text
        reason = "tool_calls" if "tool_calls" in message else completion.finish_reason
        turn = self.recording.add(slot, completion, message, text)
        finish_reason = "length" if completion.finish_reason == "length" else reason
        return ChatCompletion(turn, message, finish_reason, len(slot.ids))

    def _engine_error(self) -> ApiError:
        return ApiError(500, "engine_failed", f"the engine failed: {self.error}")


def turn_seed(seed: int, number: int) -> int:
    """Return the seed for a turn of a rollout with this seed."""
    return seed if number == 0 else random.Random(repr((seed, number))).getrandbits(31)


def _tool_call(call: ToolCall, default_id: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": call.id or default_id, "type": "function", "function": function}
