"""The sandbox agent without isolation: limits, output, and cleanup of started processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from megarl.sandbox.choice import Unsafe
from megarl.sandbox.sandbox import SandboxError
from tests.paths import ROOT
from tests.sandboxes import finish, limits, printed
from tests.timing import WAIT_S, wait_until


@pytest.fixture
def provider() -> Unsafe:
    return Unsafe(limits(cpu_s=1))


def test_program_has_its_own_environment_and_folder(provider, monkeypatch):
    monkeypatch.setenv("MEGARL_SECRET", "a")
    program = "import os; print('MEGARL_SECRET' in os.environ, os.getcwd() == os.environ['HOME'], os.getcwd())"
    secret, at_home, folder = printed(provider, program).split()
    assert (secret, at_home) == ("False", "True") and "megarl-sandbox-" in folder
    assert not Path(folder).exists()


def test_limits_on_time_memory_and_files_are_enforced(provider):
    assert finish(provider, "while True: pass").limit == "cpu_s"
    assert finish(Unsafe(limits(wall_s=0.3)), "import time; time.sleep(60)").limit == "wall_s"
    assert b"MemoryError" in finish(provider, "bytearray(1 << 30)").stderr
    assert b"File too large" in finish(provider, "open('a', 'wb').write(bytes(9 << 20))").stderr


def test_messages_of_any_length_are_transferred(provider):
    async def run() -> tuple[bytes, bytes]:
        async with await provider.start() as sandbox:
            await sandbox.upload("a/b.bin", bytes(range(256)) * 1000)
            one = await sandbox.run(["sha256sum", "a/b.bin"])
            two = await sandbox.run(["cat"], stdin=b"\x00\n1 2\n")
            return one.stdout, two.stdout

    digest, echo = asyncio.run(run())
    local = subprocess.run(["sha256sum"], input=bytes(range(256)) * 1000, capture_output=True).stdout
    assert digest.split()[0] == local.split()[0]
    assert echo == b"\x00\n1 2\n"


def test_missing_program_has_an_exit_status(provider):
    async def run() -> tuple[int, str]:
        async with await provider.start() as sandbox:
            finished = await sandbox.run(["no-such-command"])
            return finished.status, finished.stderr.decode()

    assert asyncio.run(run()) == (127, "no-such-command: No such file or directory\n")


def test_daemon_is_killed_with_its_program(provider):
    program = """
        import os, sys
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write, str(os.getpid()).encode())
                os.execvp("sleep", ["sleep", "600"])
            os._exit(0)
        print(os.read(read, 100).decode())
    """
    assert not psutil.pid_exists(int(printed(provider, program)))


PARENT = """
import asyncio, sys
from megarl.sandbox.choice import Unsafe
from tests.sandboxes import limits

async def main():
    sandbox = await Unsafe(limits()).start()
    await sandbox.run(["sh", "-c", "echo $$ > pid; sleep 600 & pwd > " + sys.argv[1] + "; sleep 600"])

asyncio.run(main())
"""


def test_killed_parent_leaves_nothing(tmp_path):
    file = tmp_path / "folder"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(file)], cwd=ROOT)
    wait_until(lambda: file.exists() and file.read_text())
    folder = Path(file.read_text().strip())
    pid = int((folder / "pid").read_text())
    program = psutil.Process(pid)
    processes = [program, *program.children()]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    assert alive == []
    wait_until(lambda: not folder.exists())


def test_agent_killed_by_its_program_is_a_failure(provider):
    before = set(Path(tempfile.gettempdir()).glob("megarl-sandbox-*"))
    with pytest.raises(SandboxError, match="the sandbox exited"):
        finish(provider, "import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    assert set(Path(tempfile.gettempdir()).glob("megarl-sandbox-*")) == before
