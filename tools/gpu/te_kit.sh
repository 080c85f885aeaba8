#!/usr/bin/env bash
# Builds Transformer Engine for the GPU machine of kit.sh and packs it into .gpu-kit/transformer_engine.tar.xz. Needs
# Python 3.12, the CUDA 13.0 toolkit and 10 GB in the folder WORK, and takes half an hour on two cores. Device code for
# GPUs other than Hopper is removed, which shrinks 264 MB (the wheel) to 24 MB (the archive).
set -euo pipefail
cd "$(dirname "$0")/../.."
work=${1:?usage: te_kit.sh WORK} cuda=${CUDA_HOME:-/usr/local/cuda-13.0} limit_mib=45
archive=$PWD/.gpu-kit/transformer_engine.tar.xz
pip() { "$work/venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

mkdir -p "$work" .gpu-kit
if [ ! -e "$work/venv/.installed" ]; then
  "${PYTHON:-python3.12}" -m venv --clear "$work/venv"
  pip install --require-hashes --no-deps --only-binary=:all: --requirement tools/gpu/te_build.lock
  touch "$work/venv/.installed"
fi
pip download --require-hashes --no-deps --no-build-isolation --dest "$work/wheels" --requirement tools/gpu/te_kit.lock
if ! compgen -G "$work/wheels/transformer_engine_torch-*.whl" >/dev/null; then
  packages=$("$work/venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/nvidia
  PATH=$work/venv/bin:$cuda/bin:$PATH CUDA_HOME=$cuda \
    CPATH=$cuda/include:$packages/cudnn/include:$packages/nccl/include:$packages/cusparselt/include:$packages/cu13/include \
    MAX_JOBS=$(nproc) NVTE_FRAMEWORK=pytorch NVTE_CUDA_ARCHS=90 TORCH_CUDA_ARCH_LIST=9.0 NVTE_PYTORCH_FORCE_BUILD=TRUE \
    pip wheel --no-deps --no-build-isolation --wheel-dir "$work/wheels" "$work"/wheels/transformer_engine_torch-*.tar.gz
fi
rm -rf "$work/kit"
pip install --no-index --no-deps --no-compile --target "$work/kit" "$work"/wheels/*.whl
rm -rf "$work"/kit/transformer_engine/{jax,common/include} "$work/kit/transformer_engine/wheel_lib/libnccl_ep.so"
library=$(find "$work/kit" -name libtransformer_engine.so)
printf '.version 9.0\n.target sm_90\n.address_size 64\n' >"$work/empty.ptx"
"$cuda/bin/ptxas" -arch sm_90 "$work/empty.ptx" --output-file "$work/empty.cubin"
"$work/venv/bin/python" tools/gpu/slim.py "$library" --keep 90 --empty "$work/empty.cubin"
strip --strip-all "$library"
tar --sort=name --owner=0 --group=0 -C "$work/kit" -c . | xz -9 --threads=0 >"$archive"
size=$(du -sm "$archive" | cut -f1)
if ((size > limit_mib)); then
  echo "error: $archive is $size MiB, above the limit of $limit_mib. Fix: remove more from it, or split it" >&2
  exit 1
fi
echo "$archive: $size MiB"
