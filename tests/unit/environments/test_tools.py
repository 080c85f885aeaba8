"""Tool descriptions, and successful and failing tool calls."""

from __future__ import annotations

import asyncio
import threading
from typing import Literal

import pytest
from transformers.utils import get_json_schema

from megarl.core.errors import UserError
from megarl.environments import Environment, MalformedCall, ToolCall, tool
from megarl.environments.tools import Toolbox, describe
from tests.timing import HANG_S, WAIT_S


def weather(city: str, days: int = 1, unit: Literal["c", "f"] = "c", hours: list[int] | None = None) -> str:
    """
    Tells the weather.

    Args:
        city: The city to look at,
            with its country.
        days: The number of days.
        unit: The unit of degrees.
        hours: The hours of the day.
    """
    return f"{city}: {days} days in {unit}"


def test_description_matches_the_schema_of_transformers():
    expected, found = get_json_schema(weather)["function"], describe("weather", weather)["function"]
    assert (found["name"], found["description"]) == (expected["name"], expected["description"])
    assert found["parameters"]["required"] == expected["parameters"]["required"] == ["city"]
    for name, argument in expected["parameters"]["properties"].items():
        described = found["parameters"]["properties"][name]
        assert described["description"] == argument["description"]
        if name != "hours":
            assert described["type"] == argument["type"]
    assert found["parameters"]["properties"]["unit"]["enum"] == ["c", "f"]
    assert {"type": "array", "items": {"type": "integer"}} in found["parameters"]["properties"]["hours"]["anyOf"]
    assert found["parameters"]["properties"]["days"]["default"] == 1


UNBLOCKED = threading.Event()


class Kitchen(Environment):
    @tool
    def cook(self, minutes: int) -> dict:
        """Cooks."""
        return {"done": minutes}

    @tool
    async def wait(self) -> str:
        """Waits."""
        await asyncio.sleep(HANG_S)

    @tool
    def block(self) -> str:
        """Blocks."""
        UNBLOCKED.wait()

    @tool
    def burn(self) -> str:
        """Burns."""
        raise OSError("smoke")

    def secret(self) -> str:
        return "no tool"


@pytest.mark.parametrize(
    ("call", "status", "content"),
    [
        (ToolCall("cook", {"minutes": 3}), "ok", '{"done": 3}'),
        (ToolCall("cook", {"minutes": "4"}), "ok", '{"done": 4}'),
        (ToolCall("cook", {"minutes": "much"}), "bad_arguments", "arguments of cook: minutes: "),
        (ToolCall("cook", {"minutes": 3, "salt": 1}), "bad_arguments", "salt: Extra inputs"),
        (ToolCall("cook", {}), "bad_arguments", "minutes: Field required"),
        (ToolCall("secret", {}), "unknown_tool", "there is no tool 'secret'; the tools are block, burn, cook, wait"),
        (ToolCall("burn", {}), "raised", "burn raised OSError: smoke"),
        (ToolCall("wait", {}), "timed_out", "wait did not return within 0.05 s"),
        (ToolCall("block", {}), "timed_out", "block did not return within 0.05 s"),
        (MalformedCall("{", "no JSON"), "malformed", "this is not a valid tool call: no JSON"),
    ],
)
def test_every_call_outcome_gives_a_message(call, status, content):
    UNBLOCKED.clear()
    toolbox = Toolbox(Kitchen(), timeout_s=0.05 if status == "timed_out" else WAIT_S)

    async def run() -> list[dict]:
        try:
            return await toolbox.call_all([call])
        finally:
            UNBLOCKED.set()

    [message] = asyncio.run(run())
    assert dict(toolbox.counts) == {status: 1}
    assert message["role"] == "tool" and content in message["content"]
    assert message["content"].startswith("error: ") == (status != "ok")
    assert toolbox.has_hung_thread == (call == ToolCall("block", {}))


def test_turn_without_tool_call_ends_the_rollout():
    from megarl.environments import Step, Turn

    kitchen = Kitchen()
    turn = Turn([1], "", "stop", (ToolCall("cook", {"minutes": 1}, "c1"),))
    step = asyncio.run(kitchen.step(turn))
    assert step.observation == [{"role": "tool", "name": "cook", "content": '{"done": 1}', "tool_call_id": "c1"}]
    assert not step.done
    assert asyncio.run(kitchen.step(Turn([1], "fine", "stop"))) == Step(done=True)


@pytest.mark.parametrize("method", [lambda self, a: a, lambda self, *rest: rest], ids=["no annotation", "no names"])
def test_tools_without_named_typed_arguments_are_rejected(method):
    with pytest.raises(UserError, match="tool f: "):
        describe("f", method)
