"""Sessions with a server that speaks the OpenEnv protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
from aiohttp import web

from megarl.environments import Step
from megarl.environments.registry import check_environment
from tests.unit.environments.shipped.turns import question, task, turn


class Guessing:
    """A number guessing game on the server, with OpenEnv's message format."""

    def answer(self, kind: str, data: Any) -> dict[str, Any]:
        if kind == "reset":
            self.steps, self.number = 0, Random(data["seed"]).randint(1, data.get("high", 9))
            return self._observation("Guess a number.", None, False)
        if kind == "state":
            return {"type": "state", "data": {"episode_id": "e", "step_count": self.steps}}
        if set(data) != {"message"} or not data["message"].isdigit():
            return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": []}}
        if data["message"] == "0":
            return {"type": "error", "data": {"message": "broke", "code": "EXECUTION_ERROR"}}
        self.steps += 1
        guess = int(data["message"])
        text = "Right." if guess == self.number else "More." if guess < self.number else "Less."
        return self._observation(text, float(guess == self.number), guess == self.number)

    def _observation(self, text: str, reward: float | None, done: bool) -> dict[str, Any]:
        return {"type": "observation", "data": {"observation": {"prompt": text}, "reward": reward, "done": done}}


@asynccontextmanager
async def server() -> AsyncIterator[tuple[str, list[str]]]:
    """Run the server on a free port. Yield its URL and a growing list of the messages that end sessions."""
    ends: list[str] = []

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket, environment = web.WebSocketResponse(), Guessing()
        await socket.prepare(request)
        async for message in socket:
            asked = json.loads(message.data)
            if asked["type"] == "close":
                ends.append(asked["type"])
                break
            if asked.get("data", {}).get("message") == "99":
                await socket.close()
                break
            await socket.send_json(environment.answer(asked["type"], asked.get("data")))
        return socket

    app = web.Application()
    app.router.add_get("/ws", session)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", ends
    finally:
        await runner.cleanup()


def played(*texts: str, seed: int = 0, messages=(), **options: Any) -> list[Any]:
    """Return the opening of a session, the steps after the given turns, and the final state."""

    async def play() -> list[Any]:
        async with server() as (url, ends):
            options_of_all = {"url": url, "observation": "prompt", **options}
            environment = check_environment("openenv", options_of_all)(**options_of_all)
            found: list[Any] = [await environment.reset(task(messages, seed=seed))]
            try:
                found += [await environment.step(turn(text)) for text in texts]
                found.append(await environment.state())
            finally:
                await environment.close()
            assert ends == ["close"]
            return found

    return asyncio.run(play())


def test_session_from_reset_to_close():
    number = Random(5).randint(1, 9)
    opening, less, right, state = played("10", str(number), seed=5)
    assert opening == [{"role": "user", "content": "Guess a number."}]
    assert less == Step("Less.", reward=0.0)
    assert right == Step(reward=1.0, done=True)
    assert state == {"episode_id": "e", "step_count": 2}


def test_prompt_and_reset_arguments_are_passed_on():
    opening, step, _ = played("1", messages=question("Guess well."), reset={"high": 1})
    assert [message["content"] for message in opening] == ["Guess well.", "Guess a number."]
    assert step.done


def test_rejected_action_is_reported_to_the_model():
    step = played("ten")[1]
    assert step.observation.startswith("error: ") and "Invalid message" in step.observation and step.reward == 0.0


def test_json_actions_and_whole_observations():
    opening, step, broken, _ = played('{"message": "10"}', "{", action="json", observation=None)
    assert opening[0]["content"] == '{"prompt": "Guess a number."}'
    assert step == Step('{"prompt": "Less."}', reward=0.0)
    assert broken.observation.startswith("error: an action is a JSON object")


def test_environment_error_fails_the_rollout():
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR: broke"):
        played("0")


def test_session_closed_by_the_server_fails_the_rollout():
    with pytest.raises(RuntimeError, match="ended the session: CLOSE"):
        asyncio.run(end_by_server())


async def end_by_server() -> None:
    async with server() as (url, _):
        environment = check_environment("openenv", {"url": url})(url)
        await environment.reset(task())
        try:
            await environment.step(turn("99"))
        finally:
            await environment.close()
