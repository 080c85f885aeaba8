"""Rewards of programs: the last fenced code block of a response runs in a sandbox, against tests or expected outputs.

A program that fails, hangs or goes over a limit is wrong. Only where its sandbox could not run is there no reward."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.sandbox.provider import Provider
from megarl.sandbox.sandbox import Finished, Sandbox

_FENCE = re.compile(r" {0,3}(?P<marks>`{3,}|~{3,})(?P<info>.*)")
_PYTHON = ("", "python", "python3", "py")

PROGRAM = "solution.py"

# The tests are read before the program runs, which then finds an empty stdin. The word shows that the last test was
# passed: the exit status is 0 also of a program that leaves before.
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
    """Returns whether the response's program passes all tests.

    The answer has them as Python: a text, or a list of texts, such as `assert` lines (as in MBPP). They see what the
    program defines. A column `test_setup_code` runs before them; with a column `entry_point`, which names a function,
    they define `check`, which is called with it (as in HumanEval). What stands under `if __name__ == "__main__"` does
    not run.

    Raises ValueError if there are no tests.
    """
    tests = [answer] if isinstance(answer, str) else answer
    if not isinstance(tests, list | tuple) or not all(isinstance(test, str) for test in tests) or not "".join(tests):
        raise ValueError("the answer has no tests; code_tests needs a text, or a list of texts, of Python")
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
    """Returns whether the response's program prints what it should for every input.

    The answer is a list of `{"input": …, "output": …}`, or `{"inputs": […], "outputs": […]}` (as in APPS and TACO), or
    either as JSON. Outputs are the same if they have the same words in each line: whitespace around and between words
    and empty lines at the end do not count. The first output that differs ends the test.

    Raises ValueError if there are no such pairs.
    """
    pairs = _pairs(answer)
    program = last_code_block(response)
    if program is None:
        return False
    async with await sandbox.start() as box:
        await box.upload(PROGRAM, program)
        for given, expected in pairs:
            if not _prints(await _run(box, given), expected):
                return False
    return True


def last_code_block(response: str) -> str | None:
    """Returns the last fenced block of Python, or of no named language, None if there is none that is closed."""
    found, opened, lines = None, None, []
    for line in response.splitlines():
        fence = _FENCE.fullmatch(line)
        if opened is None:
            if fence is not None:
                opened, lines = fence, []
        elif fence is not None and fence["marks"].startswith(opened["marks"]) and not fence["info"].strip():
            if opened["info"].strip().split(" ")[0].lower() in _PYTHON:
                found = "\n".join(lines) + "\n"
            opened = None
        else:
            lines.append(line)
    return found


async def _run(box: Sandbox, given: str) -> Finished:
    return await box.run([box.python, PROGRAM], _encoded(given))


def _prints(finished: Finished, expected: str) -> bool:
    if not finished.succeeded or finished.truncated:
        return False
    return _words(finished.stdout.decode(errors="replace")) == _words(expected)


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _pairs(answer: Any) -> list[tuple[str, str]]:
    """Returns inputs and outputs. Raises ValueError if the answer is none."""
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except json.JSONDecodeError as error:
            raise ValueError(f"the answer is no JSON ({error}); code_stdin_stdout needs inputs and outputs") from None
    if isinstance(answer, Mapping) and {"inputs", "outputs"} <= answer.keys():
        columns = list(answer["inputs"]), list(answer["outputs"])
        if len(columns[0]) != len(columns[1]):
            raise ValueError(f"the answer has {len(columns[0])} inputs and {len(columns[1])} outputs")
        pairs = list(zip(*columns, strict=True))
    elif isinstance(answer, Sequence) and all(
        isinstance(pair, Mapping) and {"input", "output"} <= pair.keys() for pair in answer
    ):
        pairs = [(pair["input"], pair["output"]) for pair in answer]
    else:
        pairs = []
    if not pairs:
        raise ValueError('the answer has no pairs; code_stdin_stdout needs a list of {"input": …, "output": …}')
    return [(_text(given), _text(expected)) for given, expected in pairs]


def _text(value: Any) -> str:
    """Returns an input or an output, which may be a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")
