"""The grace period of a run after a signal, and the events that end it early."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest

from megarl.cluster.supervision import interrupts
from megarl.cluster.supervision.interrupts import Interrupts
from tests.marks import each_value
from tests.timing import GRACE_S, SHORT_S, WAIT_S
from tests.unit.cluster.supervision.test_supervisor import Program, program, signals_are_heard

__all__ = ["signals_are_heard"]

INTERRUPTED = "megarl: error: interrupted; stopping the run\n"
TENTHS = 10 * GRACE_S
SAVES = "interrupted: the run saves after the current step"

AWAITED = """from megarl.cluster.supervision.interrupts import interrupts
    with interrupts.grace({seconds}, is_awaited=True):
        print("working", flush=True)
        while not interrupts.is_signaled:
            time.sleep(0.1)
        for _ in range({tenths}):
            time.sleep(0.1)
        print("told", flush=True)
        raise KeyboardInterrupt"""

NOT_AWAITED = """from megarl.cluster.supervision.interrupts import interrupts
    with interrupts.grace({seconds}, is_awaited=False):
        try:
            print("working", flush=True)
            wait()
        except KeyboardInterrupt:
            print("has time" if interrupts.left_s > 0 else "has none", flush=True)
            {then}
            print("finished", flush=True)"""


def begin(run: Program) -> None:
    assert run.process.stdout.readline() == "working\n"


def check_end(run: Program, code: int = 130) -> list[str]:
    """Check that the program ends with this status before its grace period does. Return its output lines."""
    assert run.process.wait(WAIT_S) == code
    run.end()
    return run.process.stdout.read().splitlines()


@pytest.mark.parametrize(
    ("number", "whom"),
    each_value([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ["parent", "child", "group", "both"]),
)
def test_awaited_body_finishes(number: int, whom: str) -> None:
    with program(AWAITED.format(seconds=GRACE_S, tenths=10), grace_s=GRACE_S, repeat_s=WAIT_S) as run:
        begin(run)
        if whom == "group":
            os.killpg(run.process.pid, number)
        for pid in {"parent": [run.process.pid], "child": [run.child], "both": [run.process.pid, run.child]}.get(
            whom, []
        ):
            os.kill(pid, number)
        said = check_end(run)
    assert said[0].startswith(f"{SAVES} if the step ends within checkpoint.grace_s={GRACE_S} s. ")
    assert said[1:] == ["told"]


def test_grace_period_ends() -> None:
    with program(AWAITED.format(seconds=SHORT_S, tenths=TENTHS), grace_s=SHORT_S) as run:
        begin(run)
        os.kill(run.process.pid, signal.SIGTERM)
        assert len(check_end(run)) == 1


def test_second_signal_interrupts_awaited_body() -> None:
    with program(AWAITED.format(seconds=GRACE_S, tenths=TENTHS), grace_s=GRACE_S, repeat_s=0.0) as run:
        begin(run)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.process.stdout.readline().startswith(SAVES)
        os.kill(run.process.pid, signal.SIGTERM)
        assert check_end(run) == []


def test_signal_repeated_at_once_counts_once() -> None:
    """GNU timeout, for example, signals both the process and its group."""
    with program(AWAITED.format(seconds=GRACE_S, tenths=10), grace_s=GRACE_S, repeat_s=WAIT_S) as run:
        begin(run)
        for _ in range(3):
            os.kill(run.process.pid, signal.SIGTERM)
            time.sleep(0.05)
        assert check_end(run)[1:] == ["told"]


def test_signal_inside_the_handler_counts_once(monkeypatch, capfd) -> None:
    """Reading the clock triggers a second signal. Only the handler's clock is replaced, not that of other threads."""
    told, clock = Interrupts(), SimpleNamespace(monotonic=time.monotonic)
    # Do not call `listen`, whose handlers would use the same timer as pytest's timeout.
    told._driver, told._parent = os.getpid(), os.getppid()
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)

    def interrupted() -> float:
        clock.monotonic = time.monotonic
        told._handle(signal.SIGINT, None)
        return time.monotonic()

    clock.monotonic = interrupted
    monkeypatch.setattr(interrupts, "time", clock)
    with told.grace(GRACE_S, is_awaited=True):
        told._handle(signal.SIGTERM, None)
        assert told.is_signaled
    assert capfd.readouterr().out.count(SAVES) == 1


def test_lost_parent_interrupts_awaited_body() -> None:
    """Without the parent, no process would end a hanging driver."""
    with program(AWAITED.format(seconds=GRACE_S, tenths=TENTHS), grace_s=GRACE_S) as run:
        begin(run)
        run.process.kill()
        code, errors = run.end()
        assert (code, errors) == (-signal.SIGKILL, INTERRUPTED)


def test_clean_up_has_the_grace_period() -> None:
    ending = "print(0 < signal.getitimer(signal.ITIMER_REAL)[0], flush=True); interrupts.expire(); wait()"
    with program(NOT_AWAITED.format(seconds=GRACE_S, then=ending), grace_s=GRACE_S) as run:
        begin(run)
        os.kill(run.process.pid, signal.SIGTERM)
        assert check_end(run) == ["has time", "True"]


def test_second_signal_interrupts_the_clean_up() -> None:
    with program(NOT_AWAITED.format(seconds=GRACE_S, then="wait()"), grace_s=GRACE_S, repeat_s=0.0) as run:
        begin(run)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.process.stdout.readline() == "has time\n"
        os.kill(run.process.pid, signal.SIGTERM)
        assert check_end(run) == []


def test_zero_grace_period_ends_at_once() -> None:
    with program(NOT_AWAITED.format(seconds=0, then="pass")) as run:
        begin(run)
        os.kill(run.process.pid, signal.SIGTERM)
        assert check_end(run, code=0) == ["has none", "finished"]
