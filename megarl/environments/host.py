"""The worker process of a `HostPool`. It hosts environments and may be killed at any time.

Its first JSON message describes the environments' tools. Then it receives requests and sends one response per request,
in completion order, because many rollouts run concurrently.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from io import BufferedRWPair
from typing import Any

from megarl.core.errors import UserError
from megarl.core.files import MAX_DEPTH, is_deeper
from megarl.data.image_parts import images_in, map_texts
from megarl.environments.protocol import Agent, Environment, Opening, Step, Task, Turn
from megarl.environments.registry import SANDBOX, check_environment, is_agent, takes_sandbox
from megarl.environments.sent_images import with_data_urls
from megarl.environments.tools import MalformedCall, Status, ToolCall, describe, run, tools_of
from megarl.sandbox.choice import find_provider
from megarl.usercode.failures import kind_of
from megarl.usercode.feedback import split_feedback
from megarl.usercode.parent import connect, send

MAX_CHARACTERS = 2**23
"""Maximum number of characters in all messages of a response together. Longer text would not fit into any context, and
parsing it would block the process that runs the rollouts."""

CUT = "… [cut]"


class Host:
    """The environments in this process, keyed by rollout id."""

    def __init__(self, kind: type[Environment] | type[Agent], options: Mapping[str, Any], tool_timeout_s: float):
        self._kind, self._options, self._tool_timeout_s = kind, options, tool_timeout_s
        self._environments: dict[str, Environment | Agent] = {}
        self._runs: dict[str, asyncio.Task[Any]] = {}
        """Running agents, keyed by rollout id."""

    async def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Handle a request. Return the fields of the response: a value, or a failure with a stack trace."""
        method, rollout = request["method"], request["rollout"]
        try:
            methods = {"reset": self._reset, "step": self._step, "run": self._run, "close": self._close}
            return {"value": await methods[method](rollout, request)}
        except BaseException as error:  # user code may raise anything, including SystemExit
            failure, stack = f"{method} raised {type(error).__name__}: {error}", traceback.format_exception(error)
            # All rollouts in this process share one memory limit, so this one may not be the cause.
            kind = "lost" if isinstance(error, MemoryError) else kind_of(error)
            return {"failure": failure, "stack": "".join(stack), "kind": kind}

    async def _reset(self, rollout: str, request: Mapping[str, Any]) -> dict[str, Any]:
        environment = self._environments[rollout] = self._kind(**self._options)
        assert isinstance(environment, Environment), "agents have no reset"
        environment.toolbox.timeout_s = self._tool_timeout_s
        opening = await run(environment.reset, Task(**request["task"]))
        if isinstance(opening, Opening):
            ids = None if opening.token_ids is None else list(map(int, opening.token_ids))
            if ids is not None and _have_images(opening.messages):
                raise TypeError("Opening.token_ids cannot have images. Fix: return only the messages")
            return {"messages": await _plain(opening.messages), "token_ids": ids, "state": _key(opening.state)}
        return {"messages": None if opening is None else await _plain(opening), "token_ids": None, "state": None}

    async def _step(self, rollout: str, request: Mapping[str, Any]) -> dict[str, Any]:
        environment, turn = self._environments[rollout], request["turn"]
        assert isinstance(environment, Environment), "agents have no step"
        calls = tuple(ToolCall(**call) if "arguments" in call else MalformedCall(**call) for call in turn["tool_calls"])
        step = await run(environment.step, Turn(**{**turn, "tool_calls": calls}))
        if not isinstance(step, Step):
            raise TypeError(f"step returned {type(step).__name__}. Fix: return a megarl.environments.Step")
        observation = step.observation
        if step.as_is and not isinstance(observation, str) and _have_images(observation or ()):
            raise TypeError("an observation with as_is=True cannot have images. Fix: set as_is=False")
        if observation is None and not (step.done or turn["is_last"]):
            raise TypeError(
                "step returned neither an observation nor done=True, but the policy has turns left. Fix: return "
                "one of the two"
            )
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        return {
            "messages": None if observation is None else await _plain(observation),
            **_rewards(step.reward),
            "done": bool(step.done),
            "as_is": bool(step.as_is),
            "restart": bool(step.restart),
            "state": _key(step.state),
            "is_stuck": environment.toolbox.has_hung_thread,
        }

    async def _run(self, rollout: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run an agent to completion and return its rewards and feedback."""
        agent = self._environments[rollout] = self._kind(**self._options)
        assert isinstance(agent, Agent), "environments have no run"
        access = (request[name] for name in ("base_url", "api_key", "model"))
        self._runs[rollout] = asyncio.create_task(run(agent.run, Task(**request["task"]), *access))
        return _rewards(await self._runs[rollout])

    async def _close(self, rollout: str, request: Mapping[str, Any]) -> Mapping[Status, int]:
        """Close the rollout's environment, cancel its running agent, and return the number of tool calls per status."""
        environment = self._environments.pop(rollout, None)
        if environment is None:  # the rollout has no environment yet, or its constructor raised an exception
            return {}
        if rollout in self._runs:
            agent_run = self._runs.pop(rollout)
            agent_run.cancel()
            await asyncio.wait([agent_run])
        await run(environment.close)
        return {} if isinstance(environment, Agent) else environment.toolbox.counts


def _have_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(images_in(message.get("content")) for message in messages)


async def _plain(messages: Any) -> list[dict[str, Any]]:
    """Run `_encoded` in a thread: encoding images takes time, and other rollouts share the event loop."""
    return await asyncio.to_thread(_encoded, messages)


def _encoded(messages: Any) -> list[dict[str, Any]]:
    """Convert messages to JSON values, with images as data: URLs. Raise TypeError for a message without a role or
    content, and the errors of `with_data_urls`."""
    messages = [dict(message) for message in messages]
    invalid = [message for message in messages if not isinstance(message.get("role"), str) or "content" not in message]
    if invalid:
        raise TypeError(f"{repr(invalid[0])[:200]} is not a message. Fix: give each message the keys role and content")
    messages = with_data_urls(messages)
    if is_deeper(messages, MAX_DEPTH):
        raise TypeError(f"a message is nested deeper than {MAX_DEPTH} levels. Fix: return text")
    left = MAX_CHARACTERS

    def cut(text: str) -> str:
        nonlocal left
        room, left = left, max(0, left - len(text))
        return text if len(text) <= room else f"{text[:room]}{CUT}"

    return json.loads(json.dumps([{**message, "content": map_texts(message["content"], cut)} for message in messages]))


def _key(state: Any) -> str | None:
    """Return a state's key unchanged. Raise TypeError if it is neither a string nor None."""
    if state is not None and not isinstance(state, str):
        raise TypeError(f"state has type {type(state).__name__}. Fix: return a string or None")
    return state


def _rewards(reward: Any) -> dict[str, Any]:
    """Return the named rewards (None if there is no reward) and the feedback. A plain number has the name ""."""
    reward, feedback = split_feedback(reward)
    if reward is None:
        return {"rewards": None, "feedback": feedback}
    named = reward if isinstance(reward, Mapping) else {"": reward}
    return {"rewards": {name: float(value) for name, value in named.items()}, "feedback": feedback}


async def serve(host: Host, parent: BufferedRWPair) -> None:
    """Serve requests until the parent closes the connection. This process then exits."""
    loop, pending = asyncio.get_running_loop(), set[Future[None]]()

    async def respond(request: Mapping[str, Any]) -> None:
        send(parent, {"id": request["id"], **await host.handle(request)})

    def read() -> None:
        for line in parent:
            response = asyncio.run_coroutine_threadsafe(respond(json.loads(line)), loop)
            pending.add(response)
            response.add_done_callback(pending.discard)
        os._exit(0)  # a normal exit would wait for threads of hanging tools

    threading.Thread(target=read, daemon=True).start()
    await asyncio.Event().wait()


def main(
    parent: BufferedRWPair,
    name: str,
    options: Mapping[str, Any],
    tool_timeout_s: float,
    sandbox: Mapping[str, Any],
    memory_mib: int | None,
) -> None:
    """Serve requests for environments of the class `name`. The parent process applies `memory_mib`."""
    try:
        kind = check_environment(name, options)
        if takes_sandbox(kind):
            from megarl.config.schema import Sandbox  # importing it takes longer than importing all other modules

            options = {**options, SANDBOX: asyncio.run(find_provider(Sandbox(**sandbox)))}
    except UserError as error:
        send(parent, {"refused": str(error)})
        return
    tools = [describe(tool, function) for tool, function in tools_of(kind).items()]
    send(parent, {"tools": tools, "is_agent": is_agent(kind)})
    asyncio.run(serve(Host(kind, options, tool_timeout_s), parent))


if __name__ == "__main__":
    parent = connect()
    main(parent, **json.loads(parent.readline()))
