"""Rewards for programs in a pool's processes and real sandboxes, as in a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.rewards.pool import FunctionPool
from megarl.rewards.result import Result
from tests.sandboxes import limits
from tests.timing import WAIT_S

ADDS = "```python\nimport sys\nprint(sum(map(int, sys.stdin.read().split())))\n```"


@pytest.fixture(scope="module")
def pool(provider) -> Iterator[FunctionPool]:
    """Requires the provider fixture, which fails with a clear message if bubblewrap is missing."""
    pool = FunctionPool(["code_tests", "code_stdin_stdout"], None, 2, WAIT_S, sandbox=limits(wall_s=6.0, cpu_s=2))
    yield pool
    pool.close()


def test_programs_are_scored_by_tests_and_pairs(pool):
    right, wrong = Result(1.0, "1.0"), Result(0.0, "0.0")
    double = "```python\ndef double(x):\n    return 2 * x\n```"
    tests = ["assert double(2) == 4", "assert double('a') == 'aa'"]
    pairs = [{"input": "1 2\n", "output": "3\n"}, {"input": "", "output": "0"}]
    calls = [
        (right, pool.call("code_tests", "", double, tests)),
        (wrong, pool.call("code_tests", "", double, [*tests, "assert double(1) == 3"])),
        (wrong, pool.call("code_tests", "", "```python\nwhile True: pass\n```", tests)),
        (wrong, pool.call("code_tests", "", "```python\nimport os\nwhile True: os.fork()\n```", tests)),
        (right, pool.call("code_stdin_stdout", "", ADDS, pairs)),
        (wrong, pool.call("code_stdin_stdout", "", ADDS, [*pairs, {"input": "1", "output": "2"}])),
    ]
    assert [call.result() for _, call in calls] == [result for result, _ in calls]


def test_slow_program_is_wrong_and_not_a_failure(provider):
    """Its inputs would take a minute, but a call has eight seconds."""
    slow = "```python\nimport time\ntime.sleep(0.6)\nprint(input())\n```"
    pairs = [{"input": "1", "output": "1"}] * 100
    pool = FunctionPool(["code_stdin_stdout"], None, 1, 8.0, sandbox=limits(wall_s=6.0))
    try:
        assert pool.call("code_stdin_stdout", "", slow, pairs).result() == Result(0.0, "0.0")
        assert pool.call("code_stdin_stdout", "", slow, pairs[:1]).result() == Result(1.0, "1.0")
    finally:
        pool.close()


def test_broken_sandbox_is_a_failure_and_not_zero(provider, tmp_path, monkeypatch):
    """Bubblewrap is removed after the pool has found it."""
    link = tmp_path / "bwrap"
    link.symlink_to("/usr/bin/bwrap")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    pool = FunctionPool(["code_stdin_stdout"], None, 1, WAIT_S, sandbox=limits())
    try:
        pair = [{"input": "1", "output": "1"}]
        assert pool.call("code_stdin_stdout", "", ADDS, pair).result().value == 1.0
        link.unlink()
        result = pool.call("code_stdin_stdout", "", ADDS, pair).result()
        assert result.value is None and "raised SandboxError: " in result.failure
    finally:
        pool.close()


def test_user_function_receives_a_sandbox_provider(provider, tmp_path):
    (tmp_path / "rewards.py").write_text(
        "async def prints(prompt, response, answer, *, sandbox):\n"
        "    async with await sandbox.start() as box:\n"
        "        finished = await box.run([box.python, '-c', response])\n"
        "    return finished.stdout.decode() == answer\n"
    )
    name = f"{tmp_path / 'rewards.py'}:prints"
    pool = FunctionPool([name], None, 1, WAIT_S, sandbox=limits())
    try:
        assert pool.columns == {}
        assert pool.call(name, "", "print(6 * 7)", "42\n").result() == Result(1.0, "1.0")
    finally:
        pool.close()
