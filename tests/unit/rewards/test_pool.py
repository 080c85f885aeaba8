"""Calls of user functions in worker processes, which are killed if a function does not return."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from megarl.core.errors import InfrastructureFailure
from megarl.core.prompt import Prompt
from megarl.rewards.pool import FunctionPool
from megarl.rewards.result import Result
from tests.timing import HANG_S, LIMIT_S, POLL_S, SHORT_S, WAIT_S

FUNCTIONS = """
import os, signal, subprocess, sys, time

def process(prompt, response, answer):
    return os.getpid()

def act(prompt, response, answer):
    return eval(response)

def sleeper(prompt, response, answer):
    child = subprocess.Popen(["sleep", "600"])
    open(response, "w").write(str(child.pid))
    time.sleep(600)

calls = []

def batch(prompts, responses, answers):
    calls.append(1)
    missing = ConnectionRefusedError("no server") if len(calls) < 3 else float(len(responses))
    values = {"away": missing, "bad": ValueError("bad")}
    return [values.get(response, float(len(responses))) for response in responses]

async def later(prompt, response, answer):
    import asyncio
    await asyncio.sleep(0.01)
    return float(answer)

def judge(prompt, first, second, answer):
    return len(first) > len(second)

def level(prompt, response, answer, level, scale=2):
    return level * scale

def whole(prompt, response, answer, *, row):
    return row == {"level": 3, "tags": ["a"]}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("functions") / "functions.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture(scope="module")
def pool(file) -> Iterator[FunctionPool]:
    names = [f"{file}:{name}" for name in ("process", "act", "sleeper", "later")]
    pool = FunctionPool(["exact_match", *names], f"{file}:judge", 2, WAIT_S)
    yield pool
    pool.close()


def processes(pool: FunctionPool, file: Path) -> set[float]:
    """Return the ids of the worker processes. Two concurrent calls keep both of them busy."""
    calls = [pool.call(f"{file}:act", "", "time.sleep(0.2) or os.getpid()", None) for _ in range(2)]
    return {call.result().value for call in calls}


def act(pool: FunctionPool, file: Path, code: str) -> Result:
    return pool.call(f"{file}:act", "", code, None).result()


def test_result_holds_the_return_value(pool, file):
    assert pool.call("exact_match", "", "12", "12").result() == Result(1.0, "1.0")
    assert pool.call(f"{file}:later", "", "", 0.5).result() == Result(0.5, "0.5")
    assert pool.call("judge", "", "long", "s", None).result() == Result(1.0, "1.0")


def test_functions_receive_the_columns_they_name(file):
    level, whole = f"{file}:level", f"{file}:whole"
    pool = FunctionPool(["exact_match", level, whole], None, 1, WAIT_S)
    try:
        assert pool.columns == {"level": level, "scale": None, "row": whole}

        def call(name: str, **columns) -> Result:
            return pool.call(name, "", "12", "12", columns=columns).result()

        assert call("exact_match", level=3) == Result(1.0, "1.0")
        assert call(level, level=3, tags=["a"]) == Result(6.0, "6.0")
        assert call(level, level=3, scale=5) == Result(15.0, "15.0")
        assert call(whole, level=3, tags=["a"]) == Result(1.0, "1.0")
        assert call(whole) == Result(0.0, "0.0")
        assert call(level).failure.startswith("raised TypeError: level() missing 1 required positional argument")
    finally:
        pool.close()


def test_calls_run_concurrently(pool, file):
    found = processes(pool, file)
    assert len(found) == 2 and os.getpid() not in found


def test_hanging_call_fails_alone_and_its_children_are_killed(file, tmp_path):
    with closing(FunctionPool(["exact_match", f"{file}:sleeper", f"{file}:act"], None, 2, LIMIT_S)) as pool:
        before = processes(pool, file)
        started = tmp_path / "started"
        hung = pool.call(f"{file}:sleeper", "", str(started), None)
        others = [pool.call("exact_match", "", "12", "12") for _ in range(8)]
        assert all(other.result().value == 1.0 for other in others)
        assert hung.result() == Result(None, failure=f"did not return within rewards.timeout_s={LIMIT_S}")
        assert has_ended(int(started.read_text()))
        after = processes(pool, file)
        assert len(after) == 2 and len(after & before) == 1


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("sys.exit(3)", "raised SystemExit: 3"),
        ("os._exit(3)", "terminated its process (exit status 3)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "terminated its process (SIGSEGV)"),
        ("(_ for _ in ()).throw(KeyboardInterrupt())", "raised KeyboardInterrupt: "),
        ("input()", "raised EOFError: EOF when reading a line"),
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
    ],
)
def test_function_that_ends_its_process_fails_alone(pool, file, code, failure):
    assert act(pool, file, code) == Result(None, failure=failure)
    assert len(processes(pool, file)) == 2


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_killed_or_suspended_call_is_repeated(pool, file, number, tmp_path):
    """The first process is killed during the call, as the kernel does when memory runs out, or is suspended until it
    exceeds the time limit."""
    first = f"not os.path.exists('{tmp_path}/1') and not open('{tmp_path}/1', 'w').close()"
    assert act(pool, file, f"os.kill(os.getpid(), signal.{number}) if {first} else 7") == Result(7.0, "7.0")


