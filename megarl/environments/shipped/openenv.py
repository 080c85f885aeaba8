"""A client of OpenEnv servers: https://github.com/meta-pytorch/OpenEnv, its protocol of sessions by WebSocket."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.environments.protocol import Environment, Step, Task, Turn
from megarl.environments.tools import Message

REFUSED = "VALIDATION_ERROR"
"""The code of an answer that says that an action is none of the environment's, which is for the model to read."""


class ServerError(RuntimeError):
    """An answer of the server that the rollout cannot go on after."""


class OpenEnvEnvironment(Environment):
    """An environment of an OpenEnv server. A rollout is a session of its own, over one WebSocket."""

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
        url              http://…, https://…, ws://… or wss://… of the server
        action           the field of an action that is the text of a turn; `json`: the text is the action, as JSON
        observation      the field of an observation that is for the model, where it is text; null: all of it, as JSON
        reset            further arguments of the environment's reset, beside the seed
        timeout_s        for each answer of the server
        max_message_mib  the largest message that it may send
        """
        self.url = f"{url.rstrip('/').removesuffix('/ws')}/ws"
        self.action, self.observation, self.arguments = action, observation, dict(reset or {})
        self.timeout_s, self.max_message_bytes = timeout_s, max_message_mib * 2**20
        self._session: Any = None
        self._socket: Any = None

    async def reset(self, task: Task) -> Sequence[Message]:
        await self._connect()
        data = await self._ask("reset", {"seed": task.seed % 2**31, **self.arguments})
        return [*task.messages, {"role": "user", "content": self._read(data["observation"])}]

    async def step(self, turn: Turn) -> Step:
        try:
            action = json.loads(turn.text) if self.action == "json" else {self.action: turn.text}
        except json.JSONDecodeError as error:
            return Step(f"error: an action is a JSON object, and this is none: {error}", reward=0.0)
        answer = await self._exchange("step", action)
        if answer["type"] == "error" and answer["data"].get("code") == REFUSED:
            return Step(f"error: {_text(answer['data'])}", reward=0.0)
        data = _data(answer)
        reward = data.get("reward")
        done = bool(data.get("done"))
        observation = None if done else self._read(data["observation"])
        return Step(observation, reward=None if reward is None else float(reward), done=done)

    async def state(self) -> Mapping[str, Any]:
        """Return the state of the environment, as the server tells it."""
        return await self._ask("state")

    async def close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._session is not None:
            await self._session.close()

    def _read(self, observation: Mapping[str, Any]) -> str:
        return _text(observation if self.observation is None else observation[self.observation])

    async def _connect(self) -> None:
        import aiohttp

        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(self.timeout_s))
        self._socket = await self._session.ws_connect(self.url, max_msg_size=self.max_message_bytes)

    async def _ask(self, kind: str, data: Any = None) -> Mapping[str, Any]:
        return _data(await self._exchange(kind, data))

    async def _exchange(self, kind: str, data: Any = None) -> Mapping[str, Any]:
        await self._socket.send_json({"type": kind} if data is None else {"type": kind, "data": data})
        received = await self._socket.receive(self.timeout_s)
        if received.type.name != "TEXT":
            raise ServerError(f"{self.url} ended the session: {received.type.name} {received.data or ''}".rstrip())
        return json.loads(received.data)


def _data(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    if answer["type"] == "error":
        raise ServerError(f"{answer['data'].get('code')}: {answer['data'].get('message')}")
    return answer["data"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
