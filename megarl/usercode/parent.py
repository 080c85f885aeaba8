"""The child's end of the connection between a `ChildProcess` and its program."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from io import BufferedRWPair
from typing import Any

from megarl.core import stacks
from megarl.core.parent import signal_with_parent

SELF_CLEANING = "MEGARL_SELF_CLEANING"
"""Environment variable that marks a program that stops its own processes and exits once its connection closes.
ChildProcess ignores the variable in the user's environment. User code can still set it for its own programs, which
delays their termination by at most CLEANUP_S."""


def connect() -> BufferedRWPair:
    """Return the connection to the parent. It closes when the parent exits or calls ChildProcess.kill."""
    if SELF_CLEANING not in os.environ:
        signal_with_parent(signal.SIGKILL)
    faulthandler.enable()
    stacks.write_on_request()
    with socket.socket(fileno=int(sys.argv[-1])) as connection:
        os.set_inheritable(connection.fileno(), False)
        return connection.makefile("rwb")


def send(parent: BufferedRWPair, message: Mapping[str, Any]) -> None:
    parent.write(json.dumps(message).encode() + b"\n")
    parent.flush()
