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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.cluster.supervision import processes, segments

DEADLINE_S = 15
"""The seconds that the child may take to end after an interrupt, before it is killed: one of its calls may hang."""


@contextmanager
def supervised() -> Iterator[Path]:
    """Runs its body in a child process; the parent exits with the child's status and never enters the body.

    Yields a scratch folder. However the body ends, no process that it started is left, nor the folder. SIGINT, and
    SIGTERM to the parent, end it with a KeyboardInterrupt and then exit status 130.
    """
    # The folder is not in $TMPDIR, which may be long: paths of the sockets in it are limited to 107 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="megarl-", dir="/tmp"))
    segments.note_earlier(scratch)
    sys.stdout.flush()
    child = os.fork()
    processes.adopt_orphans()
    if child:
        sys.exit(_guard(child, scratch))
    processes.interrupt_with_parent()
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield scratch
    except KeyboardInterrupt:
        _end(scratch)
        _say("interrupted; the run ends")
        # The interpreter's shutdown is skipped: Ray crashes there if the interrupt met it while it was starting.
        os._exit(130)
    finally:
        _end(scratch)


def _guard(child: int, scratch: Path) -> int:
    """Waits for the child and ends what it left. Returns the exit status."""

    def interrupt(*_) -> None:
        os.kill(child, signal.SIGINT)
        signal.alarm(DEADLINE_S)

    signals = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    for number in signals:
        signal.signal(number, interrupt)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    _, status = os.waitpid(child, 0)
    for number in (*signals, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    _end(scratch)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    _say(f"the driver process {child} was ended by {signal.Signals(-code).name}; the run ends")
    return 1


def _interrupt(*_) -> None:
    # Only the first counts: a second one, as from an impatient Ctrl-C, would interrupt the clean-up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end(scratch: Path) -> None:
    """Ends all processes that were started by this one or its lost child, and removes what they leave."""
    mapped = segments.mapped()
    processes.end_descendants()
    segments.remove(segments.made(scratch, mapped))
    shutil.rmtree(scratch, ignore_errors=True)


def _say(line: str) -> None:
    print(f"megarl: error: {line}", file=sys.stderr, flush=True)
