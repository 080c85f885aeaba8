"""Write the SHA-256 hashes of packages into lock files, as pip's --require-hashes requires.

    python tools/environment/hashes.py LOCK...

Each line `name==version` receives the hashes of PyPI's wheels for Linux on x86-64 and CPython 3.11 and 3.12. A package
without such a wheel receives the hash of its source archive and the comment `# source`. The comment `# any-python` is
kept: build.sh installs the package even if its metadata excludes Python 3.11. Lines with the comment `# kept` are not
changed: PyPI has no CPU build of torch.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

INDEX = "https://pypi.org/simple"
PYTHONS = (3, 11), (3, 12)
NEWEST_GLIBC = 39
ANY_PYTHON = "# any-python"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, NEWEST_GLIBC + 1)]
PLATFORMS += [f"{name}_x86_64" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
TAGS = {
    tag
    for python in PYTHONS
    for tag in (
        *cpython_tags(python, platforms=PLATFORMS),
        *compatible_tags(python, "cp{}{}".format(*python), platforms=PLATFORMS),
    )
}


def files_of(name: str) -> list[dict]:
    """Return the index's descriptions of a project's files."""
    accepts = {"Accept": "application/vnd.pypi.simple.v1+json"}
    request = urllib.request.Request(f"{INDEX}/{canonicalize_name(name)}/", headers=accepts)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["files"]


def is_compatible(filename: str) -> bool:
    return filename.endswith(".whl") and not TAGS.isdisjoint(parse_wheel_filename(filename)[3])


def with_hashes(line: str) -> str:
    found = re.match(r"([\w.-]+)==(\S+)", line)
    if found is None or line.endswith("# kept"):
        return line
    name, version = found.groups()
    marks = f"-{version}-", f"-{version}."
    of_version = [file for file in files_of(name) if any(mark in file["filename"] for mark in marks)]
    wheels = [file for file in of_version if is_compatible(file["filename"])]
    sources = [file for file in of_version if file["filename"].endswith((f"-{version}.tar.gz", f"-{version}.zip"))]
    if not (wheels or sources):
        raise SystemExit(f"error: {INDEX} has no file of {found[0]} for these platforms")
    hashes = sorted(f"--hash=sha256:{file['hashes']['sha256']}" for file in wheels or sources)
    mark = ANY_PYTHON if line.endswith(ANY_PYTHON) else "# source" if not wheels else ""
    return " ".join([found[0], *hashes, mark]).rstrip()


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        with ThreadPoolExecutor(8) as threads:
            lines = list(threads.map(with_hashes, path.read_text().splitlines()))
        path.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
