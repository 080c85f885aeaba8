"""The code tools in sandboxes: the text that the policy sees, and the state kept between calls."""

from __future__ import annotations

import asyncio

from megarl.environments.tools import describe
from megarl.sandbox.bubblewrap import Bubblewrap
from megarl.sandbox.tools import CodeTools
from tests.sandboxes import limits
from tests.timing import HANG_S, LIMIT_S, WAIT_S


def answers(tools: CodeTools, *calls: tuple[str, str]) -> list[str]:
    async def run() -> list[str]:
        async with tools:
            return [await getattr(tools, name)(text) for name, text in calls]

    return asyncio.run(run())


def test_tools_return_output_and_exit_status(provider):
    calls = [
        ("python", "print('a'); import sys; print('b', file=sys.stderr, flush=True)"),
        ("python", "1 / 0"),
        ("python", "def"),
        ("shell", "echo hello | tr a-z A-Z; exit 3"),
        ("shell", "kill -9 $$"),
        ("python", "pass"),
        ("python", "print('ok', end='')"),
    ]
    texts = answers(CodeTools(provider), *calls)
    assert sorted(texts[0].split()) == ["a", "b"]
    assert "ZeroDivisionError: division by zero\n[exit status 1]" in texts[1]
    assert "SyntaxError" in texts[2]
    assert texts[3:] == ["HELLO\n[exit status 3]", "[ended by signal 9]", "", "ok"]


def test_tools_name_the_exceeded_limit():
    tools = CodeTools(Bubblewrap(limits(wall_s=LIMIT_S, cpu_s=WAIT_S, memory_mib=64)))
    program = f"print('first', flush=True); import time; time.sleep({HANG_S})"
    slow, large = answers(tools, ("python", program), ("shell", "yes"))
    assert slow == "first\n[ended: it ran too long]"
    assert large.startswith("y\ny\n") and "bytes omitted" in large and large.endswith("[ended: it ran too long]")


def test_files_persist_only_in_a_shared_sandbox(provider):
    calls = [("python", "open('a', 'w').write('kept')"), ("shell", "cat a")]
    assert answers(CodeTools(provider), *calls)[1] == "kept"
    assert (
        answers(CodeTools(provider, keeps_files=False), *calls)[1]
        == "cat: a: No such file or directory\n[exit status 1]"
    )


def test_canceled_call_is_followed_by_a_new_sandbox(provider):
    async def run() -> str:
        async with CodeTools(provider) as tools:
            try:
                await asyncio.wait_for(tools.shell("sleep 60"), 0.3)
            except TimeoutError:
                return await tools.shell("echo again")

    assert asyncio.run(run()) == "again\n"


def test_tool_descriptions_are_generated_from_methods():
    for name, argument in (("python", "code"), ("shell", "command")):
        function = describe(name, getattr(CodeTools, name))["function"]
        properties = function["parameters"]["properties"]
        assert list(properties) == function["parameters"]["required"] == [argument]
        assert properties[argument]["type"] == "string" and properties[argument]["description"]
        assert function["description"].startswith("Run a ")
