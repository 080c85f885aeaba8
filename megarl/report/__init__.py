"""The report on a run: a self-contained HTML file. Runs that end before their last step also get one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.core.files import replace_text
from megarl.core.text import counted
from megarl.report.page import read_contents, render
from megarl.run.checkpoints import Checkpoints
from megarl.run.folder import RunFolder


def write(folder: Path) -> Path:
    """Write report.html for the run in `folder` and return the path. The run may be unfinished or may have crashed.
    Raise a UserError if `folder` is not a run folder."""
    page, out = render(read_contents(folder)), RunFolder(Path(folder)).report
    replace_text(out, page)
    return out


@contextmanager
def early_end(folder: RunFolder) -> Iterator[None]:
    """After an error or an interrupt, print how to resume the run and write a report if any step is complete. Then
    re-raise the exception."""
    try:
        yield
    except BaseException:
        print(resume_hint(folder), flush=True)
        if folder.num_steps:
            _report(folder)  # last, because an interrupted run has only seconds left
        raise


def resume_hint(folder: RunFolder) -> str:
    """Return a line that contains the saved step and the command for resuming the run. The command uses the run's
    resolved config, which includes command-line overrides."""
    command = f"megarl train {shlex.quote(str(folder.config))}"
    if not folder.num_steps:
        return f"The run ended before it completed a step. Restart it with: {command}"
    newest = Checkpoints(folder.checkpoints).latest()
    if newest is None:
        steps = counted(folder.num_steps, "step")
        return f"The run ended after {steps} without a checkpoint. Start over with: {command} run.replace=true"
    return f"The run ended. Resume it from {newest.name} with: {command} resume=auto"


def _report(folder: RunFolder) -> None:
    try:
        print(f"report: {write(folder.path)}", flush=True)
    except Exception as error:  # an error in the report must not hide the error that ended the run
        print(f"report: could not be written ({type(error).__name__}: {error})", flush=True)
