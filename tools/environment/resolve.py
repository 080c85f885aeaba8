"""Resolve the packages of launch/container with pip's resolver, as for Linux with Python 3.12, and compare them with
its lock file. Nothing is installed or built. A recent pip is used, because it downloads only the metadata of wheels.

    python tools/environment/resolve.py          prints differences, and exits with status 1 if there are any
    python tools/environment/resolve.py --write  resolves without the lock file, and writes it
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "launch" / "container"
REQUIREMENTS, LOCK = CONTAINER / "requirements.txt", CONTAINER / "gpu-py312.lock"
PIP = "pip==26.3"
GLIBC = 39
"""Minor version of glibc in Ubuntu 24.04, which has glibc 2.39."""

PYTHON_312 = """
import sys
from pip._internal.cli.main import main
from pip._vendor.packaging import markers

here = markers.default_environment()
markers.default_environment = lambda: here | {"python_version": "3.12", "python_full_version": "3.12.3"}
sys.exit(main())
"""
"""Program that runs pip with the markers of Python 3.12. pip can select wheels for another version, but evaluates
markers for the version that it runs on."""


def requirements_of_megarl() -> list[str]:
    """Return pyproject.toml's requirements for GPUs, without Transformer Engine's torch extension, which has no wheel.
    The extension's own requirements are in requirements.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = [Requirement(line) for line in [*project["dependencies"], *extras["run"], *extras["gguf"], *extras["gpu"]]]
    return [f"{one.name}{one.specifier}" for one in found if one.name != "megarl-trainer"]


def resolve(constraints: list[str], folder: Path) -> dict[str, str]:
    """Return the version of each package by canonical name."""
    target, report = folder / "pip", folder / "report.json"
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *quiet, "--target", target, PIP], check=True)
    manylinux = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
    older = [f"--platform={name}_x86_64" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    options = ["--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--no-cache-dir", "--only-binary=:all:"]
    options += [f"--target={folder / 'nothing'}", "--python-version=3.12", "--implementation=cp", *manylinux, *older]
    wanted = [f"--requirement={REQUIREMENTS}", *requirements_of_megarl(), *constraints]
    subprocess.run(
        [sys.executable, "-c", PYTHON_312, "install", *quiet, *options, f"--report={report}", *wanted],
        env=os.environ | {"PYTHONPATH": str(target)},
        check=True,
    )
    packages = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {canonicalize_name(package["name"]): package["version"] for package in packages}


def read_lock() -> dict[str, str]:
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    return {name: version.split()[0] for name, _, version in (line.partition("==") for line in lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    writes = parser.parse_args().write
    with tempfile.TemporaryDirectory() as folder:
        found = resolve([] if writes else [f"--constraint={LOCK}"], Path(folder))
    if writes:
        head = f"# Resolved by {PIP} from launch/container/requirements.txt, see tools/environment/resolve.py.\n"
        LOCK.write_text(head + "".join(f"{name}=={version}\n" for name, version in sorted(found.items())))
        subprocess.run([sys.executable, ROOT / "tools" / "environment" / "hashes.py", LOCK], check=True)
    lock = read_lock()
    for name in sorted(found.keys() - lock.keys()):
        print(f"{LOCK}: {name}=={found[name]} is missing from the lock file")
    for name in sorted(lock.keys() - found.keys()):
        print(f"{LOCK}: {name}=={lock[name]} is not a requirement of any package")
    print(f"{LOCK.name}: {len(found)} packages resolved, {len(lock)} locked")
    return int(found != lock)


if __name__ == "__main__":
    sys.exit(main())
