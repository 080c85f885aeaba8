"""The report of a run: one HTML file that needs neither network nor server."""

from __future__ import annotations

from pathlib import Path

from megarl.report.contents import read_contents
from megarl.report.page import render
from megarl.run.folder import RunFolder


def write(folder: Path) -> Path:
    """Write report.html of the run in `folder`, which may be unfinished or cut short by a crash; returns its path.

    Raise UserError if `folder` is not a run folder.
    """
    page, out = render(read_contents(folder)), RunFolder(Path(folder)).report
    # Decoded text may hold lone surrogates, which UTF-8 cannot carry.
    out.write_text(page, encoding="utf-8", errors="replace")
    return out
