"""Tolerances for comparing float32 or bfloat16 results with an independent reference on any processor.

The reference runs twice: in float64, which our result is compared with, and in our dtype, where its error against
float64 measures the rounding of this case on this processor. The tolerance is a small multiple of that error, clamped
to [1e-5, 1e-4] of a tensor's largest value in float32: 1e-5 is the guarantee across layouts, and a case with a larger
error than 1e-4 is too ill-conditioned to reveal mistakes. Rounding is largest in gradients that nearly cancel, such as
those of adapter factors, and in weights with near-zero gradients, which Adam normalizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import pytest
import torch
from torch.overrides import TorchFunctionMode

TOLERANCE = 1e-5
TOLERANCES = {torch.float64: 1e-12, torch.float32: TOLERANCE, torch.bfloat16: torch.finfo(torch.bfloat16).eps}
"""Smallest relative tolerance of results in each dtype. The largest is ten times as large."""
LOSS_FLOOR = 1e-6
"""Minimum absolute tolerance of a loss, whose terms are about 1 and may cancel: eight times the float32 epsilon."""
FACTOR = 8
"""Tolerance relative to the error of the float32 reference, which is a single draw and has another summation order."""

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]


class Expected(NamedTuple, Generic[T]):
    """A reference's result in float64 and in our dtype."""

    exact: T
    plain: T


def expected(compute: Callable[[], T], dtype: torch.dtype = torch.float32) -> Expected[T]:
    """Call `compute` in float64 and in `dtype`. `compute` must not draw random numbers."""
    with float64():
        exact = compute()
    with default_dtype(dtype):
        return Expected(exact, compute())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


@contextmanager
def float64() -> Iterator[None]:
    """Make float64 the default dtype, even where code names float32 explicitly, as transformers' norms do."""
    with default_dtype(torch.float64), _Float64():
        yield


def load(kind: type, folder: Path, **keys: Any) -> torch.nn.Module:
    """Load a transformers model in the default dtype, with implementations that support float64."""
    from megarl.run.diagnosis.plain import load_plain  # imports transformers, which most comparisons do not need

    eager = dict(attn_implementation="eager", experts_implementation="eager")
    return load_plain(kind, folder, dtype=torch.get_default_dtype(), **eager, **keys)


class _Float64(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.view:  # reinterprets bytes as another dtype
            return func(*args, **kwargs)
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})


def _widened(argument):
    return torch.float64 if argument is torch.float32 else argument


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return max |a − b| / max |b|.

    Equal tensors, such as all-zero gradients of an expert without tokens, give 0. NaN gives infinity, because a
    comparison with NaN would pass unnoticed.
    """
    difference = (actual - reference).detach().abs()
    if not difference.any():
        return 0.0
    error = float(difference.max() / reference.detach().abs().max())
    return math.inf if math.isnan(error) else error


def limit(exact: Tensors, plain: Tensors, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest relative error that rounding can explain, derived from the tensor with the largest error.
    `dtype`: the dtype in which `plain` was computed."""
    rounding = FACTOR * max(relative_error(plain[name], exact[name]) for name in exact)
    smallest = TOLERANCES[dtype]
    return min(max(smallest, rounding), 10 * smallest)


def assert_close(
    actual: Tensors, exact: Tensors, plain: Tensors, what: str, dtype: torch.dtype = torch.float32
) -> None:
    """Compare tensors by name with the reference in float64 and in `dtype`."""
    missing = exact.keys() - actual.keys() - {"lm_head.weight"}
    assert not missing, missing
    # Compare common names: a router's bias has no gradient, and a tied head is the embedding.
    worst = {name: relative_error(actual[name], exact[name]) for name in actual.keys() & exact.keys()}
    name, largest = max(worst, key=worst.get), limit(exact, plain, dtype)
    assert worst[name] <= largest, f"{what} of {name}: {worst[name]:.2e}, limit {largest:.2e}"


def assert_matches(actual: Tensors, compute: Callable[[], Tensors], what: str) -> None:
    """Compare tensors by name with the results of `compute`, which uses the default dtype. For each dtype among the
    tensors, the limit is derived from running `compute` in that dtype."""
    with float64():
        exact = compute()
    assert {name: x.shape for name, x in actual.items()} == {name: x.shape for name, x in exact.items()}
    for dtype in {x.dtype for x in actual.values()}:
        with default_dtype(dtype):
            plain = compute()
        parts = ({name: x[name] for name in exact if actual[name].dtype is dtype} for x in (actual, exact, plain))
        assert_close(*parts, f"{what}, {dtype}", dtype)


def close_to(exact: float, plain: float, floor: float = 0.0) -> Any:
    """Return an approximate value to compare with. `floor` is the smallest absolute tolerance, for sums that cancel."""
    return pytest.approx(exact, rel=TOLERANCE, abs=max(floor, FACTOR * abs(plain - exact)))