def test_repeatedly_killed_call_names_the_signal(pool, file, tmp_path):
    code = f"open('{tmp_path}/calls', 'a').write('.') and os.kill(os.getpid(), signal.SIGKILL)"
    result = act(pool, file, code)
    assert result.failure == "lost its process (SIGKILL, possibly because memory ran out) (in each of 3 attempts)"
    assert result.is_infrastructure and (tmp_path / "calls").read_text() == "..."
    assert len(processes(pool, file)) == 2


def test_batch_call_is_repeated_for_the_samples_that_failed(file, monkeypatch):
    monkeypatch.setattr("megarl.core.outage.FIRST_PAUSE_S", POLL_S)
    name = f"{file}:batch"
    pool = FunctionPool([name], None, 1, WAIT_S, outage_s=WAIT_S)
    try:
        prompts = [Prompt("p", "", [1])] * 3
        results = pool.call_batch(name, prompts, ["1", "away", "bad"]).result()
    finally:
        pool.close()
    assert results[:2] == [Result(3.0, "3.0"), Result(1.0, "1.0")], "the numbers of samples in the last calls"
    assert results[2] == Result(None, failure="raised ValueError: bad")


def test_lasting_outage_is_an_infrastructure_failure(file):
    pool = FunctionPool([f"{file}:act"], None, 1, WAIT_S, outage_s=0.001)
    try:
        result = act(pool, file, "(_ for _ in ()).throw(ConnectionResetError('gone'))")
    finally:
        pool.close()
    assert result.kind == "away"
    assert result.failure == "raised ConnectionResetError: gone (waited for rewards.outage_s=0.001)"


def test_process_killed_once_at_start_is_replaced(tmp_path):
    (tmp_path / "killed.py").write_text(
        f"import os, signal\nif not os.path.exists('{tmp_path}/1'):\n"
        f"    open('{tmp_path}/1', 'w')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def f(prompt, response, answer):\n    return 1\n"
    )
    pool = FunctionPool([f"{tmp_path / 'killed.py'}:f"], None, 1, WAIT_S)
    try:
        assert pool.call(f"{tmp_path / 'killed.py'}:f", "", "", None).result().value == 1.0
    finally:
        pool.close()


def test_process_killed_at_start_is_not_a_user_error(tmp_path):
    (tmp_path / "killed.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(
        InfrastructureFailure, match=r"killed\.py:f: .* was killed while it started \(SIGKILL\).* Fix: "
    ):
        FunctionPool([f"{tmp_path / 'killed.py'}:f"], None, 1, WAIT_S)


def test_crash_names_the_memory_limit(file):
    pool = FunctionPool([f"{file}:act"], None, 1, WAIT_S, memory_mib=4096)
    try:
        assert act(pool, file, "os.abort()").failure == "terminated its process (SIGABRT, rewards.memory_mib=4096)"
    finally:
        pool.close()


def test_printed_output_is_not_mistaken_for_a_result(pool, file):
    assert act(pool, file, "print('{\"value\": 7}') or sys.stdout.write('x') and 1").value == 1.0


def test_long_and_unencodable_responses_are_delivered(pool, file):
    assert pool.call("exact_match", "", "a" * 10_000_000, "b").result().value == 0.0
    assert pool.call("exact_match", "", "\ud800", "\ud800").result().value == 1.0


def test_hanging_import_is_reported_and_its_process_killed(tmp_path, monkeypatch, children):
    (tmp_path / "hangs.py").write_text(f"import time\ntime.sleep({HANG_S})\n")
    monkeypatch.setattr("megarl.rewards.pool.IMPORT_S", 0.5)
    refusal = rf"^rewards.functions: .*hangs.py:f: the import did not finish within {SHORT_S} s\. Fix: move slow work"
    with pytest.raises(ValueError, match=refusal):
        FunctionPool([f"{tmp_path / 'hangs.py'}:f"], None, 1, SHORT_S)
    assert not children()


def test_missing_functions_are_rejected_before_any_call(file, tmp_path):
    with pytest.raises(ValueError, match="has no function 'missing'"):
        FunctionPool([f"{file}:missing"], None, 2, WAIT_S)
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(4)")
    with pytest.raises(
        ValueError, match=r"^rewards.functions: .*leaves.py:f: the import ended the process \(exit status 4\)"
    ):
        FunctionPool([f"{tmp_path / 'leaves.py'}:f"], None, 2, WAIT_S)
    with pytest.raises(ValueError, match=r"rewards.judge: .*none.py is not a Python file"):
        FunctionPool([], f"{tmp_path}/none.py:judge", 1, WAIT_S)
    with pytest.raises(ValueError, match=r"no function 'f'. Fix: define it as f\(prompt, first, second, answer"):
        FunctionPool([], f"{file}:f", 1, WAIT_S)


def test_closed_pool_resolves_calls_and_leaves_no_process(file, children):
    pool = FunctionPool([f"{file}:act"], None, 2, WAIT_S)
    started = children()
    hung = pool.call(f"{file}:act", "", f"time.sleep({HANG_S})", None)
    assert len(started) == 2
    pool.close()
    assert hung.result() == Result(None, failure="terminated its process (SIGKILL)")
    assert not any(child.is_running() for child in started)


def has_ended(pid: int) -> bool:
    """Return whether the process is gone or a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
