"""The endpoint: an HTTP server in the loop of the process that runs rollouts, with a session for each of them."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.environments.sessions.answer import completion, events
from megarl.environments.sessions.errors import ApiError, invalid
from megarl.environments.sessions.recording import RecordedSample
from megarl.environments.sessions.request import read_request, tools_key
from megarl.environments.sessions.session import CLOSED, Session, SessionLimits, TokensOf, TurnTokens

if TYPE_CHECKING:
    from aiohttp import web
    from transformers import PreTrainedTokenizerBase

    from megarl.environments.runner import Sampler

MODEL = "policy"
"""The name of the model. A request may give any other: there is one policy."""

LARGEST_REQUEST = 64 * 2**20
SHUTDOWN_S = 2.0
RETRIES = "x-stainless-retry-count"
"""The header in which the openai client says how often it has sent a request before."""


class SessionServer:
    """Answers the requests of agents, each of which is known by its session's token."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tokens_of: TokensOf, sampling: Mapping[str, Any] | None = None
    ):
        """
        tokens_of   returns what renders conversations with a request's tools; it is asked once for each set of them
        sampling    the run's temperature, top_p …, by the names of the API: what an agent's program may say, too
        """
        self._tokenizer, self._sampling = tokenizer, sampling or {}
        self._tokens_of = tokens_of
        self._tokens: dict[str, TurnTokens] = {}
        self._sessions: dict[bytes, Session] = {}
        self._runner: web.AppRunner | None = None
        self.base_url = ""
        """The URL for clients, once the server has been started."""
        self.counts: Counter[str] = Counter()
        """The sums of closed sessions' counts."""

    async def start(self, address: str) -> None:
        """Listen on this address of the machine, on a port that is free."""
        from aiohttp import web

        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/v1/models/{name:.+}", self._show_model)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, address, 0).start()
        self.base_url = f"http://{address}:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        """End all connections, and sessions with them."""
        for session in list(self._sessions.values()):
            await self.close(session)
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, sample: Sampler, limits: SessionLimits, seed: int) -> Session:
        """Return a new session, whose token is valid from now on."""
        session = Session(self._tokens_with, sample, limits, seed)
        self._sessions[_digest(session.token)] = session
        return session

    async def close(self, session: Session) -> list[RecordedSample]:
        """End a session, whose token is no longer valid. Return what is to be trained on."""
        self._sessions.pop(_digest(session.token), None)
        samples = await session.close()
        self.counts += session.counts + session.recording.counts
        return samples

    def _tokens_with(self, tools: Sequence[Mapping[str, Any]]) -> TurnTokens:
        key = tools_key(tools)
        if key not in self._tokens:
            self._tokens[key] = self._tokens_of(tools)
        return self._tokens[key]

    def _session(self, request: web.Request) -> Session:
        """Return the session of a request. Raises ApiError if there is none. Sessions are found by a digest, the time
        of which tells nothing of a token that is nearly right."""
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(_digest(token)) if kind.lower() == "bearer" else None
        if session is None or not hmac.compare_digest(_digest(session.token), _digest(token)):
            raise CLOSED
        return session

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        session = None
        try:
            session = self._session(request)
            body = await _read(request)
            chat = read_request(body, self._sampling)
            answer = await session.answer(chat, body, request.headers.get(RETRIES, "0") != "0")
        except ApiError as error:
            if session is not None:
                session.counts[f"refused.{error.code}"] += 1
            return web.json_response(error.body, status=error.status)
        if chat.stream:
            sent = [_event(event) for event in events(answer, chat, MODEL, self._tokenizer)]
            kind, data = "text/event-stream", b"".join([*sent, b"data: [DONE]\n\n"])
        else:
            kind = "application/json"
            data = json.dumps(completion(answer, chat, MODEL, self._tokenizer)).encode()
        response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
        answer.turn.is_delivered = await _deliver(request, response, data)
        return response

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        return self._about(request, lambda model: {"object": "list", "data": [model]})

    async def _show_model(self, request: web.Request) -> web.StreamResponse:
        return self._about(request, lambda model: model)

    def _about(self, request: web.Request, wrap: Any) -> web.StreamResponse:
        from aiohttp import web

        try:
            longest = self._session(request).limits.context_length
        except ApiError as error:
            return web.json_response(error.body, status=error.status)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megarl", "max_model_len": longest}
        return web.json_response(wrap(model))


async def _read(request: web.Request) -> Any:
    from aiohttp import web

    try:
        return json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(413, "request_too_large", f"a request has at most {LARGEST_REQUEST} bytes") from None
    except ValueError as error:
        raise invalid("body", f"the request is no JSON: {error}") from error


async def _deliver(request: web.Request, response: web.StreamResponse, data: bytes) -> bool:
    """Send an answer. Return whether there was still somebody to take it."""
    if request.transport is None or request.transport.is_closing():
        return False
    try:
        await response.prepare(request)
        await response.write(data)
        await response.write_eof()
    except ConnectionError:
        return False
    return True


def _event(event: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
