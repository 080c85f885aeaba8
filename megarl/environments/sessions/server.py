"""The endpoint's HTTP server. It runs in the rollout process's event loop and has one session per rollout."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.core.files import MAX_DEPTH, is_deeper
from megarl.core.text import encodable
from megarl.environments.images import RolloutImages
from megarl.environments.sessions.completion import chunks, completion_body
from megarl.environments.sessions.errors import ApiError, invalid
from megarl.environments.sessions.request import ChatRequest, read_request, tools_key
from megarl.environments.sessions.session import (
    CLOSED,
    MIN_BYTES,
    ChatCompletion,
    Session,
    SessionLimits,
    TokensOf,
    TurnTokens,
)
from megarl.environments.text_length import num_tokens
from megarl.environments.transcript import Part

if TYPE_CHECKING:
    from aiohttp import web
    from transformers import PreTrainedTokenizerBase

    from megarl.environments.runner import Sampler

MODEL = "policy"
"""The policy's model name. Requests may use any name, because there is only one model."""

LARGEST_REQUEST, LONG_REQUEST = 64 * 2**20, 2**18
"""Maximum number of bytes in a request's body, and number of bytes above which a thread parses it. A short context
lowers the maximum (see `Session.check_num_bytes`)."""

MAX_LARGE_REQUESTS = 4
"""Maximum number of requests above MIN_BYTES that are received and parsed at the same time. It bounds memory, because
each may have up to LARGEST_REQUEST bytes."""

BODY_S = 60.0
"""Timeout in seconds for receiving a request's body."""

HEADERS_S = 60.0
"""Seconds within which a client must send the headers of its first request, or of the next request after a response."""

SEND_S = 60.0
"""Seconds within which a client must receive a response."""

IMAGE_BYTES = re.compile(rb"data:[\w/+.;=\\-]{,64};base64,[A-Za-z0-9+/=\\%]*", re.IGNORECASE)
"""Matches a data: URL in JSON, where slashes may be escaped. Its content may also be percent-encoded."""

MAX_TOOL_SETS = 128
"""Maximum number of cached renderers, one per distinct set of tools. Each task may have its own tools."""

SHUTDOWN_S = 2.0
RETRIES = "x-stainless-retry-count"
"""Header in which the openai client counts its retries of a request."""


