"""Triton kernels of the layers: results under Triton's interpreter, and compilation for a GPU."""

import os
import subprocess
import sys

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megarl.ops import rotary_triton, swiglu_triton
from tests.marks import each_value
from tests.paths import ROOT

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {"gate_and_up", "gradient", "both", "out", "x"}
FACTORS = {"factor", "alpha", "limit"}
CONSTANTS = [
    (swiglu_triton._forward, dict(block=swiglu_triton.BLOCK, clamped=False)),
    (swiglu_triton._forward, dict(block=swiglu_triton.BLOCK, clamped=True)),
    (swiglu_triton._backward, dict(block=swiglu_triton.BLOCK, clamped=False)),
    (swiglu_triton._backward, dict(block=swiglu_triton.BLOCK, clamped=True)),
    (rotary_triton._rotate, dict(direction=-1, heads_block=rotary_triton.HEADS, half_block=64, rest_block=0)),
]


@pytest.mark.exhaustive
def test_kernels_equal_plain_torch():
    """The kernels run in a separate process because the interpreter is selected when Triton is imported."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.interpreted_layers"]
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["torch.float32: 8 + 3 cases", "torch.bfloat16: 8 + 3 cases"]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("rest", "dtype"), each_value([0, 32], ["fp32", "bf16"]))
def test_kernels_compile_for_hopper(tmp_path, monkeypatch, dtype, rest):
    """`rest`: channels without a rotary embedding."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel, constants in CONSTANTS:
        constants = constants | ({"rest_block": rest} if "rest_block" in constants else {})
        types = dict.fromkeys(POINTERS, f"*{dtype}") | {"angles": "*fp32"} | dict.fromkeys(FACTORS, "fp32")
        types |= dict.fromkeys(constants, "constexpr")
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        compiled = triton.compile(ASTSource(kernel, signature, constants), target=HOPPER)
        assert compiled.asm["cubin"]
