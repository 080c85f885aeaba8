from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.timing import WAIT_S

PROGRAM = """
import subprocess, sys, time
from megarl.cluster.supervision.watchdog import Watchdog
from tests.timing import HANG_S
names = ("raylet", "gcs_server")
ray = {name: subprocess.Popen([f"{sys.argv[1]}/{name}", str(HANG_S)]) for name in names}
watchdog = Watchdog()
watchdog.phase = "update"
"""


def run(body: str, folder: Path) -> tuple[int, str, str]:
    """Run the body next to processes named like Ray's. Return exit status, stdout and stderr."""
    for name in ("raylet", "gcs_server"):
        shutil.copy(shutil.which("sleep"), folder / name)
    output, errors = folder / "output", folder / "errors"
    command = [sys.executable, "-c", PROGRAM + body, str(folder)]
    with output.open("w") as stdout, errors.open("w") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
    try:
        code = process.wait(WAIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return code, output.read_text(), errors.read_text()


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
@pytest.mark.parametrize("then", ["time.sleep(HANG_S)", "ray[NAME].wait(); watchdog.check()"])
def test_loss_of_a_ray_process_is_reported_with_the_phase(name: str, then: str, tmp_path: Path) -> None:
    body = f"ray['{name}'].kill(); {then.replace('NAME', repr(name))}; print('goes on')"
    assert run(body, tmp_path) == (1, "", f"megarl: error: update: Ray's {name} died; stopping the run\n")


def test_signal_to_driver_and_ray_is_not_a_loss(tmp_path: Path) -> None:
    """The driver stops the watchdog while the watchdog waits for the signal."""
    body = """
import os, signal, threading
from types import SimpleNamespace
from megarl.cluster.supervision import watchdog as module
waits, is_stopped = threading.Event(), threading.Event()

def sleep(seconds):
    if seconds == module.SIGNAL_S:
        waits.set()
        is_stopped.wait()

module.SIGNAL_S = 2 * module.POLL_S
module.time = SimpleNamespace(sleep=sleep)
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    os.killpg(0, signal.SIGTERM)
    while True:
        time.sleep(0.1)  # a signal just before a long sleep would be handled only after it
except KeyboardInterrupt:
    waits.wait()
    watchdog.stop()
    is_stopped.set()
    [thread] = [thread for thread in threading.enumerate() if thread.name == "watchdog"]
    thread.join()
    print("interrupted")
"""
    assert run(body, tmp_path) == (0, "interrupted\n", "")


def test_signal_that_ends_ray_ends_the_grace_period(tmp_path: Path) -> None:
    body = """
import os, signal
from megarl.cluster.supervision.interrupts import interrupts
interrupts.listen([signal.SIGTERM])
try:
    with interrupts.grace(HANG_S, is_awaited=True):
        os.killpg(0, signal.SIGTERM)
        while True:
            time.sleep(0.1)  # a signal just before a long sleep would be handled only after it
except KeyboardInterrupt:
    watchdog.stop()
    print("interrupted")
"""
    code, output, errors = run(body, tmp_path)
    assert (code, output.splitlines()[1:], errors) == (0, ["interrupted"], "")


def test_ray_may_end_after_stop(tmp_path: Path) -> None:
    body = "watchdog.stop(); ray['raylet'].kill(); ray['raylet'].wait(); watchdog.check(); print('goes on')"
    assert run(body, tmp_path) == (0, "goes on\n", "")
