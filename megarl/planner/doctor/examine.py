"""Runs all checks for `megarl doctor` and formats the table that it prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.planner.doctor import Finding
from megarl.planner.doctor.gpus import check_gpus
from megarl.planner.doctor.machine import check_machine
from megarl.planner.doctor.packages import CUDA_RUNTIME, check_packages, installed

MARKS = {"ok": " ", "note": "·", "problem": "!"}


def examine(folder: Path) -> list[Finding]:
    """Run all checks and return their findings in display order."""
    gpus = check_gpus(installed(("torch",)), installed(CUDA_RUNTIME))
    has_gpu = gpus[0].state == "ok"
    return [*check_packages(has_gpu), *gpus, *check_machine(folder)]


def table(findings: Sequence[Finding]) -> str:
    """Return a table with a line for each finding, followed by a line with the fix if there is one."""
    name_width, found_width = (max(len(getattr(each, part)) for each in findings) for part in ("name", "found"))
    lines = []
    for each in findings:
        wanted = f"  ({each.wanted})" if each.wanted else ""
        lines.append(
            f"{MARKS[each.state]} {each.name.ljust(name_width)}  {each.found.ljust(found_width)}{wanted}".rstrip()
        )
        if each.fix:
            lines.append(f"  {' ' * name_width}  → {each.fix}")
    problems = [each.name for each in findings if each.state == "problem"]
    return "\n".join([*lines, f"problems: {', '.join(problems)}" if problems else "no problems found"])
