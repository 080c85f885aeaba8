from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from megarl.cluster.supervision import processes
from tests.timing import HANG_S, SHORT_S, WAIT_S, wait_until

PARENT = """
import os, signal, subprocess, sys, time
from pathlib import Path
from tests.timing import HANG_S
folder = Path(sys.argv[1])
child = "import os, signal, sys, time; {ignore}; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep({seconds})"
for name, ignore in (("polite", "0"), ("stubborn", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")):
    code = child.format(ignore=ignore, seconds=HANG_S)
    # Start it through a process that ends at once, so that it is an orphan.
    middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}, {str(folder / name)!r}])"
    subprocess.run([sys.executable, "-c", middle])
time.sleep(HANG_S)
"""
DRIVER = """
import subprocess, sys, time
from pathlib import Path
from megarl.cluster.supervision import processes
from tests.timing import POLL_S, SHORT_S
folder = Path(sys.argv[1])
processes.adopt_orphans()
subprocess.Popen([sys.executable, "-c", (folder / "parent.py").read_text(), str(folder)])
while not all((folder / name).exists() and (folder / name).read_text() for name in ("polite", "stubborn")):
    time.sleep(POLL_S)
start = time.monotonic()
processes.end_descendants(grace_s=SHORT_S)
print(time.monotonic() - start)
"""


