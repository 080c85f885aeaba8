"""Rewards for programs: the last fenced code block in a response runs in a sandbox and is checked with tests or
expected outputs.

A program that fails, hangs or exceeds a limit is wrong. Only a failure of the sandbox itself yields no reward.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.sandbox.provider import Provider
from megarl.sandbox.sandbox import Finished

_FENCE = re.compile(r" {0,3}(?P<marks>`{3,}|~{3,})(?P<info>.*)")
_PYTHON = ("", "python", "python3", "py")

PROGRAM = "solution.py"

# The tests are read before the program runs, so the program sees an empty stdin. The random word proves that the last
# test was reached; an exit status of 0 does not, since the program may exit early.
_RUN_TESTS = f"""
import os, sys, types
word, _, tests = sys.stdin.read().partition("\\n")
module = sys.modules["solution"] = types.ModuleType("solution")
module.__file__ = "{PROGRAM}"
exec(compile(open("{PROGRAM}", encoding="utf-8").read(), "{PROGRAM}", "exec"), module.__dict__)
exec(compile(tests, "tests.py", "exec"), module.__dict__)
sys.stdout.flush()
os.write(1, word.encode())
os._exit(0)
"""


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
    They run in the program's namespace, after the optional column `test_setup_code`. With a column `entry_point` that
    names a function, the tests define `check`, which is called with that function (as in HumanEval). Code under a
    `__name__ == "__main__"` guard does not run. Raise ValueError if the answer has no tests.
    """
    tests = [answer] if isinstance(answer, str) else answer
    if not isinstance(tests, list | tuple) or not all(isinstance(test, str) for test in tests) or not "".join(tests):
        raise ValueError(
            "code_tests: the answer has no tests. Fix: set the answer to Python code, as a string or a list of strings"
        )
    program = last_code_block(response)
    if program is None:
        return False
    parts = [test_setup_code or "", *tests, f"check({entry_point})" if entry_point else ""]
    word = secrets.token_hex(16)
    async with await sandbox.start() as box:
        await box.upload(PROGRAM, program)
        finished = await box.run([box.python, "-c", _RUN_TESTS], _encoded("\n".join([word, *parts])))
    return finished.succeeded and finished.stdout.endswith(word.encode())


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
            if not _prints(await box.run([box.python, PROGRAM], _encoded(stdin)), expected):
                return False
    return True


def last_code_block(response: str) -> str | None:
    """Return the last closed fenced block that is marked as Python or has no language, or None if there is none."""
    block, opened, lines = None, None, []
    for line in response.splitlines():
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
        except json.JSONDecodeError as error:
            raise ValueError(
                f"code_stdin_stdout: the answer is not valid JSON: {error}. Fix: store it as JSON"
            ) from None
    if isinstance(answer, Mapping) and {"inputs", "outputs"} <= answer.keys():
        columns = list(answer["inputs"]), list(answer["outputs"])
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
