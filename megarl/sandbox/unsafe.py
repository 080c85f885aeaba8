"""Execution without isolation, for machines that do not support isolation and users who accept the risk."""

from __future__ import annotations

import os
import sys
import tempfile

from megarl.sandbox.provider import OWN_AGENT, SYSTEM_PATH, Provider
from megarl.sandbox.sandbox import Command


class Unsafe(Provider):
    """Runs programs as ordinary processes of this user, with access to the network and all of the user's files. Limits
    other than those on files and processes are enforced. A program's processes are killed with it, but a program can
    evade this. Each sandbox has its own folder, but programs are not confined to it."""

    name = "unsafe"

    def command(self) -> Command:
        folder = tempfile.mkdtemp(prefix="megarl-sandbox-")
        path = f"{os.path.dirname(sys.executable)}:{SYSTEM_PATH}"
        return Command([*OWN_AGENT, folder, path, "removes_folder"], folder=folder)
