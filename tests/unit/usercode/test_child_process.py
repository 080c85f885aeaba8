"""Child processes that reply, hang, flood, crash, ignore signals and start processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megarl.usercode import child_process
from megarl.usercode.child_process import ChildFailure, ChildProcess
from megarl.usercode.parent import SELF_CLEANING
from tests.timing import GRACE_S, HANG_S, QUIET_S, SHORT_S, WAIT_S, wait_until

PRELUDE = """
import json, os, signal, subprocess, sys, time
from megarl.usercode.parent import connect, send
parent = connect()
"""
HANG = f"time.sleep({HANG_S})"
SLEEP = f"['sleep', '{HANG_S}']"

Start = Callable[..., ChildProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a child with the given code. All children are killed at the end."""
    children: list[ChildProcess] = []

    def start_child(code: str, **options: Any) -> ChildProcess:
        children.append(ChildProcess([sys.executable, "-c", PRELUDE + code], **options))
        return children[-1]

    yield start_child
    for child in children:
        child.kill()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def failure_of(child: ChildProcess, timeout_s: float = WAIT_S) -> ChildFailure:
    """Return the failure of the next message. The process must have been killed and reaped."""
    with pytest.raises(ChildFailure) as caught:
        child.receive(timeout_s)
    assert not psutil.pid_exists(child.pid)
    return caught.value


def test_call_returns_the_reply(start):
    child = start("for line in parent: send(parent, {'length': len(line), 'text': json.loads(line)})")
    for text in ("a", "ü\n\ud800", "x" * 3_000_000):
        request = json.dumps(text).encode() + b"\n"
        assert child.call(request, WAIT_S) == {"length": len(request), "text": text.replace("\ud800", "\ufffd")}


def test_messages_sent_together_are_received_one_by_one(start):
    child = start("for i in range(3): send(parent, {'i': i})\ntime.sleep(0)")
    assert [child.receive(WAIT_S)["i"] for _ in range(3)] == [0, 1, 2]
    assert str(failure_of(child)) == "exit status 0"


def test_printed_text_goes_to_the_log(start, tmp_path):
    code = "print('{}', flush=True)\nsubprocess.run(['echo', 'from a program'])\nsend(parent, {'in': sys.stdin.read()})"
    with (tmp_path / "log").open("wb") as log:
        assert start(code, log=log).receive(WAIT_S) == {"in": ""}
    assert (tmp_path / "log").read_text() == "{}\nfrom a program\n"


def test_printed_text_goes_to_stderr_without_a_log(start, capfd):
    start("print('printed', flush=True)\nprint('error', file=sys.stderr, flush=True)\nsend(parent, {})").receive(WAIT_S)
    assert capfd.readouterr() == ("", "printed\nerror\n")


def test_child_does_not_read_the_stdin_of_its_parent(start):
    stdin, (reader, writer) = os.dup(0), os.pipe()
    os.write(writer, b"typed")
    os.close(writer)
    try:
        os.dup2(reader, 0)
        child = start("send(parent, {'in': sys.stdin.read()})")
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
        os.close(reader)
    assert child.receive(WAIT_S) == {"in": ""}


def test_child_has_only_the_given_environment(start):
    child = start("send(parent, dict(os.environ))", environment={"A": "b", "PYTHONPATH": os.pathsep.join(sys.path)})
    assert child.receive(WAIT_S).keys() - {"LC_CTYPE"} == {"A", "PYTHONPATH"}


def test_time_limit_covers_request_and_reply(start, monkeypatch):
    child, limits, now = start(HANG), {}, [100.0]
    monkeypatch.setattr(child_process, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def send(request: bytes, timeout_s: float) -> None:
        limits["send"] = timeout_s
        now[0] += 3

    monkeypatch.setattr(child, "send", send)
    monkeypatch.setattr(child, "receive", lambda timeout_s: limits.update(receive=timeout_s) or {})
    child.call(b"\n", 5)
    assert limits == {"send": 5, "receive": 2}
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os._exit(3)", "exit status 3"),
        ("sys.exit(4)", "exit status 4"),
        ("parent.write(b'{'); parent.flush(); os._exit(5)", "exit status 5"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 5)", f"signal {signal.SIGRTMIN + 5}"),
    ],
)
def test_failure_names_how_the_process_ended(start, code, reason):
    failure = failure_of(start(code))
    assert (str(failure), failure.timed_out) == (reason, False)


