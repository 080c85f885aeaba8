#!/usr/bin/env bash
# Builds a virtual environment with exactly the packages of a lock file, and an editable install of megarl.
# Usage: build.sh PYTHON VENV LOCK. Files with different hashes are rejected. On failure, the environment is removed.
set -euo pipefail

python=$1 venv=$2 lock=$3
pytorch=https://download.pytorch.org/whl/cpu

if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    echo "error: $python is not Python 3.11, which $lock requires. Fix: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi

# Bytecode is compiled below on all cores; pip would compile files one by one.
install() {
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile --no-deps "$@"
}

# install_locked PATTERN [OPTIONS...]: install the packages on the lock file's lines that match PATTERN.
install_locked() {
    install --require-hashes "${@:2}" --requirement <(grep --extended-regexp "$1" "$lock")
}

trap 'rm -rf "$venv"' EXIT
rm -rf "$venv"
"$python" -m venv "$venv"
# PyPI has no CPU build of torch. Install it first and separately, from pip's configured indexes or else from PyTorch's.
# The rest of the lock file then finds it installed.
torch=$(grep --only-matching '^torch==[^ ]*' "$lock")
if ! install_locked '^torch==' 2>/dev/null; then
    echo "pip's indexes do not have $torch. Trying $pytorch"
    if ! output=$(install_locked '^torch==' --index-url "$pytorch" 2>&1); then
        echo "error: neither pip's indexes nor $pytorch have $torch (${output##*$'\n'})." \
            "Fix: set PIP_EXTRA_INDEX_URL to an index that has it" >&2
        exit 1
    fi
fi
install_locked '^[^#]+(# kept)?$'
install_locked '# any-python$' --ignore-requires-python
install_locked '# source$' --no-build-isolation # builds with the setuptools of the lock file
install --no-build-isolation --editable .
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null || true  # some packages ship files for other Pythons
trap - EXIT
