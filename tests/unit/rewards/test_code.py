"""Rewards for programs, here without isolation. tests/sandbox runs them in sandboxes."""

from __future__ import annotations

import asyncio
import json

import pytest

from megarl.rewards.code import code_stdin_stdout, code_tests, last_code_block
from megarl.sandbox.choice import Unsafe
from tests.sandboxes import limits
from tests.timing import HANG_S, WAIT_S

PROVIDER = Unsafe(limits(wall_s=float(WAIT_S)))


def fenced(program: str) -> str:
    return f"First I think.\n\n```python\n{program}\n```\nThat is it."


def passes(program: str, tests: object, **columns: str) -> bool:
    return asyncio.run(code_tests("", fenced(program), tests, sandbox=PROVIDER, **columns))


def prints(program: str, answer: object) -> bool:
    return asyncio.run(code_stdin_stdout("", fenced(program), answer, sandbox=PROVIDER))


@pytest.mark.parametrize(
    ("response", "block"),
    [
        ("```\na\n```", "a\n"),
        ("```python\na\n```\ntext\n```py\nb\n\nc\n```", "b\n\nc\n"),
        ("```python\na\n```\n```text\nits output\n```", "a\n"),
        ("~~~python\nprint('```')\n~~~", "print('```')\n"),
        ("````python\n'''\n```\n'''\n````", "'''\n```\n'''\n"),
        ("   ``` Python title=a\na\n   ```", "a\n"),
        ("```python\n  a\n```", "  a\n"),
        ("```python\n```", "\n"),
        ("```python\na\n```\n```python\ncut off", "a\n"),
        ("```python\ncut off", None),
        ("a = 1", None),
        ("`a`", None),
        ("```bash\nls\n```", None),
    ],
)
def test_last_closed_python_block_is_extracted(response, block):
    assert last_code_block(response) == block


def test_code_tests_requires_all_tests_to_pass():
    double = "def double(x):\n    return 2 * x"
    assert passes(double, "assert double(2) == 4")
    assert passes(double, ["assert double(2) == 4", "import math\nassert double(math.pi) > 6"])
    assert not passes(double, ["assert double(2) == 4", "assert double(2) == 5"])
    assert not passes("def double(x:", "assert double(2) == 4")
    assert not passes("x = 1", "assert double(2) == 4")


def test_code_tests_reads_columns_of_published_data_sets():
    increment = "def increment(x):\n    return x + ONE"
    check = "def check(candidate):\n    assert candidate(1) == 2"
    assert passes(increment, check, entry_point="increment", test_setup_code="ONE = 1")
    assert not passes(increment, check, entry_point="increment", test_setup_code="ONE = 2")
    assert not passes(increment, check, entry_point="decrement")


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "print('passed')\nimport os; os._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)",
    ],
)
def test_program_that_exits_before_the_tests_is_wrong(program):
    assert not passes(program, "assert False")


def test_program_runs_as_a_separate_module():
    program = (
        "from __future__ import annotations\nimport dataclasses, inspect, pickle\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int\n"
        "def copied(p):\n    return pickle.loads(pickle.dumps(p))\n"
        "def name():\n    return __name__\n"
        "if __name__ == '__main__':\n    raise SystemExit\n"
    )
    assert passes(program, "assert copied(Point(3)) == Point(3) and name() != '__main__'")
    assert passes("def f(): return 1\nprint('chatter')\ntry:\n    input()\nexcept EOFError: pass", "assert f()")
    assert passes("text = 'é'", "assert text == 'é'")


@pytest.mark.parametrize("answer", [None, [], "", ["", ""], 3, [1], {"a": "b"}])
def test_code_tests_without_tests_raises(answer):
    with pytest.raises(ValueError, match="code_tests: the answer has no tests"):
        passes("pass", answer)


ADDS = "print(sum(map(int, input().split())))"
PAIRS = [{"input": "1 2", "output": "3"}, {"input": "4 5\n", "output": "9\n"}]


@pytest.mark.parametrize(
    "answer",
    [
        PAIRS,
        json.dumps(PAIRS),
        {"inputs": ["1 2", "4 5"], "outputs": ["3", "9"]},
        {"inputs": [["1 2", ""]], "outputs": [["3"]]},
    ],
)
def test_code_stdin_stdout_reads_all_forms_of_pairs(answer):
    assert prints(ADDS, answer)
    assert not prints("print(4)", answer)


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("a b\nc\n", "a b\nc", True),
        ("a  b \nc\n\n\n", "a b\nc", True),
        ("\na b\r\nc", "a b\nc\n", True),
        ("a b c", "a b\nc", False),
        ("a b\n\nc", "a b\nc", False),
        ("ab\nc", "a b\nc", False),
        ("1.0", "1", False),
        ("A", "a", False),
        ("", "", True),
        ("a", "", False),
    ],
)
def test_only_whitespace_around_words_is_ignored(printed, expected, same):
    assert prints(f"print({printed!r}, end='')", [{"input": "", "output": expected}]) is same


def test_program_that_fails_after_its_output_is_wrong():
    assert not prints("print(3)\n1 / 0", [{"input": "", "output": "3"}])
    slow = fenced(f"print(3, flush=True)\nimport time; time.sleep({HANG_S})")
    quick = Unsafe(limits(wall_s=0.5))
    assert not asyncio.run(code_stdin_stdout("", slow, [{"input": "", "output": "3"}], sandbox=quick))


@pytest.mark.parametrize("answer", [None, [], "[]", "no JSON", [{"input": "1"}], {"inputs": ["1"], "outputs": []}, 3])
def test_code_stdin_stdout_without_pairs_raises(answer):
    with pytest.raises(ValueError, match=r"^code_stdin_stdout: the answer (has|is|must be)"):
        prints(ADDS, answer)
