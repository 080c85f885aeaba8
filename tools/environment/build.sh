#!/usr/bin/env bash
# Builds a virtual environment with exactly the packages of a lock file, and megarl itself in development mode.
# Usage: build.sh PYTHON VENV LOCK. Nothing is left behind when it fails.
set -euo pipefail

python=$1 venv=$2 lock=$3

if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    echo "error: $python is not Python 3.11, for which $lock was made; name one: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi

trap 'rm -rf "$venv"' ERR
rm -rf "$venv"
"$python" -m venv "$venv"
# Bytecode is compiled by all cores below; pip would do it one file after the other.
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile --no-deps --requirement "$lock"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile --no-deps --no-build-isolation --editable .
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null || true  # some packages ship files for other Pythons
