"""Agents for tests of agent processes. They reach the policy only over HTTP."""

import asyncio
import os
import time

import aiohttp

from megarl.environments import Agent


async def ask(base_url: str, api_key: str, *messages: tuple[str, str]) -> str:
    body = {"model": "gpt-4o", "messages": [{"role": role, "content": content} for role, content in messages]}
    headers = {"Authorization": f"Bearer {api_key}"}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as client,
        client.post(f"{base_url}/chat/completions", json=body, headers=headers) as response,
    ):
        return (await response.json())["choices"][0]["message"]["content"]


class Delegator(Agent):
    """Asks once, lets a sub-agent check the response, and asks again. The task's message selects a fault."""

    def __init__(self, bonus: float = 1.0):
        self._bonus = bonus

    async def run(self, task, base_url, api_key, model):
        fault = task.messages[0]["content"]
        if fault == "silent":
            return 1.0
        messages = [("user", f"{fault} {task.answer} {task.seed}")]
        messages.append(("assistant", await ask(base_url, api_key, *messages)))
        await self._fail(fault)
        checked = await ask(base_url, api_key, ("system", "You check."), ("user", messages[-1][1]))
        answer = await ask(base_url, api_key, *messages, ("user", checked))
        if fault == "no reward":
            return {"reward": None, "feedback": "Not rewarded."}
        return {"length": float(len(answer)), "bonus": self._bonus}

    async def _fail(self, fault: str) -> None:
        if fault == "raise":
            raise KeyError("broken agent")
        if fault == "exit":
            os._exit(3)
        if fault == "hang":
            await asyncio.sleep(600)

    async def close(self) -> None:
        print("closed", flush=True)


class Plain:
    """An agent without a base class. Its `run` is not async, so it runs in a thread."""

    def run(self, task, base_url, api_key, model):
        return asyncio.run(self._work(base_url, api_key))

    async def _work(self, base_url: str, api_key: str) -> float:
        return float(len(await ask(base_url, api_key, ("user", "go"))))


class Blocked(Agent):
    def run(self, task, base_url, api_key, model):
        time.sleep(600)


class TooFew(Agent):
    async def run(self, task):
        return 0.0
