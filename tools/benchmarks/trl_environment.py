"""An environment with TRL that leaves the project's own as it is."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

# What TRL needs beyond the project's environment. Exact versions, and no dependencies of theirs, so that both sides
# run on the same torch and transformers.
PACKAGES = ("trl==1.16.0", "datasets==5.2.0", "pandas==3.1.1", "multiprocess==0.70.19", "xxhash==4.1.0")

# Python runs these lines at start. TRL imports vLLM where it finds one; this side generates with transformers, and
# should not be charged with vLLM's memory.
LINK = "import site; site.addsitedir({packages!r})\nimport sys; sys.modules['vllm'] = None\n"


def build(folder: Path) -> Path:
    """A virtual environment in `folder`, over the packages of this one; returns its Python."""
    venv.create(folder)
    python = folder / "bin" / "python"
    link = LINK.format(packages=sysconfig.get_path("purelib"))
    next(folder.glob("lib/python*/site-packages")).joinpath("project.pth").write_text(link, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", *PACKAGES], check=True)
    return python
