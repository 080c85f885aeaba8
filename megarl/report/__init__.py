"""The report on a run: a self-contained HTML file."""

from __future__ import annotations

from pathlib import Path

from megarl.report.contents import read_contents
from megarl.report.page import render
from megarl.run.folder import RunFolder


def write(folder: Path) -> Path:
    """Write report.html for the run in `folder` and return the path. The run may be unfinished or may have crashed.
    Raise a UserError if `folder` is not a run folder."""
    page, out = render(read_contents(folder)), RunFolder(Path(folder)).report
    # Decoded text may contain lone surrogates, which UTF-8 cannot encode.
    out.write_text(page, encoding="utf-8", errors="replace")
    return out
