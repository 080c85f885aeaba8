"""Client for OpenEnv servers (https://github.com/meta-pytorch/OpenEnv), using the WebSocket session protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.core.files import parse_json
from megarl.environments.protocol import Environment, Step, Task, Turn
from megarl.environments.tools import Message, as_text
from megarl.usercode.failures import ServiceUnavailable

UNAVAILABLE = (1001, 1012, 1013)
"""WebSocket close codes that mean the server is overloaded or restarting."""

REFUSED = "VALIDATION_ERROR"
"""Error code for an invalid action. The model receives the error message and may try again."""


class ServerError(RuntimeError):
    """An error response from the server, or a closed session. It fails the rollout."""


class OpenEnvEnvironment(Environment):
    """An environment on an OpenEnv server. Each rollout is one WebSocket session."""

    def __init__(
        self,
        url: str,
        action: str = "message",
        observation: str | None = None,
        reset: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        max_message_mib: int = 64,
    ):
        """
        Args:
            url: server URL with the scheme http, https, ws or wss.
            action: action field that receives the turn's text. `json`: parse the text as the whole action.
            observation: observation field that the model reads. null: the whole observation as JSON.
            reset: arguments for the environment's reset, in addition to the seed.
            timeout_s: time limit for each server response, in seconds.
            max_message_mib: maximum size of a server message in MiB.
        """
        self.url = f"{url.rstrip('/').removesuffix('/ws')}/ws"
        self.action, self.observation, self.arguments = action, observation, dict(reset or {})
        self.timeout_s, self.max_message_bytes = timeout_s, max_message_mib * 2**20
        self._session: Any = None
        self._socket: Any = None

    async def reset(self, task: Task) -> Sequence[Message]:
        await self._connect()
        data = await self._request("reset", {"seed": task.seed % 2**31, **self.arguments})
        return [*task.messages, {"role": "user", "content": self._read(data["observation"])}]

    async def step(self, turn: Turn) -> Step:
        try:
            action = parse_json(turn.text) if self.action == "json" else {self.action: turn.text}
        except ValueError as error:
            return Step(f"error: an action is a JSON object, but this is not valid JSON: {error}", reward=0.0)
        response = await self._exchange("step", action)
        if response["type"] == "error" and response["data"].get("code") == REFUSED:
            return Step(f"error: {as_text(response['data'])}", reward=0.0)
        data = _data(response)
        reward = data.get("reward")
        done = bool(data.get("done"))
        observation = None if done else self._read(data["observation"])
        return Step(observation, reward=None if reward is None else float(reward), done=done)

    async def state(self) -> Mapping[str, Any]:
        """Return the environment's state as reported by the server."""
        return await self._request("state")

    async def close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._session is not None:
            await self._session.close()

    def _read(self, observation: Mapping[str, Any]) -> str:
        return as_text(observation if self.observation is None else observation[self.observation])

    async def _connect(self) -> None:
        import aiohttp

        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(self.timeout_s))
        self._socket = await self._session.ws_connect(self.url, max_msg_size=self.max_message_bytes)

    async def _request(self, kind: str, data: Any = None) -> Mapping[str, Any]:
        return _data(await self._exchange(kind, data))

    async def _exchange(self, kind: str, data: Any = None) -> Mapping[str, Any]:
        await self._socket.send_json({"type": kind} if data is None else {"type": kind, "data": data})
        received = await self._socket.receive(self.timeout_s)
        if received.type.name != "TEXT":
            error = ServiceUnavailable if received.type.name != "CLOSE" or received.data in UNAVAILABLE else ServerError
            raise error(f"{self.url} ended the session: {received.type.name} {received.data or ''}".rstrip())
        return json.loads(received.data)


def _data(response: Mapping[str, Any]) -> Mapping[str, Any]:
    if response["type"] == "error":
        raise ServerError(f"{response['data'].get('code')}: {response['data'].get('message')}")
    return response["data"]
