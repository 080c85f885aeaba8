"""The supervisor of a run, which is two processes that watch each other: a parent that only waits, and a child that
drives.

Whichever is killed, the other ends the processes of the run. Ray alone would leave some of them for a minute or more.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megarl.cluster.supervision import processes, segments
from megarl.cluster.supervision.interrupts import REPEAT_S, interrupts
from megarl.cluster.supervision.scratch import VARIABLE, make_scratch, sweep

DEADLINE_S = 15
"""The seconds that the child may take to end after an interrupt and the grace time, before it is killed: one of its
calls may hang."""

INTERRUPTED = "interrupted; the run ends"


@contextmanager
def supervised(grace_s: float = 0.0) -> Iterator[Path]:
    """Runs its body in a child process; the parent exits with the child's status and never enters the body.

    Yields a scratch folder. However the body ends, no process that it started is left, nor the folder. SIGINT, SIGTERM
    and SIGHUP, to one of the two or to the run's process group, end it with a KeyboardInterrupt and then exit status
    130. grace_s: the time that the body may take for that, see `interrupts`.

    The child and what it starts are a process group of their own in the same session. So a signal to the run's group,
    from a terminal or Slurm, reaches the parent alone, which hands it on to the child: Ray's processes would die of it
    and take what is to be saved with them.
    """
    sweep()
    scratch = make_scratch()
    segments.note_earlier(scratch)
    sys.stdout.flush()
    processes.adopt_orphans()
    heard, parent = _heard(), os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)  # until each of the two can handle them
    child = os.fork()
    if child:
        sys.exit(_guard(child, scratch, heard, grace_s))
    os.setpgid(0, 0)
    os.environ[VARIABLE] = str(scratch)
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)  # which stop a group in the background of a terminal that uses it
    processes.adopt_orphans()
    processes.interrupt_with_parent()
    interrupts.listen({signal.SIGINT, *heard})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
    try:
        yield scratch
    except KeyboardInterrupt:
        _say(INTERRUPTED)
        if os.getppid() != parent:  # it is lost; else the clean-up is the parent's
            _end(scratch)
        # At once: Ray ends this process with status 1 when it notices that the raylet is gone, and its part of the
        # interpreter's shutdown crashes if the interrupt met it while it was starting.
        os._exit(130)
    finally:
        _end(scratch)


def _guard(child: int, scratch: Path, signals: Collection[int], grace_s: float) -> int:
    """Wait for the child and ends what it left. Returns the exit status. signals: those that end a run, blocked."""

    told_at: list[float] = []

    def interrupt(*_) -> None:
        now = time.monotonic()
        if told_at and now - told_at[0] < REPEAT_S:
            return
        told_at.append(now)
        kill(signal.SIGINT)
        if len(told_at) <= 2:  # more of them do not put the end off
            signal.setitimer(signal.ITIMER_REAL, DEADLINE_S + (grace_s if len(told_at) == 1 else 0.0))

    def stop(*_) -> None:
        """Stops the child's group and this process, as the terminal stops a run that is one group, until SIGCONT."""
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.killpg(child, signal.SIGCONT)

    def kill(number: int) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)

    for number in signals:
        signal.signal(number, interrupt)
    signal.signal(signal.SIGALRM, lambda *_: kill(signal.SIGKILL))
    if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    _, status = os.waitpid(child, 0)
    for number in (*signals, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    _end(scratch)
    code = os.waitstatus_to_exitcode(status)
    if told_at and code in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP):
        _say(INTERRUPTED)  # the child had the signal, too, before it could handle it
        return 130
    if code >= 0:
        return code
    _say(f"the driver process {child} was ended by {signal.Signals(-code).name}; the run ends")
    return 1


def _heard() -> list[int]:
    """Return the signals that end a run: nohup, for one, makes it ignore SIGHUP."""
    return [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]


def _end(scratch: Path) -> None:
    """End all processes that were started by this one or its lost child, and removes what they leave."""
    mapped = segments.mapped()
    processes.end_descendants()
    segments.remove(segments.made(scratch, mapped))
    shutil.rmtree(scratch, ignore_errors=True)


def _say(line: str) -> None:
    print(f"megarl: error: {line}", file=sys.stderr, flush=True)
