"""The GPUs, as NVIDIA's driver tells them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence

from megarl.planner.doctor.finding import Finding
from megarl.planner.doctor.ranges import DRIVERS

TIMEOUT_S = 5
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
TOPOLOGY = ("nvidia-smi", "topo", "-m")

Ask = Callable[[Sequence[str]], str | None]
"""A function that returns what a command prints, None where there is no such command, or it fails."""


def ask(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def look_at_gpus(torch: str | None, runtime: str | None, ask: Ask = ask) -> list[Finding]:
    """torch, runtime: the versions of torch and of CUDA's runtime, as they are installed."""
    said = ask(QUERY)
    gpus = [[part.strip() for part in line.split(",")] for line in (said or "").splitlines() if line.strip()]
    if not gpus:
        return [Finding("GPUs", "note", "none: runs compute on the CPU")]
    names = sorted({f"{name}, {int(memory) / 1024:.0f} GiB" for name, memory, _ in gpus})
    findings = [Finding("GPUs", "ok", f"{len(gpus)} × {' and '.join(names)}"), driver(gpus[0][2], torch, runtime)]
    return [*findings, links(len(gpus), ask(TOPOLOGY))] if len(gpus) > 1 else findings


def driver(found: str, torch: str | None, runtime: str | None) -> Finding:
    """Compares the driver with the CUDA that torch is built for: the local part of torch's version says it, or, as
    PyPI's has none, the version of the runtime that is installed with it."""
    cuda = re.search(r"\+cu(\d\d)", torch or "")
    if torch is not None and cuda is None and "+" in torch:
        fix = "install torch's CUDA build: pip install torch --index-url https://download.pytorch.org/whl/cu130"
        return Finding("driver", "problem", f"{found}, but torch {torch} is not built for CUDA", "", fix)
    major = cuda[1] if cuda else runtime.partition(".")[0] if torch and runtime else None
    least = DRIVERS.get(int(major)) if major else None
    if least is None or int(found.partition(".")[0]) >= least:
        return Finding("driver", "ok", found, f">={least}" if least else "")
    fix = f"install NVIDIA's driver {least} or newer, or a torch that is built for an older CUDA"
    return Finding("driver", "problem", f"{found}, and torch {torch} needs more", f">={least}", fix)


def links(num_gpus: int, topology: str | None) -> Finding:
    """Counts the pairs of GPUs that NVLink connects. topology: what nvidia-smi prints of them."""
    rows = [line.split() for line in (topology or "").splitlines() if re.match(r"GPU\d+\s", line)]
    cells = [cell for row in rows for cell in row[1 : num_gpus + 1] if cell != "X"]
    if not cells:
        return Finding("links", "note", "not told by nvidia-smi topo -m")
    linked, pairs = sum(cell.startswith("NV") for cell in cells) // 2, len(cells) // 2
    if linked == pairs:
        return Finding("links", "ok", f"NVLink between all {num_gpus} GPUs")
    found = f"NVLink between {linked} of {pairs} pairs of GPUs"
    return Finding("links", "note", found, "all", "keep tp within GPUs that NVLink connects")
