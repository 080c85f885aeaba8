"""Programs that try to escape their sandbox, to read files or processes outside, or to be visible outside."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.sandboxes import finish, printed

SECRET = "a-secret-of-the-run"

CALLS = {
    "mount": (165, b"none", b"/tmp", b"tmpfs", 0, b""),
    "chroot": (161, b"/tmp"),
    "unshare": (272, 0x10000000),  # a user namespace
    "setns": (308, 0, 0),
    "ptrace": (101, 16, 1, 0, 0),
    "process_vm_readv": (310, 1, 0, 0, 0, 0, 0),
    "memfd_create": (319, b"a", 0),
    "shmget": (29, 0, 4096, 0o1600),
    "semget": (64, 0, 30000, 0o1600),
    "msgget": (68, 0, 0o1600),
    "mq_open": (240, b"a", 0o102, 0o600, 0),
    "io_setup": (206, 128, b"\0" * 8),
    "vmsplice": (278, 1, 0, 0, 0),
    "inotify_init": (253,),
    "inotify_init1": (294, 0),
    "fanotify_init": (300, 0, 0),
    "add_key": (248, b"user", b"a", b"b", 1, -2),
    "bpf": (321, 0, 0, 0),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "io_uring_setup": (425, 1, 0),
    "sethostname": (170, b"a", 1),
    "reboot": (169, 0xFEE1DEAD, 672274793, 0, 0),
}
"""System call -> its number on x86_64 and its arguments."""


def attempts(*lines: str) -> str:
    """Return a program that tries each line and prints "done" or the type of the exception."""
    tries = [
        f"try:\n    {line}\n    print('done')\nexcept Exception as error:\n    print(type(error).__name__)\n"
        for line in lines
    ]
    return "import os, socket, ctypes, mmap\n" + "".join(tries)


def test_environment_of_the_run_is_not_visible(provider, monkeypatch):
    monkeypatch.setenv("MEGARL_SECRET", SECRET)
    names = printed(provider, "import os; print(*os.environ)").split()
    assert {"MEGARL_SECRET", "PYTHONPATH", "VIRTUAL_ENV"}.isdisjoint(names)
    assert {"PATH", "HOME", "LANG"} <= set(names)
    everywhere = """
        import glob
        for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
            try:
                print(open(path).read())
            except OSError:
                pass
    """
    assert SECRET not in printed(provider, everywhere)


def test_files_of_user_and_machine_are_not_visible(provider, tmp_path):
    (tmp_path / "secret").write_text(SECRET)
    paths = [tmp_path / "secret", ROOT / "pyproject.toml", "/etc/shadow", "/etc/passwd", "/etc/hostname", "/sys/kernel"]
    paths += [Path.home() / ".bashrc", "/var/log", "/run", "/boot", "/srv", "/mnt", "/opt"]
    visible = printed(
        provider, f"import os; print(*[p for p in {[str(path) for path in paths]} if os.path.lexists(p)])"
    )
    assert visible.strip() == ""
    home = printed(provider, f"import os; print([f for _, _, f in os.walk({str(Path.home())!r})][:1])")
    assert home.strip() in ("[]", "[[]]")


def test_only_own_folders_are_writable(provider):
    """Tries every top-level folder and every mount."""
    program = f"""
        import os
        mounts = [line.split()[1] for line in open("/proc/self/mounts")]
        top = ["/" + name for name in os.listdir("/")]
        folders = {{*mounts, *top, {sys.prefix!r}, {str(Path.home())!r}, "/usr/bin"}}
        for folder in sorted(folders):
            try:
                with open(os.path.join(folder, "file"), "w") as file:
                    file.write("a")
                print(folder)
            except OSError:
                pass
        for name in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/oom_score_adj"):
            try:
                open(name, "r+")
                print(name)
            except OSError:
                pass
    """
    assert printed(provider, program).split() == ["/dev/shm", "/tmp"]
    assert not Path("/tmp/file").exists()


def test_network_is_not_reachable(provider):
    """Tries a server on this machine by loopback, address and abstract socket name, and servers on the internet."""
    with socket.create_server(("0.0.0.0", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        port = server.getsockname()[1]
        named.bind(f"\0megarl-{port}")
        named.listen()
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(f"\0megarl-{port}")
        socket.create_connection(("127.0.0.1", port)).close()
        program = attempts(
            f"socket.create_connection(('127.0.0.1', {port}), timeout=2)",
            f"socket.create_connection(({own_address()!r}, {port}), timeout=2)",
            "socket.create_connection(('1.1.1.1', 53), timeout=2)",
            f"socket.socket(socket.AF_UNIX).connect('\\0megarl-{port}')",
            "socket.getaddrinfo('example.org', 80)",
            "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
            "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)",
        )
        answers = printed(provider, program).split()
    assert answers[:2] == ["ConnectionRefusedError", "OSError"]
    assert "done" not in answers
    assert printed(provider, "import os; print(*os.listdir('/proc/sys/net/ipv4/conf'))").split().count("lo") == 1


def own_address() -> str:
    """Return this machine's network address, or an unused address if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
        except OSError:
            return "192.0.2.1"


def test_server_in_a_sandbox_is_reachable_inside(provider):
    program = """
        import socket
        server = socket.create_server(("127.0.0.1", 8765))
        socket.create_connection(("127.0.0.1", 8765)).close()
        print("reached")
    """
    assert printed(provider, program) == "reached\n"


