"""Triton kernels of the divergences: results under Triton's interpreter, and compilation for a GPU."""

import os
import subprocess
import sys

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megarl.ops import divergence_tile_triton
from tests.marks import each_value
from tests.paths import ROOT

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = dict.fromkeys(("logits", "teacher_logits", "sums", "log_sum_exps", "coefficients"), "*fp32")
TYPES |= {"targets": "*i64", "log_own": "fp32", "log_other": "fp32"}
OPTIONS = ("has_scale", "has_mixture", "block")


@pytest.mark.parametrize(
    ("options", "count"), [([], 8), pytest.param(["--all"], 16, marks=pytest.mark.exhaustive)], ids=["pairwise", "all"]
)
def test_kernels_equal_full_logits(options, count):
    """The kernels run in a separate process because the interpreter is selected when Triton is imported."""
    command = [sys.executable, "-m", "tests.interpreted_divergence", *options]
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"torch.float32: {count} cases", f"torch.bfloat16: {count} cases"]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("has_optional", "dtype"), each_value([True, False], ["fp32", "bf16"]))
def test_kernels_compile_for_hopper(tmp_path, monkeypatch, dtype, has_optional):
    """`has_optional`: whether per-token temperatures are passed, and whether the divergence has a mixture."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = TYPES | {"gradients": f"*{dtype}", "scales": "*fp32" if has_optional else "constexpr"}
    types |= dict.fromkeys(OPTIONS, "constexpr")
    constants = dict(has_scale=has_optional, has_mixture=has_optional, block=divergence_tile_triton.BLOCK)
    constants |= {} if has_optional else {"scales": None}
    kernels = divergence_tile_triton
    for kernel in (kernels._fold, kernels._fold_mixture, kernels._to_gradient):
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        own = {name: value for name, value in constants.items() if name in signature}
        compiled = triton.compile(ASTSource(kernel, signature, own), target=HOPPER)
        assert compiled.asm["cubin"]