def test_crashing_process_writes_its_stack(start, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        failure_of(start("def crash(): os.kill(os.getpid(), signal.SIGSEGV)\ncrash()", log=log))
    assert "in crash" in (tmp_path / "log").read_text()


def test_kill_closes_the_connection_and_may_be_repeated(start):
    before = len(os.listdir("/proc/self/fd"))
    child = start(HANG)
    child.kill("first")
    child.kill("second")
    child.show_stacks()
    assert child.status == "first" and len(os.listdir("/proc/self/fd")) == before


def test_process_reaped_by_another_thread_has_ended(start):
    child = start("os._exit(0)")
    os.waitpid(child.pid, 0)
    assert child.has_ended
    child._process.poll()  # reap it, so that the fixture does not signal a reused id


def test_ended_process_keeps_its_id_until_it_is_killed(start):
    child = start("os._exit(0)")
    wait_until(lambda: child.has_ended)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    with pytest.raises(ChildFailure, match=r"^exit status 0$"):
        child.call(b"\n", WAIT_S)
    assert not psutil.pid_exists(child.pid) and child.has_ended


def test_hanging_process_writes_its_stacks_and_is_killed(start, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        child = start(f"def hang(): {HANG}\nsend(parent, {{}})\nhang()", log=log)
    child.receive(WAIT_S)
    failure = failure_of(child, SHORT_S)
    assert failure.timed_out and "in hang" in (tmp_path / "log").read_text()


def test_slowly_written_message_does_not_extend_the_time_limit(start):
    child = start("send(parent, {})\nwhile True:\n    parent.write(b' '); parent.flush()")
    child.receive(WAIT_S)
    assert failure_of(child, SHORT_S).timed_out


def test_process_that_does_not_read_is_killed(start):
    child = start(f"send(parent, {{}})\n{HANG}")
    child.receive(WAIT_S)
    with pytest.raises(ChildFailure) as caught:
        child.send(b"a" * 50_000_000, SHORT_S)
    assert caught.value.timed_out and not psutil.pid_exists(child.pid)


@pytest.mark.parametrize("garbage", ["b'no JSON'", "b'\\xff\\x00'", "b'[1]'", "b'[' * 100_000", "b'9' * 10_000", "b''"])
def test_message_that_is_not_a_json_object_is_a_failure(start, garbage):
    failure = failure_of(start(f"parent.write({garbage} + b'\\n'); parent.flush()\n{HANG}"))
    assert (str(failure), failure.timed_out) == ("sent a message that is not a JSON object", False)


def test_endless_message_is_a_failure(start, monkeypatch):
    monkeypatch.setattr(child_process, "MAX_MESSAGE_BYTES", 2**20)
    child = start("while True: parent.write(b' ' * 65536); parent.flush()")
    assert str(failure_of(child)).startswith("sent a message of more than ")


def test_process_that_closes_its_connection_is_killed(start):
    assert str(failure_of(start(f"parent.close()\n{HANG}"))) == "closed its connection"


def test_programs_of_the_child_do_not_inherit_the_connection(start):
    child = start(f"subprocess.Popen({SLEEP}, close_fds=False)\nos._exit(0)")
    assert str(failure_of(child)) == "exit status 0"


def test_process_that_ignores_signals_is_killed(start):
    ignored = "SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT"
    child = start(
        f"for number in (signal.{ignored}): signal.signal(number, signal.SIG_IGN)\nsend(parent, {{}})\n{HANG}"
    )
    child.receive(WAIT_S)
    child.kill()
    assert not psutil.pid_exists(child.pid)


DESCENDANTS = f"""
code = "import subprocess; p = subprocess.Popen({SLEEP}); print(p.pid, flush=True); p.wait()"
detached = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
orphan = int(subprocess.run(["sh", "-c", "sleep {HANG_S} >&- & echo $!"], stdout=subprocess.PIPE).stdout)
own_group = subprocess.Popen({SLEEP}, process_group=0)
pids = [subprocess.Popen({SLEEP}).pid, orphan, own_group.pid, detached.pid, int(detached.stdout.readline())]
send(parent, {{"pids": pids}})
{HANG}
"""


def test_kill_reaches_all_descendants(start):
    child = start(DESCENDANTS)
    pids = child.receive(WAIT_S)["pids"]
    assert len(set(pids)) == 5 and all(map(is_running, pids))
    child.kill()
    wait_until(lambda: not any(map(is_running, pids)), lambda: [pid for pid in pids if is_running(pid)])


def test_kill_reaches_descendants_of_an_ended_process(start):
    child = start(f"send(parent, {{'pid': subprocess.Popen({SLEEP}).pid}})\nos._exit(1)")
    pid = child.receive(WAIT_S)["pid"]
    wait_until(lambda: child.has_ended)
    assert is_running(pid)
    child.kill()
    wait_until(lambda: not is_running(pid))


SELF_CLEANER = f"""
own = subprocess.Popen({SLEEP}, env={{"PATH": os.environ["PATH"]}})
send(parent, {{}})
parent.read()
try: status = own.wait({QUIET_S})
except subprocess.TimeoutExpired: status = "running"
own.kill()
open(sys.argv[1], "w").write(str(status))
"""


def test_self_cleaning_program_survives_the_death_of_its_parent(start, tmp_path):
    file = tmp_path / "status"
    command = f"[sys.executable, '-c', {PRELUDE + SELF_CLEANER!r}, {str(file)!r}]"
    child = start(
        "from megarl.usercode.child_process import ChildProcess\n"
        f"program = ChildProcess({command}, is_self_cleaning=True)\n"
        f"program.receive({WAIT_S})\n"
        f"send(parent, {{'pid': program.pid, 'session': os.getsid(program.pid)}})\n{HANG}"
    )
    program = child.receive(WAIT_S)
    assert program["session"] == program["pid"]
    child.kill()
    wait_until(lambda: not is_running(program["pid"]))
    assert file.read_text() == "running", "its own process was killed before it could stop it"


def test_program_with_a_forged_mark_is_killed_after_the_cleanup(start, monkeypatch):
    monkeypatch.setattr(child_process, "CLEANUP_S", SHORT_S)
    child = start(f"os.environ[{SELF_CLEANING!r}] = '1'\n{DESCENDANTS}")
    pids = child.receive(WAIT_S)["pids"]
    child.kill()
    wait_until(lambda: not any(map(is_running, pids)), lambda: [pid for pid in pids if is_running(pid)])


def test_cleanup_kills_programs_that_started_after_the_kill(start, monkeypatch):
    monkeypatch.setattr(child_process, "CLEANUP_S", 0)
    pids = (child := start(DESCENDANTS)).receive(WAIT_S)["pids"]
    detached = pids[3]
    child_process._kill_remaining([psutil.Process(detached)])
    wait_until(lambda: not any(map(is_running, pids[3:])))
    assert is_running(child.pid)


def test_mark_of_a_self_cleaning_program_is_not_inherited(start, monkeypatch):
    monkeypatch.setenv(SELF_CLEANING, "1")
    code = f"send(parent, {{'marked': {SELF_CLEANING!r} in os.environ}})"
    assert start(code).receive(WAIT_S) == {"marked": False}
    assert start(code, is_self_cleaning=True).receive(WAIT_S) == {"marked": True}


def test_child_does_not_outlive_a_killed_parent():
    endless = f"{PRELUDE}send(parent, {{}})\nwhile True: pass"
    code = (
        "import sys, time\nfrom megarl.usercode.child_process import ChildProcess\n"
        f"child = ChildProcess([sys.executable, '-c', {endless!r}])\n"
        f"child.receive({WAIT_S})\nprint(child.pid, flush=True)\ntime.sleep({HANG_S})"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    wait_until(lambda: not is_running(pid))


def test_memory_of_process_and_descendants_is_limited(start):
    attempt = "bytearray(int(sys.argv[1]))"
    child = start(
        "send(parent, {})\nfor line in parent:\n"
        "    try: result = len(bytearray(int(line)))\n"
        "    except MemoryError: result = 'MemoryError'\n"
        f"    program = subprocess.run([sys.executable, '-c', 'import sys; {attempt}', line], capture_output=True)\n"
        "    send(parent, {'result': result, 'program': program.stderr.decode().strip().split()[-1:]})"
    )
    child.receive(WAIT_S)
    child.limit_memory(400)
    small, large = 100 * 2**20, 800 * 2**20
    assert child.call(b"%d\n" % small, WAIT_S) == {"result": small, "program": []}
    assert child.call(b"%d\n" % large, WAIT_S) == {"result": "MemoryError", "program": ["MemoryError"]}


def test_memory_limit_is_added_to_the_current_size(start):
    child = start(
        "import mmap\nreserved = mmap.mmap(-1, 2**31)\nsend(parent, {})\n"
        "for line in parent: send(parent, {'length': len(bytearray(int(line)))})"
    )
    child.receive(WAIT_S)
    child.limit_memory(400)
    soft, hard = psutil.Process(child.pid).rlimit(psutil.RLIMIT_AS)
    assert 2**31 < soft < 2**32 and hard == psutil.RLIM_INFINITY
    assert child.call(b"%d\n" % (100 * 2**20), WAIT_S) == {"length": 100 * 2**20}


def test_memory_limit_stays_below_the_hard_limit(start):
    child = start(
        f"import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))\nsend(parent, {{}})\n{HANG}"
    )
    child.receive(WAIT_S)
    child.limit_memory(2**20)
    assert psutil.Process(child.pid).rlimit(psutil.RLIMIT_AS) == (2**33, 2**33)


def test_memory_limit_of_an_ended_process_has_no_effect(start):
    child = start("os._exit(7)")
    wait_until(lambda: child.has_ended)
    child.limit_memory(400)
    assert str(failure_of(child)) == "exit status 7"
    child.limit_memory(400)


def test_threads_may_kill_a_process_at_the_same_time(start):
    child = start(DESCENDANTS)
    pids = child.receive(WAIT_S)["pids"]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: child.kill(), range(4)))
    wait_until(lambda: not any(map(is_running, pids)))


def test_kill_fails_a_pending_call_with_its_reason(start):
    child = start(f"send(parent, {{}})\n{HANG}")
    child.receive(WAIT_S)
    killing = threading.Timer(SHORT_S, child.kill, ["used too much"])
    killing.start()
    failure = failure_of(child, GRACE_S)
    killing.join()
    assert (str(failure), failure.timed_out) == ("used too much", False)


def test_kill_fails_a_call_if_a_detached_process_is_connected(start):
    """The detached process is not a descendant of the child, because the process between them has exited."""
    fork = f"if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        {HANG}\n    os._exit(0)\nos.wait()\n"
    child = start(f"{fork}send(parent, {{}})\n{HANG}")
    child.receive(WAIT_S)
    [escaped] = [process for process in psutil.process_iter() if process.pid != child.pid and is_like(process, child)]
    killing = threading.Timer(SHORT_S, child.kill)
    killing.start()
    try:
        assert str(failure_of(child, GRACE_S)) == "SIGKILL"
    finally:
        killing.join()
        escaped.kill()


def is_like(process: psutil.Process, child: ChildProcess) -> bool:
    try:
        return process.cmdline() == psutil.Process(child.pid).cmdline()
    except psutil.Error:
        return False


def test_program_that_does_not_exist_raises(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        ChildProcess([str(tmp_path / "none")])


def test_import_error_names_the_file_and_the_remedy():
    assert ChildFailure("exit status 1").import_error("key=a.py", 5) == (
        "key=a.py: the import ended the process (exit status 1). Fix: make the file import without exiting "
        "(its output is in this process's log)"
    )
    assert ChildFailure("", timed_out=True).import_error("key=a.py", 5, ", or raise X") == (
        "key=a.py: the import did not finish within 5 s. Fix: move slow work out of the file's top level, or raise X"
    )


def test_processes_are_counted_by_group(start):
    child = start(f"pids = [subprocess.Popen({SLEEP}).pid for _ in range(3)]\nsend(parent, {{}})\n{HANG}")
    child.receive(WAIT_S)
    sizes = child_process.group_sizes()
    assert sizes[child.pid] == 4 and sizes[os.getpgid(0)] >= 1
