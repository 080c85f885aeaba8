"""Sandboxes of Apptainer, for clusters that have it and no bubblewrap: programs run in an image with a python3."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megarl.sandbox.provider import AGENT, SYSTEM_PATH, Provider
from megarl.sandbox.sandbox import Command, SandboxError

FOLDER = "/tmp"


class Apptainer(Provider):
    """Programs see the image, read-only, and their own /tmp, which is in memory, as large as `sessiondir max size` in
    apptainer.conf. The kernel counts their processes with the user's others, so that only the agent bounds them."""

    name = "apptainer"
    python = "python3"

    def command(self) -> Command:
        """Raises SandboxError where Apptainer is not installed, or sandbox.image is not there."""
        apptainer, image = shutil.which("apptainer"), self.limits.image
        if apptainer is None:
            raise SandboxError("apptainer is not on the PATH")
        if image is None:
            raise SandboxError("sandbox.image=null: it needs an image with a python3, such as python.sif")
        if "://" not in image:
            path = Path(image).expanduser().absolute()
            if not path.exists():
                raise SandboxError(f"sandbox.image={image}: there is no {path}")
            image = str(path)
        isolation = [
            *("--containall", "--cleanenv", "--no-eval", "--no-init", "--no-privs"),
            *("--net", "--network", "none", "--no-mount", "home,hostfs,bind-paths,cwd", "--pwd", FOLDER),
        ]
        agent = ["python3", "-I", "-S", "-c", AGENT, FOLDER, SYSTEM_PATH]
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return Command([apptainer, "exec", *isolation, image, *agent], environment)
