"""The tools of a policy, in sandboxes: what it is told, and what stays from call to call."""

from __future__ import annotations

import asyncio

from megarl.environments.tools import describe
from megarl.sandbox.bubblewrap import Bubblewrap
from megarl.sandbox.tools import CodeTools
from tests.sandboxes import limits


def answers(tools: CodeTools, *calls: tuple[str, str]) -> list[str]:
    async def run() -> list[str]:
        async with tools:
            return [await getattr(tools, name)(text) for name, text in calls]

    return asyncio.run(run())


def test_the_policy_reads_what_was_printed_and_how_it_ended(provider):
    calls = [
        ("python", "print('a'); import sys; print('b', file=sys.stderr, flush=True)"),
        ("python", "1 / 0"),
        ("python", "def"),
        ("shell", "echo hello | tr a-z A-Z; exit 3"),
        ("shell", "kill -9 $$"),
        ("python", "pass"),
        ("python", "print('ok', end='')"),
    ]
    said = answers(CodeTools(provider), *calls)
    assert sorted(said[0].split()) == ["a", "b"]
    assert "ZeroDivisionError: division by zero\n[exit status 1]" in said[1]
    assert "SyntaxError" in said[2]
    assert said[3:] == ["HELLO\n[exit status 3]", "[ended by signal 9]", "", "ok"]


def test_the_policy_is_told_of_the_limit_that_it_met():
    tools = CodeTools(Bubblewrap(limits(wall_s=0.5, memory_mib=64)))
    slow, large = answers(tools, ("python", "print('first', flush=True); import time; time.sleep(9)"), ("shell", "yes"))
    assert slow == "first\n[ended: it ran too long]"
    assert (
        large.startswith("y\ny\n") and "bytes are left out here" in large and large.endswith("[ended: it ran too long]")
    )


def test_files_stay_where_calls_share_a_sandbox(provider):
    calls = [("python", "open('a', 'w').write('kept')"), ("shell", "cat a")]
    assert answers(CodeTools(provider), *calls)[1] == "kept"
    assert (
        answers(CodeTools(provider, keeps_files=False), *calls)[1]
        == "cat: a: No such file or directory\n[exit status 1]"
    )


def test_after_a_call_that_was_cancelled_there_is_another_sandbox(provider):
    async def run() -> str:
        async with CodeTools(provider) as tools:
            try:
                await asyncio.wait_for(tools.shell("sleep 60"), 0.3)
            except TimeoutError:
                return await tools.shell("echo again")

    assert asyncio.run(run()) == "again\n"


def test_descriptions_for_the_policy_follow_from_the_methods():
    for name, argument in (("python", "code"), ("shell", "command")):
        function = describe(name, getattr(CodeTools, name))["function"]
        properties = function["parameters"]["properties"]
        assert list(properties) == function["parameters"]["required"] == [argument]
        assert properties[argument]["type"] == "string" and properties[argument]["description"]
        assert function["description"].startswith("Runs a ")
