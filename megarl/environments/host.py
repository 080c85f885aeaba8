"""A process in which environments live, for a `HostPool`, which may kill it at any time.

It first says in a line of JSON what tools its environments have. Then it reads requests from stdin, a line of JSON
each, and answers each with such a line, in the order in which they are done: many rollouts are under way in it at once.
The environments' own stdin is empty, and what they print goes to stderr.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO

from megarl.config import schema
from megarl.core import stacks
from megarl.core.errors import UserError
from megarl.environments.agent import Agent
from megarl.environments.child import take_pipes
from megarl.environments.protocol import Environment, Opening, Step, Task, Turn
from megarl.environments.registry import SANDBOX, check_environment, is_agent, wants_sandbox
from megarl.environments.tools import MalformedCall, ToolCall, describe, run, tools_of
from megarl.sandbox.choice import find_provider

LONGEST_LINE = 2**30


class Host:
    """The environments of this process, by the rollout that each is of."""

    def __init__(self, kind: type[Environment] | type[Agent], options: Mapping[str, Any], tool_timeout_s: float):
        self._kind, self._options, self._tool_timeout_s = kind, options, tool_timeout_s
        self._environments: dict[str, Environment | Agent] = {}
        self._runs: dict[str, asyncio.Task[Any]] = {}
        """What agents do, until they have done it."""

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of an answer: a value, or a failure with the stack of what the environment raised."""
        do, rollout = request["do"], request["rollout"]
        try:
            methods = {"reset": self._reset, "step": self._step, "run": self._run, "close": self._close}
            return {"value": await methods[do](rollout, request)}
        except BaseException as error:  # the user's code may raise anything, SystemExit too
            shown = traceback.format_exception(error)
            return {"failure": f"{do} raised {type(error).__name__}: {error}", "stack": "".join(shown)}

    async def _reset(self, rollout: str, request: Mapping[str, Any]) -> dict[str, Any]:
        environment = self._environments[rollout] = self._kind(**self._options)
        environment.toolbox.timeout_s = self._tool_timeout_s
        opening = await run(environment.reset, Task(**request["task"]))
        if isinstance(opening, Opening):
            ids = None if opening.token_ids is None else list(map(int, opening.token_ids))
            return {"messages": _plain(opening.messages), "token_ids": ids}
        return {"messages": None if opening is None else _plain(opening), "token_ids": None}

    async def _step(self, rollout: str, request: Mapping[str, Any]) -> dict[str, Any]:
        environment, given = self._environments[rollout], request["turn"]
        calls = tuple(
            ToolCall(**call) if "arguments" in call else MalformedCall(**call) for call in given["tool_calls"]
        )
        step = await run(environment.step, Turn(**{**given, "tool_calls": calls}))
        if not isinstance(step, Step):
            raise TypeError(f"step returned {type(step).__name__}, not a megarl.environments.Step")
        observation = step.observation
        if observation is None and not (step.done or given["is_last"]):
            raise TypeError("step returned neither an observation nor done=True, and the policy has a turn left")
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        return {
            "messages": None if observation is None else _plain(observation),
            "rewards": _rewards(step.reward),
            "done": bool(step.done),
            "as_is": bool(step.as_is),
            "restart": bool(step.restart),
            "is_stuck": environment.toolbox.has_hung_thread,
        }

    async def _run(self, rollout: str, request: Mapping[str, Any]) -> dict[str, float] | None:
        """Returns the rewards of an agent, when it has done its work."""
        agent = self._environments[rollout] = self._kind(**self._options)
        given = (request[name] for name in ("base_url", "api_key", "model"))
        self._runs[rollout] = asyncio.create_task(run(agent.run, Task(**request["task"]), *given))
        return _rewards(await self._runs[rollout])

    async def _close(self, rollout: str, request: Mapping[str, Any]) -> dict[str, int]:
        """Returns how many calls of tools ended in which way. An agent that still is at work is stopped."""
        environment = self._environments.pop(rollout, None)
        if environment is None:  # its constructor raised
            return {}
        if rollout in self._runs:
            work = self._runs.pop(rollout)
            work.cancel()
            await asyncio.wait([work])
        await run(environment.close)
        if isinstance(environment, Agent):
            return {}
        return dict(environment.toolbox.counts)


def _plain(messages: Any) -> list[dict[str, Any]]:
    """Returns messages as JSON values. Raises TypeError for something else."""
    messages = [dict(message) for message in messages]
    wrong = [message for message in messages if not isinstance(message.get("role"), str) or "content" not in message]
    if wrong:
        raise TypeError(f"a message has a role and a content, not {wrong[0]!r}")
    return json.loads(json.dumps(messages))


def _rewards(reward: Any) -> dict[str, float] | None:
    """Returns rewards by name, "" for the one of a turn that has only one."""
    if reward is None:
        return None
    return {name: float(value) for name, value in (reward.items() if isinstance(reward, Mapping) else [("", reward)])}


async def serve(host: Host, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers requests until stdin ends."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=LONGEST_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
    under_way: set[asyncio.Task[None]] = set()

    async def answer(request: Mapping[str, Any]) -> None:
        write(answers, {"id": request["id"], **await host.answer(request)})

    while line := await reader.readline():
        task = asyncio.create_task(answer(json.loads(line)))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    os._exit(0)  # nobody is left to answer, and threads of tools that hang would hold the process


def write(answers: BinaryIO, line: Mapping[str, Any]) -> None:
    answers.write(json.dumps(line).encode() + b"\n")
    answers.flush()


def main(name: str, options: Mapping[str, Any], tool_timeout_s: float, sandbox: Mapping[str, Any]) -> None:
    requests, answers = take_pipes()
    faulthandler.enable()
    stacks.write_on_request()
    try:
        kind = check_environment(name, options)
        if wants_sandbox(kind):
            options = {**options, SANDBOX: asyncio.run(find_provider(schema.Sandbox(**sandbox)))}
    except UserError as error:
        write(answers, {"refused": str(error)})
        return
    tools = [describe(tool, function) for tool, function in tools_of(kind).items()]
    write(answers, {"tools": tools, "is_agent": is_agent(kind)})
    asyncio.run(serve(Host(kind, options, tool_timeout_s), requests, answers))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
