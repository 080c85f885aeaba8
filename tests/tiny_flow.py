"""The pre-trained flow model of tools/tiny_flow.py, built once and then kept in megarl's cache."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import diffusers
import torch
import transformers

from megarl.models.folder import default_cache
from megarl.rewards import digits
from tests.paths import ROOT

BUILDER = ROOT / "tools" / "tiny_flow.py"


@functools.cache
def tiny_flow_model() -> Path:
    """Return the model's diffusers folder. Building it takes minutes; other processes wait for the first one."""
    versions = " ".join(package.__version__ for package in (torch, diffusers, transformers))
    sources = [BUILDER.read_bytes(), Path(digits.__file__).read_bytes(), versions.encode()]
    folder = default_cache() / "tiny-flow" / hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            subprocess.run([sys.executable, BUILDER, partial], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
            partial.rename(folder)
    return folder