class SessionServer:
    """Serves chat completions to agents. Each agent authenticates with its session's token."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tokens_of: TokensOf, sampling: Mapping[str, Any] | None = None
    ):
        """Create a server.

        Args:
            tokens_of: function that returns the renderer for a request's tools. The MAX_TOOL_SETS most recently used
                renderers are cached.
            sampling: the run's sampling parameters, keyed by API name. Requests may repeat these values.
        """
        self._tokenizer, self._sampling = tokenizer, sampling or {}
        self._tokens_of = tokens_of
        self._tokens: dict[str, TurnTokens] = {}
        self._sessions: dict[bytes, Session] = {}
        self._large_requests = asyncio.Semaphore(MAX_LARGE_REQUESTS)
        self._runner: web.AppRunner | None = None
        self.base_url = ""
        """Base URL for clients, set by `start`."""

    async def start(self, address: str) -> None:
        """Listen on a free port at this address."""
        from aiohttp import web

        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._create_completion)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/v1/models/{name:.+}", self._show_model)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S, keepalive_timeout=HEADERS_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, address, 0).start()
        self.base_url = f"http://{address}:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        """Close all sessions and connections."""
        for session in list(self._sessions.values()):
            await self.close(session)
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, sample: Sampler, limits: SessionLimits, seed: int, images: RolloutImages | None = None) -> Session:
        """Open a session. Its token is valid until the session is closed. `images` is None if messages cannot contain
        images."""
        images = images or RolloutImages(None)
        session = Session(self._tokens_with, partial(num_tokens, self._tokenizer), sample, limits, seed, images)
        self._sessions[_digest(session.token)] = session
        return session

    async def close(self, session: Session) -> list[Part]:
        """Close a session, revoke its token, and return its token sequences."""
        self._sessions.pop(_digest(session.token), None)
        return await session.close()

    def _tokens_with(self, tools: Sequence[Mapping[str, Any]]) -> TurnTokens:
        key = tools_key(tools)
        self._tokens[key] = self._tokens.pop(key, None) or self._tokens_of(tools)
        if len(self._tokens) > MAX_TOOL_SETS:
            del self._tokens[next(iter(self._tokens))]  # the least recently used one
        return self._tokens[key]

    def _session(self, request: web.Request) -> Session:
        """Return the session for a request. Raise ApiError if there is none. Sessions are looked up by the token's
        digest, so that response times reveal nothing about valid tokens."""
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(_digest(token)) if kind.lower() == "bearer" else None
        if session is None or not hmac.compare_digest(_digest(session.token), _digest(token)):
            raise CLOSED
        return session

    async def _create_completion(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        session = None
        try:
            session = self._session(request)
            chat, digest = await self._read(request, session)
            completion = await session.create_completion(chat, digest, request.headers.get(RETRIES, "0") != "0")
        except ApiError as error:
            if session is not None:
                session.counts[f"refused.{error.code}"] += 1
            return web.json_response(error.body, status=error.status)
        # Set before sending, because the session may be closed first.
        completion.turn.is_delivered = _is_connected(request)
        # Log-probs are decoded token by token, which takes seconds for a long turn.
        data = (
            await asyncio.to_thread(self._encode, completion, chat) if chat.logprobs else self._encode(completion, chat)
        )
        content_type = "text/event-stream" if chat.stream else "application/json"
        response = web.StreamResponse(headers={"Content-Type": content_type, "Cache-Control": "no-cache"})
        completion.turn.is_delivered = await _send(request, response, data)
        return response

    async def _read(self, request: web.Request, session: Session) -> tuple[ChatRequest, bytes]:
        """Return a request, with digests in place of images, and the digest of its body. Raise ApiError if it is
        malformed, too large, or arrives too slowly."""
        from aiohttp import web

        try:
            num_bytes = request.content_length
            _require_size(num_bytes or 0)
            if not session.receives_images:
                session.check_num_bytes(num_bytes or 0)
            is_large = num_bytes is None or num_bytes > MIN_BYTES  # chunked bodies have no length
            async with self._large_requests if is_large else nullcontext():
                async with asyncio.timeout(BODY_S):
                    data = await _body(request)
                # Parse short requests in the event loop: seeds depend on the order of requests, which threads would
                # change.
                parse = partial(self._parse, data, session)
                chat, digest = await asyncio.to_thread(parse) if len(data) > LONG_REQUEST else parse()
                return await session.read_images(chat), digest
        except TimeoutError:
            raise ApiError(408, "request_timeout", f"the request body did not arrive within {BODY_S:g} s") from None
        except web.RequestPayloadError as error:
            raise invalid("body", f"the request body cannot be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise invalid("body", f"the request body is not valid JSON: {error}") from error

    def _parse(self, data: bytearray, session: Session) -> tuple[ChatRequest, bytes]:
        session.check_num_bytes(len(data) - (_num_image_bytes(data) if session.receives_images else 0))
        body = encodable(json.loads(data))
        if is_deeper(body, MAX_DEPTH):
            raise invalid("body", f"the request body is nested deeper than {MAX_DEPTH} levels")
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
        return read_request(body, self._sampling), digest

    def _encode(self, completion: ChatCompletion, chat: ChatRequest) -> bytes:
        if not chat.stream:
            return json.dumps(completion_body(completion, chat, MODEL, self._tokenizer)).encode()
        events = [_event(chunk) for chunk in chunks(completion, chat, MODEL, self._tokenizer)]
        return b"".join([*events, b"data: [DONE]\n\n"])

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        return self._describe_model(request, lambda model: {"object": "list", "data": [model]})

    async def _show_model(self, request: web.Request) -> web.StreamResponse:
        return self._describe_model(request, lambda model: model)

    def _describe_model(self, request: web.Request, wrap: Any) -> web.StreamResponse:
        from aiohttp import web

        try:
            max_length = self._session(request).limits.context_length
        except ApiError as error:
            return web.json_response(error.body, status=error.status)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megarl", "max_model_len": max_length}
        return web.json_response(wrap(model))


async def _send(request: web.Request, response: web.StreamResponse, data: bytes) -> bool:
    """Send a response. Return whether the client received it. Close the connection if the client is too slow."""
    if not _is_connected(request):
        return False
    try:
        async with asyncio.timeout(SEND_S):
            await response.prepare(request)
            await response.write(data)
            await response.write_eof()
    except ConnectionError:
        return False
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        return False
    return True


async def _body(request: web.Request) -> bytearray:
    """Return the body. `request.read` would keep a copy in the request until the response has been sent."""
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        _require_size(len(body))
    return body


def _require_size(num_bytes: int) -> None:
    if num_bytes > LARGEST_REQUEST:
        message = f"the request body exceeds {LARGEST_REQUEST} bytes. Send less text, or fewer or smaller images"
        raise ApiError(413, "request_too_large", message)


def _is_connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def _num_image_bytes(data: bytearray) -> int:
    """Return the number of bytes in the images of a request. They are excluded from the limit because the JSON parser
    only copies them."""
    return sum(match.end() - match.start() for match in IMAGE_BYTES.finditer(data))


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