def test_all_descendants_end(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    done = subprocess.run([sys.executable, "-c", DRIVER, str(tmp_path)], capture_output=True, text=True, check=True)
    pids = [int((tmp_path / name).read_text()) for name in ("polite", "stubborn")]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert SHORT_S <= float(done.stdout) < WAIT_S, "the process that ignores SIGTERM takes the grace period"


HIDDEN_DRIVER = """
import ctypes, os, subprocess, sys, time
from pathlib import Path
import psutil
from megarl.cluster.supervision import memory, processes, segments, supervisor
from tests.timing import HANG_S, POLL_S, WAIT_S
NOBODY = 65534
NOT_DUMPABLE = (4, 0, 0, 0, 0)  # for prctl: files in /proc belong to root from then on, as for setuid programs
if os.getuid() == 0:
    # A process that this one may not signal.
    foreign = subprocess.Popen(["sleep", str(HANG_S)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(foreign.pid, end=" ")
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
memory.INTERVAL_S = 0.01

def start(hidden):
    ready, written = os.pipe()
    pid = os.fork()
    if not pid:
        if hidden:
            ctypes.CDLL(None).prctl(*NOT_DUMPABLE)
        os.write(written, b"1")
        time.sleep(HANG_S)
        os._exit(0)
    os.read(ready, 1)
    return pid

with supervisor.supervised() as scratch:
    (scratch / "file").touch()
    started = [start(hidden) for hidden in (False, True, False)]
    try:
        Path(f"/proc/{started[1]}/maps").read_text()
        raise SystemExit("it is not hidden")
    except PermissionError:
        pass
    with memory.MemorySampler() as sampler:
        deadline = time.monotonic() + WAIT_S
        while sampler.peak_gb() == (0.0, 0.0):
            assert time.monotonic() < deadline
            time.sleep(POLL_S)
        segments.note(scratch)
    assert processes.request_stacks([]) == []
    print(scratch, *started, flush=True)
"""


def test_unreadable_descendants_are_ended() -> None:
    """The hidden process is like a setuid helper; as root, the test adds another user's process, which must survive."""
    done = subprocess.run([sys.executable, "-c", HIDDEN_DRIVER], capture_output=True, text=True, timeout=WAIT_S)
    # The unprivileged process skips the scratch folders of root's runs, which may still be running.
    printed = re.sub("megarl: note: skipped .*\n", "", done.stdout)
    *foreign, scratch, first, hidden, last = printed.split()
    left = [pid for pid in map(int, (*foreign, first, hidden, last)) if psutil.pid_exists(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == [int(pid) for pid in foreign]
    assert not Path(scratch).exists()
    assert (done.returncode, done.stderr) == (0, "")


def test_unreadable_proc_entries_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 13 is hidden and only in the kernel's list of children; 12 is a child of 11 and only in /proc."""
    this_process = os.getpid()
    parents = {11: this_process, 12: 11, 14: 1, 15: 14}
    for pid, parent in parents.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a ) (name) S {parent} 1 1 0")
    (tmp_path / "16" / "stat").mkdir(parents=True)  # an unreadable process
    (tmp_path / "17").mkdir()  # a process that has ended
    (tmp_path / "uptime").touch()
    (tmp_path / str(this_process) / "task" / "1").mkdir(parents=True)
    (tmp_path / str(this_process) / "task" / "1" / "children").write_text("11 13 ")
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert sorted(processes.descendants()) == [11, 12, 13]


HIDEPID_DRIVER = """
import ctypes, os, subprocess, sys, time
from pathlib import Path
from megarl.cluster.supervision import processes, segments
from tests.timing import HANG_S, SHORT_S, WAIT_S
NOBODY = 65534
NOT_DUMPABLE = (4, 0, 0, 0, 0)  # of prctl
foreign = subprocess.Popen(["sleep", str(HANG_S)])  # root's
os.setgroups([])
os.setgid(NOBODY)
os.setuid(NOBODY)
processes.adopt_orphans()

def start(hidden, then=lambda: None):
    ready, written = os.pipe()
    pid = os.fork()
    if pid:
        return int(os.read(ready, 20))
    below = then() or os.getpid()
    ctypes.CDLL(None).prctl(4, 0 if hidden else 1, 0, 0, 0)
    os.write(written, str(below).encode())
    time.sleep(HANG_S)

plain, hidden = start(False), start(True)
below_plain = start(False, then=lambda: start(True))
below_hidden = start(True, then=lambda: start(False))
for pid in (foreign.pid, hidden, below_plain):
    try:
        Path(f"/proc/{pid}/stat").read_text()
        print("it is not hidden")
    except OSError:
        pass
Path(f"/proc/{plain}/stat").read_text()
segments.mapped()
print(processes.memory_gb()[0] > 0, processes.request_stacks([]), hidden in processes.descendants())
processes.end_descendants(grace_s=SHORT_S, tracker_s=2 * SHORT_S)

def exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True

print([exists(pid) for pid in (foreign.pid, plain, hidden, below_plain, below_hidden)])
"""


def in_namespace(hidepid: int, command: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in a namespace whose /proc is mounted with this hidepid option."""
    mount = f"mount --make-rprivate / && mount -t proc -o hidepid={hidepid} proc /proc"
    namespace = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", f"{mount} && {command}"]
    return subprocess.run(namespace, capture_output=True, text=True, timeout=WAIT_S)


@pytest.mark.parametrize("hidepid", [1, 2], ids=["unreadable", "invisible"])
def test_descendants_hidden_by_proc_are_ended(hidepid: int) -> None:
    """The processes run in a namespace as a user from whom /proc hides other users' processes."""
    if in_namespace(hidepid, "true").returncode:
        pytest.skip("mounting /proc requires root; the previous test uses a fake /proc")
    done = in_namespace(hidepid, f"exec {shlex.quote(sys.executable)} -c {shlex.quote(HIDEPID_DRIVER)}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "True [] True\n[True, False, False, False, False]\n"


WITH_TRACKER = """
import multiprocessing, os, signal, sys, time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from tests.timing import HANG_S
lock = multiprocessing.get_context("spawn").Lock()
memory = shared_memory.SharedMemory(create=True, size=16)
tracker = resource_tracker._resource_tracker._pid
os.kill(tracker, signal.SIGSTOP)
Path(sys.argv[1]).write_text(f"{tracker} {lock._semlock.name} {memory.name} done")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(HANG_S)
"""
SLOW_TRACKER_DRIVER = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
import psutil
from megarl.cluster.supervision import processes
from tests.timing import POLL_S, WAIT_S
file = Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", file.with_name("child.py").read_text(), str(file)])
while not (file.exists() and file.read_text().endswith("done")):
    time.sleep(POLL_S)
tracker = int(file.read_text().split()[0])

def resume_after_the_child_ends():
    while psutil.pid_exists(child.pid):
        time.sleep(POLL_S)
    time.sleep(0.5)  # long enough to be killed by mistake
    os.kill(tracker, signal.SIGCONT)

threading.Thread(target=resume_after_the_child_ends).start()
processes.adopt_orphans()
processes.end_descendants(grace_s=0.1, tracker_s=WAIT_S)
print(psutil.pid_exists(tracker))
"""


def test_resource_tracker_has_time_to_clean_up(tmp_path: Path) -> None:
    """The tracker stays suspended until the other processes have exited."""
    file = tmp_path / "names"
    (tmp_path / "child.py").write_text(WITH_TRACKER)
    done = subprocess.run(
        [sys.executable, "-c", SLOW_TRACKER_DRIVER, str(file)], capture_output=True, text=True, check=True
    )
    _, semaphore, memory, _ = file.read_text().split()
    left = [path for path in (f"sem.{semaphore.strip('/')}", memory) if Path("/dev/shm", path).exists()]
    for path in left:
        Path("/dev/shm", path).unlink()
    assert not left
    assert done.stdout == "False\n"


STUCK = """
import sys, threading, time
from pathlib import Path
from megarl.cluster.supervision.logs import log_to
from tests.timing import HANG_S

def waits_for_a_peer(entered):
    entered.set()
    time.sleep(HANG_S)

log_to(Path(sys.argv[1]))
entered = threading.Event()
threading.Thread(target=waits_for_a_peer, args=[entered], daemon=True).start()
entered.wait()
Path(sys.argv[2]).touch()
sum(iter(int, 1))  # in one call that never returns to the interpreter
"""


def test_stuck_process_writes_stacks_of_all_threads(tmp_path: Path) -> None:
    log, ready = tmp_path / "trainer-0.log", tmp_path / "ready"
    stuck = subprocess.Popen([sys.executable, "-c", STUCK, str(log), str(ready)])
    wait_until(ready.exists)
    with log.open("a") as errors:
        bystander = subprocess.Popen(["sleep", str(HANG_S)], stderr=errors)
    try:
        assert processes.request_stacks([tmp_path / "other.log"]) == []
        assert log.read_text() == ""
        assert processes.request_stacks([log, tmp_path / "other.log"], patience_s=WAIT_S) == [log]
        assert bystander.poll() is None, "the signal must not reach a process that does not handle it"
    finally:
        for process in (stuck, bystander):
            process.kill()
            process.wait()
    assert "in waits_for_a_peer" in log.read_text()
    assert "in <module>" in log.read_text()


def test_stacks_of_processes_with_a_shared_log_are_awaited(tmp_path: Path) -> None:
    """On a busy machine, one process may write long after the other."""
    log, names = tmp_path / "rewards-0.log", ("first", "second")
    pair = [subprocess.Popen([sys.executable, "-c", STUCK, str(log), str(tmp_path / name)]) for name in names]
    wait_until(lambda: all((tmp_path / name).exists() for name in names))
    late = threading.Timer(1.0, pair[1].send_signal, [signal.SIGCONT])
    pair[1].send_signal(signal.SIGSTOP)
    late.start()
    try:
        assert processes.request_stacks([log], patience_s=WAIT_S) == [log]
        assert log.read_text().count("in waits_for_a_peer") == 2
    finally:
        late.join()
        for process in pair:
            process.kill()
            process.wait()


DEEP = """
import threading, time
from tests.timing import HANG_S

def waits(depth):
    if depth:
        waits(depth - 1)
    else:
        time.sleep(HANG_S)

for _ in range(20):
    threading.Thread(target=waits, args=[90], daemon=True).start()
"""


def test_stacks_in_a_shared_log_are_not_mixed(tmp_path: Path) -> None:
    log, ready = tmp_path / "rewards-0.log", [tmp_path / str(number) for number in range(6)]
    stuck = [subprocess.Popen([sys.executable, "-c", DEEP + STUCK, str(log), str(file)]) for file in ready]
    wait_until(lambda: all(file.exists() for file in ready))
    try:
        assert processes.request_stacks([log], patience_s=WAIT_S) == [log]
    finally:
        for process in stuck:
            process.kill()
            process.wait()
    lines = [line for line in log.read_text().splitlines() if line]
    assert len(lines) > 6 * 20 * 90 and all(re.match("  File |Thread 0x|Current thread 0x", line) for line in lines)
    assert sum("in waits_for_a_peer" in line for line in lines) == 6


def test_memory_counts_this_process_and_its_descendants() -> None:
    code = f"import time; block = bytes(range(256)) * 400_000; print(flush=True); time.sleep({HANG_S})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        own = psutil.Process()
        members = [member.memory_full_info() for member in (own, *own.children(recursive=True))]
        rss, pss = processes.memory_gb()
        child.kill()
    assert max(member.rss for member in members[1:]) > 100e6
    assert rss == pytest.approx(sum(member.rss for member in members) / 1e9, rel=0.02)
    assert pss == pytest.approx(sum(member.pss for member in members) / 1e9, rel=0.02)


def test_zombie_has_no_memory() -> None:
    alone, _ = processes.memory_gb()
    child = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # leave it as a zombie
    rss, _ = processes.memory_gb()
    os.waitpid(child, 0)
    assert rss == pytest.approx(alone, rel=0.02)


def test_suspended_process_is_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({HANG_S})"])
    started = processes._started(child.pid)
    child.send_signal(signal.SIGSTOP)
    processes.kill([processes.ProcessId(child.pid, started)])
    assert child.wait(WAIT_S) is not None
    assert not psutil.pid_exists(child.pid)


def test_later_process_with_the_same_number_is_spared() -> None:
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({HANG_S})"])
    processes.kill([processes.ProcessId(child.pid, processes._started(child.pid) - 1)])
    assert child.poll() is None
    child.kill()
    child.wait()
    assert processes._started(child.pid) is None


def test_own_id_is_this_process() -> None:
    own = processes.ProcessId.own()
    assert own == processes.ProcessId(os.getpid(), processes._started(os.getpid()))
    assert own._is_running
