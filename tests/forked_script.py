"""Run a script as a user would, in a fork of this process so that torch and Megatron are not imported again."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import BinaryIO

from tests.timing import WAIT_S


def run_script(script: Path, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT ARGUMENTS` in the folder `cwd`. Return its exit code and output."""
    command = [str(script), *map(str, arguments)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = multiprocessing.get_context("fork").Process(target=_run, args=(command, cwd, out, err))
        process.start()
        process.join(WAIT_S)
        process.kill()
        process.join()
        return subprocess.CompletedProcess(command, process.exitcode, *map(_text, (out, err)))


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode()


def _run(command: list[str], cwd: Path, out: BinaryIO, err: BinaryIO) -> None:
    for descriptor, file in ((1, out), (2, err)):
        os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", closefd=False) for descriptor in (1, 2))
    os.chdir(cwd)
    sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
    code = _exit_code(command[0])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skip the exit handlers inherited from the parent


def _exit_code(script: str) -> int:
    """Run the script and return its exit code as Python would.

    A SystemExit carries the code or a message; any other exception prints its traceback and gives 1.
    """
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
