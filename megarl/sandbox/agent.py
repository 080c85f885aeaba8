"""The agent: the first process in a sandbox. It runs programs within limits, one at a time, and reports their results.

The sandbox's own Python runs the text of this file, so it imports only modules that load quickly and nothing from
megarl. Messages are lists of byte strings in the format of `pack`, received on stdin and sent to stdout. The sandbox
exits at the end of stdin, regardless of how the client process exited. Programs cannot harm the agent: it has process
id 1 in the sandbox, which no signal from inside can kill, and its memory and files are not accessible to them.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time

CHECK_S = 0.05
"""Interval in seconds between checks of the total resource usage of a program's processes."""

MAX_FILES = 20_000
"""Maximum number of files in a sandbox's own folders, because even empty files use memory."""

OPEN_FILES = 256
SIGNALS = 1024
SOCKET_BYTES = 212992
"""Assumed maximum size of a socket buffer if the kernel does not report it: Linux's default."""

READ_BYTES = 65536
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 36, 38


def pack(fields):
    """Encode a message: a line with the lengths of its fields, followed by the fields."""
    return b" ".join(b"%d" % len(field) for field in fields) + b"\n" + b"".join(fields)


class BoundedOutput:
    """The beginning and the end of a program's output, and its total length."""

    def __init__(self, limit):
        self.half, self.total = (limit + 1) // 2, 0
        self.head, self.tail = bytearray(), bytearray()

    def add(self, data):
        self.total += len(data)
        free = self.half - len(self.head)
        self.head += data[:free]
        self.tail += data[free:]
        if len(self.tail) > 2 * READ_BYTES + self.half:
            del self.tail[: -self.half]

    def fields(self):
        return [b"%d" % self.total, bytes(self.head), bytes(self.tail[-self.half :])]


