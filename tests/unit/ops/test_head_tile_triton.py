"""Triton kernels of the linear head: results under Triton's interpreter, and compilation for a GPU."""

import os
import subprocess
import sys

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megarl.ops import head_tile_triton
from tests.marks import each_value
from tests.paths import ROOT

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {"targets": "*i64", "sums": "*fp32", "log_sum_exps": "*fp32", "coefficients": "*fp32"}
OPTIONAL = {"scales": "*fp32", "kept": "*i1"}
OPTIONS = ("has_scale", "has_kept", "block")


@pytest.mark.parametrize(
    ("options", "count"), [([], 4), pytest.param(["--all"], 8, marks=pytest.mark.exhaustive)], ids=["pairwise", "all"]
)
def test_kernels_equal_full_logits(options, count):
    """The kernels run in a separate process because the interpreter is selected when Triton is imported."""
    command = [sys.executable, "-m", "tests.interpreted_head", *options]
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"torch.float32: {count} cases", f"torch.bfloat16: {count} cases"]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("has_optional", "dtype"), each_value([True, False], ["fp32", "bf16"]))
def test_kernels_compile_for_hopper(tmp_path, monkeypatch, dtype, has_optional):
    """`has_optional`: whether per-token temperatures and kept tokens are passed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = (
        TYPES
        | {"logits": "*fp32", "gradients": f"*{dtype}"}
        | (OPTIONAL if has_optional else dict.fromkeys(OPTIONAL, "constexpr"))
    )
    types |= dict.fromkeys(OPTIONS, "constexpr")
    constants = dict(has_scale=has_optional, has_kept=has_optional, block=head_tile_triton.BLOCK)
    constants |= {} if has_optional else dict.fromkeys(OPTIONAL)
    for kernel in (head_tile_triton._fold, head_tile_triton._to_gradient):
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        compiled = triton.compile(ASTSource(kernel, signature, constants), target=HOPPER)
        assert compiled.asm["cubin"]
