"""Rewards for programs: the last fenced code block in a response runs in a sandbox and is checked with tests or
expected outputs.

A program that fails, hangs or exceeds a limit counts as wrong. A response has no reward only if the sandbox fails or
the row's tests are invalid.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from megarl.rewards import code_tester
from megarl.rewards.options import checks_rows
from megarl.sandbox.provider import Provider
from megarl.sandbox.sandbox import Finished
from megarl.usercode.failures import RESTARTS

_FENCE = re.compile(r" {0,3}(?P<marks>`{3,}|~{3,})(?P<info>.*)")
_LINE_END = re.compile(r"\r\n?|\n")
_PYTHON = ("", "python", "python3", "py")

PROGRAM = "solution.py"


def _text_of(name: str) -> str:
    """Return Python source that runs the module `name` of this package in a sandbox. From this package, the module may
    import only code_channel."""
    channel, module = (Path(__file__).with_name(f"{file}.py").read_text() for file in ("code_channel", name))
    return f"""\
import sys, types
channel = sys.modules["megarl.rewards.code_channel"] = types.ModuleType("code_channel")
exec(compile({channel!r}, "code_channel.py", "exec", dont_inherit=True, optimize=2), channel.__dict__)
exec(compile({module!r}, "{name}.py", "exec", dont_inherit=True, optimize=2))
"""


_TESTER, _PROGRAM = _text_of("code_tester"), _text_of("code_program")


def _tests(answer: Any) -> list[str]:
    tests = [answer] if isinstance(answer, str) else answer
    if not isinstance(tests, list | tuple) or not all(isinstance(test, str) for test in tests) or not "".join(tests):
        raise ValueError(
            "code_tests: the answer has no tests. Fix: set the answer to Python code, as a string or a list of strings"
        )
    return list(tests)


def _check_tests(answer: Any, *, entry_point: str | None = None, test_setup_code: str | None = None) -> None:
    """Raise ValueError if the answer has no tests, if they are not valid Python, or if there is an entry point but they
    do not define `check`."""
    tests = _tests(answer)
    try:
        with warnings.catch_warnings(action="ignore"):  # tests may contain invalid escapes
            code_tester.parse_tests(test_setup_code or "", tests, entry_point)
    except code_tester.InvalidTests as error:
        raise _invalid(str(error)) from None
    if entry_point and not re.search(r"\bcheck\b|import\s*\*", "\n".join([test_setup_code or "", *tests])):
        raise _invalid(f"the tests do not define check, which must take the entry point {entry_point!r}")


def _invalid(reason: str) -> ValueError:
    remedy = "edit the row's answer, test_setup_code or entry_point, or drop the row"
    if reason.startswith(code_tester.NEEDS_MODULE):
        remedy = "install the module for the Python that the sandbox runs, or drop the row"
    return ValueError(f"code_tests: {reason}. Fix: {remedy}")


@checks_rows(_check_tests)
async def code_tests(
    prompt: str,
    response: str,
    answer: Any,
    *,
    sandbox: Provider,
    entry_point: str | None = None,
    test_setup_code: str | None = None,
) -> bool:
    """Return whether the response's program passes all tests.

    The answer contains the tests as Python source, a string or a list of strings, such as `assert` lines (as in MBPP).
    They run after the optional column `test_setup_code`. With a column `entry_point` that names a function, or an
    expression such as `Solution().add`, the tests define `check`, which is called with that function (as in HumanEval).
    Code under a `__name__ == "__main__"` guard does not run.

    The tests and the program run in separate sandboxes. The program receives the arguments of calls and the import
    statements of `test_setup_code`, but neither the tests nor the expected values. It returns plain data, or references
    to its objects, which the tests can call and inspect (see code_tester). A response can still pass without solving
    the task by recognizing the arguments. It can also exploit tests that compare the program's results only with each
    other (`decode(encode(x)) == x`), pass expected values to the program's helper functions, read arguments that the
    program could modify, or accept NaN or empty results (`not abs(f(x) - 4) > 1e-6`, `zip(f(x), expected)`,
    `np.allclose`).

    Raise ValueError if the answer has no tests, or if the tests are not valid Python or need a missing module.
    """
    tests = _tests(answer)
    program = last_code_block(response)
    if program is None:
        return False
    request = json.dumps({"setup": test_setup_code or "", "tests": tests, "entry_point": entry_point}).encode()
    finished = await _unless_killed(lambda: _run_tests(sandbox, program, request))
    if finished.status == code_tester.INVALID and finished.limit is None:
        raise _invalid(finished.stderr.decode(errors="replace").strip())
    return finished.succeeded


async def _run_tests(provider: Provider, program: str, request: bytes) -> Finished:
    """Run the tests and the program in two sandboxes, connected by a socket. Return the tests' result, or the program's
    if it was killed."""
    ends = socket.socketpair()
    async with AsyncExitStack() as stack:
        for end in ends:
            stack.enter_context(end)
        starts = [asyncio.create_task(provider.start(file=end.fileno())) for end in ends]
        await asyncio.wait(starts)
        boxes = [await stack.enter_async_context(start.result()) for start in starts if start.exception() is None]
        for start in starts:
            start.result()
        tester, programs = boxes
        await programs.upload(PROGRAM, program)
        files = [str(end.fileno()) for end in ends]
        answers = asyncio.create_task(programs.run([programs.python, "-c", _PROGRAM, files[1], PROGRAM]))
        answers.add_done_callback(lambda _: ends[1].shutdown(socket.SHUT_RDWR))
        finished = await tester.run([tester.python, "-c", _TESTER, files[0]], request)
        if answers.done() and _was_killed(answers.result()):  # result() raises if the sandbox failed
            return answers.result()
        answers.cancel()
        return finished


async def _unless_killed(run: Callable[[], Awaitable[Finished]]) -> Finished:
    """Run a program. If it is killed, for example because memory ran out, run it again, up to RESTARTS times. A program
    that kills itself each time counts as wrong."""
    finished = await run()
    for _ in range(RESTARTS):
        if not _was_killed(finished):
            break
        finished = await run()
    return finished


def _was_killed(finished: Finished) -> bool:
    return finished.limit is None and finished.status == -signal.SIGKILL


@checks_rows(lambda answer: _pairs(answer))
async def code_stdin_stdout(prompt: str, response: str, answer: Any, *, sandbox: Provider) -> bool:
    """Return whether the response's program prints the expected output for every input. The answer is a list of
    `{"input": …, "output": …}`, or `{"inputs": […], "outputs": […]}` (as in APPS and TACO), or either as JSON text.
    Outputs are compared line by line as sequences of words, ignoring other whitespace and empty lines at the end.
    Testing stops at the first wrong output. Raise ValueError if the answer has no such pairs."""
    pairs = _pairs(answer)
    program = last_code_block(response)
    if program is None:
        return False
    async with await sandbox.start() as box:
        await box.upload(PROGRAM, program)
        for stdin, expected in pairs:
            arguments = [box.python, PROGRAM], _encoded(stdin)
            if not _prints(await _unless_killed(partial(box.run, *arguments)), expected):
                return False
    return True


def last_code_block(response: str) -> str | None:
    """Return the last closed fenced block that is marked as Python or has no language, or None if there is none."""
    block, opened, lines = None, None, []
    for line in _LINE_END.split(response):
        fence = _FENCE.fullmatch(line)
        if opened is None:
            if fence is not None:
                opened, lines = fence, []
        elif fence is not None and fence["marks"].startswith(opened["marks"]) and not fence["info"].strip():
            if opened["info"].strip().split(" ")[0].lower() in _PYTHON:
                block = "\n".join(lines) + "\n"
            opened = None
        else:
            lines.append(line)
    return block


def _prints(finished: Finished, expected: str) -> bool:
    if not finished.succeeded or finished.truncated:
        return False
    return _words(finished.stdout.decode(errors="replace")) == _words(expected)


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _pairs(answer: Any) -> list[tuple[str, str]]:
    """Return (input, output) pairs. Raise ValueError if the answer has none."""
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"code_stdin_stdout: the answer is not valid JSON: {error}. Fix: store it as JSON"
            ) from None
    columns: list[Any] = [None]
    if isinstance(answer, Mapping):
        columns = [answer.get(name) for name in ("inputs", "outputs")]
    if all(isinstance(column, list | tuple) for column in columns):
        if len(columns[0]) != len(columns[1]):
            raise ValueError(
                f"code_stdin_stdout: the answer has {len(columns[0])} inputs, but {len(columns[1])} outputs. Fix: add "
                "one output for each input"
            )
        pairs = list(zip(*columns, strict=True))
    elif isinstance(answer, Sequence) and all(
        isinstance(pair, Mapping) and {"input", "output"} <= pair.keys() for pair in answer
    ):
        pairs = [(pair["input"], pair["output"]) for pair in answer]
    else:
        pairs = []
    if not pairs:
        raise ValueError(
            'code_stdin_stdout: the answer has no tests. Fix: use a non-empty list of {"input": …, "output": …}'
        )
    return [(_text(stdin), _text(expected)) for stdin, expected in pairs]


def _text(value: Any) -> str:
    """Return an input or output as text. The value may be a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")