class Agent:
    """The agent's state: the folder and the environment for programs."""

    def __init__(self, folder, path, counts_own=False, removes_folder=False):
        """
        Args:
            counts_own: whether the kernel counts this sandbox's processes separately from the user's other processes.
            removes_folder: whether to remove the folder on exit.
        """
        self.folder, self.counts_own, self.removes_folder = folder, counts_own, removes_folder
        self.is_first = os.getpid() == 1
        self.environment = {
            **dict(PATH=path, HOME=folder, TMPDIR=folder, LANG="C.UTF-8", USER="sandbox", LOGNAME="sandbox"),
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        }
        self.wake, wake = os.pipe()
        for end in (self.wake, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def others(self):
        """Return the ids of all other processes in the sandbox."""
        if self.is_first:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        pids, parents = [], [os.getpid()]
        while parents:
            text = text_of(f"/proc/{parents[0]}/task/{parents.pop(0)}/children")
            parents += (children := [int(pid) for pid in text.split()])
            pids += children
        return pids

    def kill_others(self):
        """Kill all other processes, including detached ones, and wait until they have exited."""
        while True:
            # Signal all processes (pid −1) only as process 1 of a PID namespace, which contains just the sandbox.
            for pid in [-1] if self.is_first else self.others():
                try:  # noqa: SIM105 - contextlib is slow to import
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            try:
                while os.waitpid(-1, 0 if self.is_first else os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.001)

    def write(self, name, data):
        """Write a file. Return an error message, or an empty one on success."""
        path = os.path.join(self.folder, name.decode())
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if os.path.lexists(path) and not os.path.isdir(path):
                os.unlink(path)  # a program may have created a pipe or link here
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
                file.write(data)
        except OSError as error:
            return str(error).encode()
        return b""

    def run(self, limits, merged, stdin, arguments):
        """Run a program and return the fields of its result."""
        return Run(self, limits, merged, stdin, arguments).fields()


class Run:
    """One execution of a program, until all of its processes have exited."""

    def __init__(self, agent, limits, merged, stdin, arguments):
        self.agent, self.limits = agent, limits
        self.out, self.err = BoundedOutput(limits["output_bytes"]), BoundedOutput(limits["output_bytes"])
        self.cpu_before = cpu_of_exited()
        self.begin = time.monotonic()
        (stdin_read, self.stdin_write), (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.exec_program(arguments, (stdin_read, out_write, out_write if merged else err_write))
        for end in (stdin_read, out_write, err_write):
            os.close(end)
        self.stdin, self.status, self.limit = memoryview(stdin), None, b""
        self.outputs = {out_read: self.out, err_read: self.err}
        self.watch()
        agent.kill_others()
        for end in list(self.outputs):
            os.set_blocking(end, False)
            while self.read(end):
                pass
        self.close_stdin()

    def exec_program(self, arguments, ends):
        """Replace the forked process with the program."""
        try:
            for number, end in enumerate(ends):
                os.dup2(end, number)
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            self.restrict()
            os.chdir(self.agent.folder)
            os.execvpe(arguments[0], arguments, self.agent.environment)
        except BaseException as error:
            os.write(2, b"%b: %b\n" % (arguments[0], getattr(error, "strerror", str(error)).encode()))
        os._exit(127)

    def restrict(self):
        """Set the limits that the kernel enforces per process."""
        limits, bound = self.limits, {}
        bound |= dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_MEMLOCK), (0, 0))
        bound[resource.RLIMIT_NOFILE] = OPEN_FILES, OPEN_FILES
        bound[resource.RLIMIT_SIGPENDING] = SIGNALS, SIGNALS
        # The kernel samples CPU time at clock ticks, so it may count more than the program has used. These limits are
        # slightly higher, so that `exceeded_limit`, which reads exact times, decides first. They are a backstop in case
        # the agent itself gets no CPU time.
        bound[resource.RLIMIT_CPU] = limits["cpu_s"] + 1, limits["cpu_s"] + 2
        bound[resource.RLIMIT_AS] = limits["memory_mib"] << 20, limits["memory_mib"] << 20
        bound[resource.RLIMIT_FSIZE] = limits["file_mib"] << 20, limits["file_mib"] << 20
        if self.agent.counts_own:
            bound[resource.RLIMIT_NPROC] = limits["processes"] + 1, limits["processes"] + 1
        for kind, (soft, hard) in bound.items():
            current_hard = resource.getrlimit(kind)[1]
            if current_hard != resource.RLIM_INFINITY:
                soft, hard = min(soft, current_hard), min(hard, current_hard)
            resource.setrlimit(kind, (soft, hard))

    def watch(self):
        """Forward input and output until the program exits or exceeds a limit."""
        poll = select.poll()
        for end in (0, self.agent.wake, *self.outputs):
            poll.register(end, select.POLLIN)
        os.set_blocking(self.stdin_write, False)
        poll.register(self.stdin_write, select.POLLOUT)
        end_s = self.begin + self.limits["wall_ms"] / 1000
        check_s = self.begin + CHECK_S
        while self.status is None:
            now = time.monotonic()
            if now >= end_s:
                self.limit = b"wall_s"
                return
            if now >= check_s:
                self.limit = self.exceeded_limit()
                if self.limit:
                    return
                check_s = now + CHECK_S
            for end, _ in poll.poll(1000 * max(0.0, min(end_s, check_s) - now) + 1):
                if end == 0:  # stdin was closed, so the caller no longer waits for the result
                    exit_sandbox(self.agent)
                elif end == self.stdin_write:
                    if not self.feed():
                        poll.unregister(end)
                        self.close_stdin()
                elif end == self.agent.wake:
                    os.read(end, READ_BYTES)
                    self.reap()
                elif not self.read(end):
                    poll.unregister(end)

    def reap(self):
        """Reap processes that have exited, and record the program's exit status."""
        while self.status is None:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = os.waitstatus_to_exitcode(status)

    def feed(self):
        """Write part of the program's input. Return whether there is more."""
        try:
            self.stdin = self.stdin[os.write(self.stdin_write, self.stdin[:READ_BYTES]) :] if self.stdin else self.stdin
        except BlockingIOError:
            return True
        except OSError:  # the program has closed its input
            return False
        return bool(self.stdin)

    def close_stdin(self):
        if self.stdin_write >= 0:
            os.close(self.stdin_write)
            self.stdin_write = -1

    def read(self, end):
        """Read part of an output stream. Return whether more output may follow."""
        try:
            data = os.read(end, READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self.outputs[end].add(data)
        return bool(data)

    def exceeded_limit(self):
        """Return the name of a limit that the program's processes exceed in total, or an empty string if there is
        none."""
        pids = self.agent.others()
        if len(pids) > self.limits["processes"]:
            return b"processes"
        if cpu_of_exited() - self.cpu_before + sum(map(cpu_of, pids)) > self.limits["cpu_s"]:
            return b"cpu_s"
        limit = self.limits["memory_mib"] << 20
        kernel = socket_bytes() if self.agent.is_first else 0
        # Resident memory is quick to read but counts shared pages several times. Check the exact value only if needed.
        if sum(map(resident_bytes, pids)) + kernel > limit and sum(map(proportional_bytes, pids)) + kernel > limit:
            return b"memory_mib"
        if self.agent.is_first and max(map(num_files, (self.agent.folder, "/dev/shm"))) > MAX_FILES:
            return b"files"
        return b""

    def fields(self):
        used_s = cpu_of_exited() - self.cpu_before
        out_of_time = self.status == -signal.SIGKILL and used_s > self.limits["cpu_s"]
        if not self.limit and (out_of_time or self.status == -signal.SIGXCPU):
            self.limit = b"cpu_s"
        status = -signal.SIGKILL if self.status is None else self.status
        numbers = [b"%d" % status, self.limit, b"%d" % (1000 * (time.monotonic() - self.begin))]
        for end in self.outputs:
            os.close(end)
        return [*numbers, *self.out.fields(), *self.err.fields()]


def cpu_of_exited():
    """Return the CPU seconds used by all sandbox processes that have exited."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def cpu_of(pid):
    """Return the CPU seconds used by a process and by its exited children."""
    numbers = text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, numbers[11:15])) / TICKS


def resident_bytes(pid):
    """Return the resident memory of a process in bytes."""
    numbers = text_of(f"/proc/{pid}/statm").split() or ["0", "0"]
    return int(numbers[1]) * PAGE


def proportional_bytes(pid):
    """Return the resident memory of a process and its page tables in bytes, with shared pages divided among the
    processes that share them. If the kernel does not report these sizes, return the size of the address space."""
    sizes = [sizes_of(f"/proc/{pid}/{name}") for name in ("smaps_rollup", "status")]
    if "Pss" in sizes[0]:
        return sizes[0]["Pss"] + sizes[1].get("VmPTE", 0)
    return sizes[1].get("VmSize", 0)


def sizes_of(path):
    """Return the sizes in a file with lines such as `Pss: 12 kB`, in bytes, keyed by name."""
    fields = [line.split() for line in text_of(path).splitlines()]
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in fields if len(line) == 3 and line[2] == "kB"}


def socket_bytes():
    """Return the bytes that the sandbox's Unix sockets can buffer, plus the bytes buffered by its other sockets."""
    size = int(text_of("/proc/sys/net/core/wmem_max") or SOCKET_BYTES)
    total = 2 * size * (text_of("/proc/net/unix").count("\n") - 1)
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in text_of(f"/proc/net/{kind}").splitlines()[1:]:
            total += 2 * sum(int(queued, 16) for queued in line.split()[4].split(":"))
    return max(0, total)


def num_files(folder):
    """Return the number of files in a folder's file system, or 0 if the file system does not count them."""
    try:
        system = os.statvfs(folder)
    except OSError:
        return 0
    return system.f_files - system.f_ffree


def text_of(path):
    """Return the text of a file in /proc. It is empty if the process has exited or may not be inspected."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def exit_sandbox(agent):
    """Exit the sandbox. The kernel kills its other processes when process 1 exits."""
    if not agent.is_first:
        agent.kill_others()
        if agent.removes_folder:
            import shutil

            shutil.rmtree(agent.folder, ignore_errors=True)
    os._exit(0)


def read_message(agent):
    """Return the fields of the next message. Exit at the end of stdin."""
    line = sys.stdin.buffer.readline()
    lengths = [int(length) for length in line.split()]
    fields = [sys.stdin.buffer.read(length) for length in lengths]
    if not line.endswith(b"\n") or [len(field) for field in fields] != lengths:
        exit_sandbox(agent)
    return fields


def send(fields):
    data = memoryview(pack(fields))
    while data:
        data = data[os.write(1, data) :]


LIMITS = ("wall_ms", "cpu_s", "memory_mib", "processes", "file_mib", "output_bytes")


def main(folder, path, *options):
    """Serve requests until the end of stdin.

    Args:
        folder: working directory and home directory for programs.
        options: any of counts_own and removes_folder (see Agent).
    """
    libc = ctypes.CDLL(None)
    for option, value in ((PR_SET_DUMPABLE, 0), (PR_SET_CHILD_SUBREAPER, 1), (PR_SET_NO_NEW_PRIVS, 1)):
        libc.prctl(option, value, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent = Agent(folder, path, **dict.fromkeys(options, True))
    send([b"ready"])
    while True:
        kind, *fields = read_message(agent)
        if kind == b"write":
            send([agent.write(*fields)])
        else:
            numbers, merged, stdin, *arguments = fields
            limits = dict(zip(LIMITS, map(int, numbers.split()), strict=True))
            send(agent.run(limits, merged == b"1", stdin, arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
