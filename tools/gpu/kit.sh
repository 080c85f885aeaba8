#!/usr/bin/env bash
# Downloads the wheels in kit.lock to .gpu-kit/, for a GPU machine without network whose image has Python 3.12, PyTorch
# 2.11, Triton, transformers and pytest. Copy the checkout there and run: tools/gpu/kit.sh install FOLDER
set -euo pipefail
cd "$(dirname "$0")/../.."
lock=tools/gpu/kit.lock kit=.gpu-kit limit_mib=55

case ${1:-make} in
  make)
    rm -rf "$kit"
    "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes \
      --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
      --platform manylinux2014_x86_64 --dest "$kit" --requirement "$lock"
    size=$(du -sm "$kit" | cut -f1)
    if ((size > limit_mib)); then
      echo "error: $kit has $size MiB, more than $limit_mib. Fix: remove packages from $lock" >&2
      exit 1
    fi
    echo "$kit: $size MiB"
    ;;
  install)
    python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir --upgrade \
      --target "$2" "$kit"/*.whl
    ;;
  *)
    echo "usage: kit.sh [make | install FOLDER]" >&2
    exit 2
    ;;
esac
