"""All findings, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.planner.doctor.finding import Finding
from megarl.planner.doctor.gpus import look_at_gpus
from megarl.planner.doctor.machine import look_at_machine
from megarl.planner.doctor.packages import installed, look_at_packages
from megarl.planner.doctor.ranges import CUDA_RUNTIME

MARKS = {"ok": " ", "note": "·", "problem": "!"}


def examine(folder: Path) -> list[Finding]:
    """Returns what is here, in the order in which it is shown. folder: where runs are to be kept."""
    gpus = look_at_gpus(installed(("torch",)), installed(CUDA_RUNTIME))
    has_gpu = gpus[0].state == "ok"
    return [*look_at_packages(has_gpu), *gpus, *look_at_machine(folder)]


def table(findings: Sequence[Finding]) -> str:
    """Returns a line for each finding, and below those that want something a line with what to do."""
    names, found = (max(len(getattr(each, part)) for each in findings) for part in ("name", "found"))
    lines = []
    for each in findings:
        wanted = f"  ({each.wanted})" if each.wanted else ""
        lines.append(f"{MARKS[each.state]} {each.name.ljust(names)}  {each.found.ljust(found)}{wanted}".rstrip())
        if each.fix:
            lines.append(f"  {' ' * names}  → {each.fix}")
    problems = [each.name for each in findings if each.state == "problem"]
    return "\n".join([*lines, f"to be changed: {', '.join(problems)}" if problems else "all is as a run needs it"])
