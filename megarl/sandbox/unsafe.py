"""Programs without isolation, for machines where there is none and whoever runs them accepts that."""

from __future__ import annotations

import os
import sys
import tempfile

from megarl.sandbox.provider import OWN_AGENT, SYSTEM_PATH, Provider
from megarl.sandbox.sandbox import Command


class Unsafe(Provider):
    """Programs are ordinary processes of this user, with the network and all files that the user has. The limits are
    kept, but for those of files and of processes, and a program's processes end with it unless they fight that. Each
    sandbox is a folder of its own, from which nothing keeps a program."""

    name = "unsafe"

    def command(self) -> Command:
        folder = tempfile.mkdtemp(prefix="megarl-sandbox-")
        path = f"{os.path.dirname(sys.executable)}:{SYSTEM_PATH}"
        return Command([*OWN_AGENT, folder, path, "removes_folder"], folder=folder)
