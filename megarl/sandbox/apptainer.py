"""Apptainer sandboxes, for clusters without bubblewrap. Programs run in an image that contains python3."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megarl.sandbox.provider import AGENT, SYSTEM_PATH, Provider
from megarl.sandbox.sandbox import Command, SandboxError

FOLDER = "/tmp"


class Apptainer(Provider):
    """Runs programs in a read-only image with a private in-memory /tmp. The size of /tmp is `sessiondir max size` in
    apptainer.conf. The kernel counts the processes together with the user's other processes, so only the agent limits
    their number."""

    name = "apptainer"
    python = "python3"

    def command(self) -> Command:
        """Return the command that starts a sandbox. Raise SandboxError if Apptainer is not installed or sandbox.image
        does not exist."""
        apptainer, image = shutil.which("apptainer"), self.limits.image
        if apptainer is None:
            raise SandboxError("apptainer is not on the PATH")
        if image is None:
            raise SandboxError("sandbox.image=null: Apptainer needs an image that contains python3, such as python.sif")
        if "://" not in image:
            path = Path(image).expanduser().absolute()
            if not path.exists():
                raise SandboxError(f"sandbox.image={image}: {path} does not exist")
            image = str(path)
        isolation = [
            *("--containall", "--cleanenv", "--no-eval", "--no-init", "--no-privs"),
            *("--net", "--network", "none", "--no-mount", "home,hostfs,bind-paths,cwd", "--pwd", FOLDER),
        ]
        agent = ["python3", "-I", "-S", "-c", AGENT, FOLDER, SYSTEM_PATH]
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return Command([apptainer, "exec", *isolation, image, *agent], environment)
