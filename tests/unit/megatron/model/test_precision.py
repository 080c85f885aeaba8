"""Hardware requirements of fp8, their error messages, and the pack multiples of its kernels."""

from __future__ import annotations

import pytest

from megarl.core import device
from megarl.megatron.model import precision
from megarl.megatron.model.precision import check_fp8, token_multiple


def test_fp8_is_rejected_without_transformer_engine():
    with pytest.raises(ValueError, match=r"actor.fp8=delayed: fp8 requires a CUDA device .* set actor.fp8=null"):
        check_fp8("actor.fp8", "delayed")


@pytest.mark.parametrize(
    ("capability", "recipe", "message"),
    [
        ((8, 0), "delayed", "8.9, but this device has 8.0. Fix: set actor.fp8 to null"),
        ((8, 9), "blockwise", "9.0, but this device has 8.9. Fix: set actor.fp8 to one of delayed, tensorwise"),
        ((9, 0), "mxfp8", "10.0, but this device has 9.0. Fix: set actor.fp8 to one of delayed, tensorwise, blockwise"),
        ((9, 0), "blockwise", None),
        ((10, 0), "mxfp8", None),
    ],
)
def test_fp8_requires_compute_capability(monkeypatch, capability, recipe, message):
    monkeypatch.setattr(precision, "uses_transformer_engine", lambda: True)
    monkeypatch.setattr(device, "capability", lambda: capability)
    if message is None:
        check_fp8("actor.fp8", recipe)
    else:
        with pytest.raises(ValueError, match=f"actor.fp8={recipe}: requires compute capability {message}"):
            check_fp8("actor.fp8", recipe)


@pytest.mark.parametrize("recipe", [None, *precision.FORMATS])
def test_token_multiple_matches_megatron(recipe):
    from megatron.core.enums import Fp8Recipe
    from megatron.core.fp8_utils import get_fp8_align_size

    assert token_multiple(recipe) == (1 if recipe is None else get_fp8_align_size(Fp8Recipe(recipe)))