def test_processes_outside_are_not_visible(provider):
    program = f"""
        import os, signal
        print(*sorted(int(name) for name in os.listdir("/proc") if name.isdigit()), os.getpid())
        try:
            os.kill({os.getpid()}, signal.SIGKILL)
            print("killed")
        except ProcessLookupError:
            print("no such process")
    """
    first, *rest = printed(provider, program).split(maxsplit=3)
    assert first == "1" and rest[0] == rest[1]  # only the agent and the program are visible
    assert rest[2] == "no such process\n"


def test_agent_cannot_be_killed_read_or_impersonated(provider):
    program = """
        import os, signal
        for number in range(1, 65):
            try:
                os.kill(1, number)
            except (OSError, ValueError):
                pass
        for name in ("mem", "fd/1", "fd/0", "environ", "maps"):
            try:
                open(f"/proc/1/{name}", "rb")
                print("opened", name)
            except OSError:
                pass
        print("still here")
    """
    assert printed(provider, program, "print('next')") == "next\n"
    assert printed(provider, program) == "still here\n"


def test_program_has_no_capabilities(provider):
    program = """
        import os
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        print(int(status["CapEff"], 16), int(status["CapPrm"], 16), int(status["NoNewPrivs"]), int(status["Seccomp"]))
        print(os.getuid() != 0)
    """
    assert printed(provider, program).split() == ["0", "0", "1", "2", "True"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="CALLS has the system call numbers of x86_64")
def test_dangerous_system_calls_are_refused(provider):
    """The arguments are such that the kernel would accept the calls from root."""
    program = f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for name, (number, *arguments) in {CALLS}.items():
            value = libc.syscall(number, *arguments)
            print(name, "done" if value >= 0 else os.strerror(ctypes.get_errno()), sep=": ")
    """
    answers = dict(line.split(": ") for line in printed(provider, program).splitlines())
    assert answers.keys() == CALLS.keys()
    assert set(answers.values()) <= {"Operation not permitted", "Function not implemented"}, answers


def test_only_harmless_devices_are_visible(provider):
    program = """
        import os, stat
        modes = {name: os.lstat(f"/dev/{name}").st_mode for name in os.listdir("/dev")}
        print(*(name for name, mode in modes.items() if stat.S_ISCHR(mode)))
        print(sum(stat.S_ISBLK(mode) for mode in modes.values()))
        try:
            os.mknod("/tmp/disk", stat.S_IFBLK | 0o666, os.makedev(254, 0))
            print("created")
        except OSError as error:
            print(type(error).__name__)
        try:
            open("/dev/tty")
            print("opened")
        except OSError:
            print("no terminal")
    """
    names, blocks, created, terminal = printed(provider, program).splitlines()
    assert set(names.split()) <= {"full", "null", "ptmx", "random", "tty", "urandom", "zero", "console"}
    assert (blocks, created, terminal) == ("0", "PermissionError", "no terminal")


def test_links_do_not_lead_outside(provider, tmp_path):
    (tmp_path / "secret").write_text(SECRET)
    links = f"""
        import os
        os.symlink({str(tmp_path / "secret")!r}, "read")
        os.symlink({str(tmp_path)!r}, "folder")
        os.mkfifo("main.py.fifo")
        print(os.path.exists("read"), os.path.exists("folder"))
    """
    assert printed(provider, links) == "False False\n"

    async def upload() -> list[str]:
        refusals = []
        async with await provider.start() as sandbox:
            await sandbox.run([provider.python, "-c", "import os; os.symlink('/usr/bin/env', 'a'); os.mkfifo('b')"])
            await sandbox.upload("a", "mine")  # replaces the link
            await sandbox.upload("b", "mine")
            await sandbox.upload(str(tmp_path / "new"), "inside")  # in the sandbox's own /tmp
            for name in (f"{sys.prefix}/new", "/usr/bin/new", "a/b"):
                try:
                    await sandbox.upload(name, "out")
                except OSError as error:
                    refusals.append(str(error))
            finished = await sandbox.run(["cat", "a", "b"])
        return [*refusals, finished.stdout.decode()]

    *refusals, content = asyncio.run(upload())
    assert len(refusals) == 3 and content == "minemine"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert not Path(sys.prefix, "new").exists()


def test_sandboxes_are_isolated_from_each_other(provider):
    async def both() -> tuple[str, str, str]:
        async with await provider.start() as first, await provider.start() as second:
            await first.run([provider.python, "-c", "open('mine', 'w').write('1'); open('/dev/shm/mine', 'w')"])
            listing = [provider.python, "-c", "import os; print(os.listdir('/tmp'), os.listdir('/dev/shm'))"]
            texts = [(await sandbox.run(listing)).stdout.decode() for sandbox in (first, second)]
            sleeper = asyncio.create_task(first.run(["sleep", "1"]))
            await asyncio.sleep(0.3)
            others = await second.run([provider.python, "-c", "import os; print(len(os.listdir('/proc')))"])
            alone = await sleeper
            assert alone.succeeded
            count = "import os; print(sum(name.isdigit() for name in os.listdir('/proc')))"
            others = await second.run([provider.python, "-c", count])
            return (*texts, others.stdout.decode())

    assert asyncio.run(both()) == ("['mine'] ['mine']\n", "[] []\n", "2\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_returned_to_the_caller_only(provider, stream, capfd):
    finished = finish(provider, f"import sys; print('{SECRET}', file=sys.{stream})")
    assert getattr(finished, stream).decode() == f"{SECRET}\n"
    assert SECRET not in "".join(capfd.readouterr())
