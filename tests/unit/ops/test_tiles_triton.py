"""Triton kernels of linear head and divergences: results under Triton's interpreter, and compilation for a GPU."""

import os
import subprocess
import sys

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megarl.ops import divergence_tile_triton, head_tile_triton
from tests.marks import each_value
from tests.paths import ROOT

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = dict.fromkeys(("logits", "teacher_logits", "sums", "log_sum_exps", "normalizers", "coefficients"), "*fp32")
TYPES |= {"targets": "*i64", "log_own": "fp32", "log_other": "fp32"}
OPTIONAL = {"scales": "*fp32", "kept": "*i1"}
OPTIONS = ("has_scale", "has_kept", "has_mixture", "block")
KERNELS = [
    getattr(module, name)
    for module, names in (
        (head_tile_triton, ("_fold", "_to_gradient")),
        (divergence_tile_triton, ("_fold", "_fold_mixture", "_to_gradient")),
    )
    for name in names
]


@pytest.mark.parametrize(
    ("script", "options", "count"),
    [
        ("interpreted_head", [], 4),
        pytest.param("interpreted_divergence", [], 4, marks=pytest.mark.exhaustive),
        pytest.param("interpreted_head", ["--all"], 8, marks=pytest.mark.exhaustive),
        pytest.param("interpreted_divergence", ["--all"], 16, marks=pytest.mark.exhaustive),
    ],
    ids=["head", "divergence", "head, all", "divergence, all"],
)
def test_kernels_equal_full_logits(script, options, count):
    """The kernels run in a separate process because the interpreter is selected when Triton is imported."""
    command = [sys.executable, "-m", f"tests.{script}", *options]
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"torch.float32: {count} cases", f"torch.bfloat16: {count} cases"]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("has_optional", "dtype"), each_value([True, False], ["fp32", "bf16"]))
def test_kernels_compile_for_hopper(tmp_path, monkeypatch, dtype, has_optional):
    """`has_optional`: whether per-token temperatures, kept tokens and a mixture are used."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = TYPES | {"gradients": f"*{dtype}"} | (OPTIONAL if has_optional else dict.fromkeys(OPTIONAL, "constexpr"))
    types |= dict.fromkeys(OPTIONS, "constexpr")
    constants = dict(has_scale=has_optional, has_kept=has_optional, has_mixture=has_optional)
    constants |= {"block": head_tile_triton.BLOCK} | ({} if has_optional else dict.fromkeys(OPTIONAL))
    for kernel in KERNELS:
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        own = {name: value for name, value in constants.items() if name in signature}
        compiled = triton.compile(ASTSource(kernel, signature, own), target=HOPPER)
        assert compiled.asm["cubin"]
