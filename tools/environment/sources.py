"""Download the wheels in a lock file, and extract their Python files into FOLDER/NAME-VERSION for tests that read them.

python tools/environment/sources.py LOCK FOLDER
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

DOWNLOAD = (
    "download",
    "--quiet",
    "--disable-pip-version-check",
    "--require-hashes",
    "--no-deps",
    "--only-binary=:all:",
)


def extract(line: str, folder: Path) -> None:
    """Extract the Python files of the wheel on one line of a lock file."""
    with TemporaryDirectory() as temporary:
        requirement = Path(temporary) / "lock"
        requirement.write_text(line)
        command = [sys.executable, "-m", "pip", *DOWNLOAD, "--dest", temporary, "--requirement", requirement]
        subprocess.run(command, check=True)
        [wheel] = Path(temporary).glob("*.whl")
        with ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])


def main() -> None:
    lock, folder = map(Path, sys.argv[1:])
    for line in lock.read_text().splitlines():
        if not line.startswith("#"):
            extract(line, folder / line.split()[0].replace("==", "-"))


if __name__ == "__main__":
    main()
