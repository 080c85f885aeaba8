"""Checks the GPUs, their driver and their links, based on the output of nvidia-smi."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence

from megarl.planner.doctor import Finding
from megarl.planner.doctor.packages import DRIVERS

TIMEOUT_S = 5
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
TOPOLOGY = ("nvidia-smi", "topo", "-m")

RunCommand = Callable[[Sequence[str]], str | None]
"""A function that runs a command and returns its output, or None if the command does not exist or fails."""


def run_command(command: Sequence[str]) -> str | None:
    """Run a command and return its output, or None if it does not exist, fails, or takes longer than TIMEOUT_S."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def check_gpus(torch: str | None, runtime: str | None, run: RunCommand = run_command) -> list[Finding]:
    """Check the GPUs, their driver and their links."""
    output = run(QUERY)
    gpus = [[part.strip() for part in line.split(",")] for line in (output or "").splitlines() if line.strip()]
    if not gpus:
        return [Finding("GPUs", "note", "none, so runs use the CPU")]
    names = sorted({f"{name}, {int(memory) / 1024:.0f} GiB" for name, memory, _ in gpus})
    findings = [Finding("GPUs", "ok", f"{len(gpus)} × {' and '.join(names)}"), driver(gpus[0][2], torch, runtime)]
    return [*findings, links(len(gpus), run(TOPOLOGY))] if len(gpus) > 1 else findings


def driver(found: str, torch: str | None, runtime: str | None) -> Finding:
    """Check that the driver supports the CUDA version that torch was built for. That version is the local part of
    torch's version, such as +cu130; PyPI builds have no local part, so the version of the installed CUDA runtime is
    used instead."""
    cuda = re.search(r"\+cu(\d\d)", torch or "")
    if torch is not None and cuda is None and "+" in torch:
        fix = "install torch's CUDA build: pip install torch --index-url https://download.pytorch.org/whl/cu130"
        return Finding("driver", "problem", f"{found}, but torch {torch} is not built for CUDA", "", fix)
    major = cuda[1] if cuda else runtime.partition(".")[0] if torch and runtime else None
    least = DRIVERS.get(int(major)) if major else None
    if least is None or int(found.partition(".")[0]) >= least:
        return Finding("driver", "ok", found, f">={least}" if least else "")
    fix = f"install NVIDIA driver {least} or newer, or a torch build for an older CUDA"
    return Finding("driver", "problem", f"{found}, too old for torch {torch}", f">={least}", fix)


def links(num_gpus: int, topology: str | None) -> Finding:
    """Count the GPU pairs that are connected by NVLink. topology: output of `nvidia-smi topo -m`, or None if it is not
    available."""
    rows = [line.split() for line in (topology or "").splitlines() if re.match(r"GPU\d+\s", line)]
    cells = [cell for row in rows for cell in row[1 : num_gpus + 1] if cell != "X"]
    if not cells:
        return Finding("links", "note", "unknown, because nvidia-smi topo -m does not list links")
    linked, pairs = sum(cell.startswith("NV") for cell in cells) // 2, len(cells) // 2
    if linked == pairs:
        return Finding("links", "ok", f"NVLink between all {num_gpus} GPUs")
    found = f"NVLink between {linked} of {pairs} pairs of GPUs"
    return Finding("links", "note", found, "all", "keep tp within GPUs that NVLink connects")
