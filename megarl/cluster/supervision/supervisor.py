"""The run's supervisor: a parent process that only waits and a child process that drives the run, watching each other.

If either is killed, the other terminates all processes in the run. Ray alone would leave some of them running for a
minute or more. If either is suspended alone, the other resumes it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megarl.cluster.supervision import processes, segments
from megarl.cluster.supervision.interrupts import REPEAT_S, interrupts
from megarl.cluster.supervision.ownership import Untrusted
from megarl.cluster.supervision.scratch import VARIABLE, make_scratch, remove_scratch, sweep
from megarl.cluster.supervision.suspension import Resumer, named
from megarl.cluster.supervision.watchdog import FATAL, explained
from megarl.core.output import tolerate_lost_readers
from megarl.core.parent import signal_with_parent
from megarl.core.proxies import LOOPBACK, bypass_proxies

DEADLINE_S = 15
"""Seconds from the end of an interrupt's grace period until the child is killed, because a call may hang."""

POLL_S = 0.1
"""Interval in seconds between the parent's checks whether the child has exited. Python handles a signal that arrives
just before a blocking call only after the call, so the parent must not block until the child exits."""

INTERRUPTED = "interrupted; stopping the run"


@contextmanager
def supervised(grace_s: float = 0.0) -> Iterator[Path]:
    """Run the body in a child process. The parent exits with the child's status and never enters the body.

    Yields a scratch folder. When the body exits for any reason, its processes are terminated and the folder is removed.
    SIGINT, SIGTERM and SIGHUP, sent to either process or to the run's process group, raise KeyboardInterrupt in the
    body and lead to exit status 130.

    The child and its descendants form their own process group in the same session. A signal from a terminal or Slurm to
    the run's group therefore reaches only the parent, and the parent forwards it to the child. If the signal reached
    Ray's processes, it would kill them and lose the state that the run must save. The body may take `grace_s` seconds
    to end after a signal. See `interrupts`.
    """
    tolerate_lost_readers()
    bypass_proxies(*LOOPBACK)
    sweep()
    scratch = make_scratch()
    segments.note_earlier(scratch)
    sys.stdout.flush()
    processes.adopt_orphans()
    signals, parent = _handled_signals(), os.getpid()
    explained[0] = 0
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # blocked until both processes can handle them
    child = os.fork()
    if child:
        sys.exit(_guard(child, scratch, signals, grace_s))
    os.setpgid(0, 0)
    os.environ[VARIABLE] = str(scratch)
    # torch's default folder for compiled code is in /tmp, where another user may have created it.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(scratch / "inductor"))
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)  # they would suspend this background process group on terminal access
    processes.adopt_orphans()
    signal_with_parent(signal.SIGINT)  # interrupt this process if the parent exits for any reason
    interrupts.listen({signal.SIGINT, *signals})
    # A suspended parent would never exit, and calls to suspended Ray processes have no deadline.
    Resumer(lambda: [*{parent} & {os.getppid()}, *named(processes.descendants(), FATAL)]).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    try:
        yield scratch
    except KeyboardInterrupt:
        _print_error(INTERRUPTED)
        if os.getppid() != parent:  # the parent has exited and cannot clean up
            _end(scratch)
        # Exit at once: Ray exits this process with status 1 when it notices that the raylet is gone, and exit
        # handlers crash if the interrupt arrived during Ray's startup.
        os._exit(130)
    finally:
        explained[0] = 1
        _end(scratch)


def _guard(child: int, scratch: Path, signals: Collection[int], grace_s: float) -> int:
    """Wait for the child, terminate its remaining processes, and return the exit status. `signals` are blocked on
    entry."""

    signaled_at: list[float] = []

    def interrupt(*_) -> None:
        now = time.monotonic()
        if signaled_at and now - signaled_at[0] < REPEAT_S:
            return
        signaled_at.append(now)
        kill(signal.SIGINT)
        if len(signaled_at) <= 2:  # further signals do not postpone the deadline
            signal.setitimer(signal.ITIMER_REAL, DEADLINE_S + (grace_s if len(signaled_at) == 1 else 0.0))

    def stop(*_) -> None:
        """Suspend the child's process group and this process until SIGCONT, because the terminal suspends only one
        group."""
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.killpg(child, signal.SIGCONT)

    def kill(number: int) -> None:
        with suppress(ProcessLookupError):  # the child has just exited
            os.kill(child, number)

    for number in signals:
        signal.signal(number, interrupt)
    signal.signal(signal.SIGALRM, lambda *_: kill(signal.SIGKILL))
    if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    resumer = Resumer(lambda: [child])
    while not (exited := os.waitpid(child, os.WNOHANG))[0]:
        resumer.check()
        time.sleep(POLL_S)
    for number in (*signals, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    _end(scratch)
    code = os.waitstatus_to_exitcode(exited[1])
    if signaled_at and code in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP):
        _print_error(INTERRUPTED)  # the child received the signal before it could handle it
        return 130
    if code == 1 and not explained[0]:
        _print_error("the driver process was ended by Ray, whose raylet has probably died; stopping the run")
    if code >= 0:
        return code
    _print_error(f"the driver process {child} was killed by {signal.Signals(-code).name}; stopping the run")
    return 1


def _handled_signals() -> list[int]:
    """Return the signals that end a run, except ignored ones: nohup, for example, ignores SIGHUP."""
    return [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]


def _end(scratch: Path) -> None:
    """Terminate all descendants of this process. Remove the run's shared memory and scratch folder."""
    mapped = segments.mapped()
    processes.end_descendants()
    with suppress(OSError, Untrusted):  # the folder was removed, and another user has taken its name
        segments.remove(segments.created(scratch, mapped))
    remove_scratch(scratch)


def _print_error(line: str) -> None:
    print(f"megarl: error: {line}", file=sys.stderr, flush=True)
