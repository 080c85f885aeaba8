"""The supervisor of a run, which is two processes that watch each other: a parent that only waits, and a child that
drives.

Whichever is killed, the other ends the processes of the run. Ray alone would leave some of them for a minute or more.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megarl.cluster.supervision import processes, segments

DEADLINE_S = 15
"""The seconds that the child may take to end after an interrupt, before it is killed: one of its calls may hang."""

INTERRUPTED = "interrupted; the run ends"


@contextmanager
def supervised() -> Iterator[Path]:
    """Runs its body in a child process; the parent exits with the child's status and never enters the body.

    Yields a scratch folder. However the body ends, no process that it started is left, nor the folder. SIGINT, SIGTERM
    and SIGHUP, to one of the two or to all processes of the run, end it with a KeyboardInterrupt and then exit status
    130.
    """
    # The folder is not in $TMPDIR, which may be long: paths of the sockets in it are limited to 107 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="megarl-", dir="/tmp"))
    segments.note_earlier(scratch)
    sys.stdout.flush()
    processes.adopt_orphans()
    heard = _heard()
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)  # until each of the two can handle them
    child = os.fork()
    if child:
        sys.exit(_guard(child, scratch, heard))
    processes.adopt_orphans()
    processes.interrupt_with_parent()
    _interrupt_by({signal.SIGINT, *heard})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
    try:
        yield scratch
    except KeyboardInterrupt:
        _end(scratch)
        _say(INTERRUPTED)
        # The interpreter's shutdown is skipped: Ray crashes there if the interrupt met it while it was starting.
        os._exit(130)
    finally:
        _end(scratch)


def _guard(child: int, scratch: Path, signals: Collection[int]) -> int:
    """Waits for the child and ends what it left. Returns the exit status. signals: those that end a run, blocked."""

    is_interrupted = False

    def interrupt(*_) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        kill(signal.SIGINT)
        signal.alarm(DEADLINE_S)

    def kill(number: int) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)

    for number in signals:
        signal.signal(number, interrupt)
    signal.signal(signal.SIGALRM, lambda *_: kill(signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    _, status = os.waitpid(child, 0)
    for number in (*signals, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    _end(scratch)
    code = os.waitstatus_to_exitcode(status)
    if is_interrupted and code in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP):
        _say(INTERRUPTED)  # the child had the signal, too, before it could handle it
        return 130
    if code >= 0:
        return code
    _say(f"the driver process {child} was ended by {signal.Signals(-code).name}; the run ends")
    return 1


def _heard() -> list[int]:
    """Returns the signals that end a run: nohup, for one, makes it ignore SIGHUP."""
    return [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]


def _interrupt_by(signals: Iterable[int]) -> None:
    """Makes the first of these signals raise KeyboardInterrupt in this process. Forked ones that go on with its code
    end by theirs as any other process."""
    driver, heard = os.getpid(), []

    def interrupt(number: int, _) -> None:
        if os.getpid() != driver:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not heard:  # a second one, as from an impatient Ctrl-C, would interrupt the clean-up
            heard.append(number)
            raise KeyboardInterrupt

    for number in signals:
        signal.signal(number, interrupt)


def _end(scratch: Path) -> None:
    """Ends all processes that were started by this one or its lost child, and removes what they leave."""
    mapped = segments.mapped()
    processes.end_descendants()
    segments.remove(segments.made(scratch, mapped))
    shutil.rmtree(scratch, ignore_errors=True)


def _say(line: str) -> None:
    print(f"megarl: error: {line}", file=sys.stderr, flush=True)
