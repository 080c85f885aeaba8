"""The end of a run before its last step: a report of the steps that are done, and how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from megarl import report
from megarl.run.checkpoints import Checkpoints
from megarl.run.folder import RunFolder


@contextmanager
def early_end(folder: RunFolder) -> Iterator[None]:
    """Print how to go on after an error or an interrupt inside, and writes the report if a step is done. The error
    goes its way."""
    try:
        yield
    except BaseException:
        print(way_on(folder), flush=True)
        if folder.num_steps:
            _report(folder)  # after it: an interrupted run has seconds to end
        raise


def way_on(folder: RunFolder) -> str:
    """Return a line that says which step is saved, and the command that goes on. It names the run's own config, which
    has what the command line gave too."""
    command = f"megarl train {shlex.quote(str(folder.config))}"
    if not folder.num_steps:
        return f"ended before its first step was done; start again: {command}"
    newest = Checkpoints(folder.checkpoints).latest()
    if newest is None:
        return f"ended with nothing saved of its {folder.num_steps} steps; start anew: {command} run.replace=true"
    return f"ended; {newest.name} is saved: go on after it with {command} resume=auto"


def _report(folder: RunFolder) -> None:
    try:
        print(f"report: {report.write(folder.path)}", flush=True)
    except Exception as error:  # what ended the run is to be told, not this
        print(f"report: not written ({type(error).__name__}: {error})", flush=True)
