"""How far float32 results may be from an independent reference, on any processor.

A reference runs twice: in float64, which ours are compared with, and in float32, whose distance from float64 is what
float32 loses in that case on that processor. A limit is a small multiple of it, at least the 1e-5 of a tensor's largest
value that layouts promise, and at most 1e-4. Float32 loses more than elsewhere in gradients that nearly cancel, such as
those of an adapter's factors, and in weights whose gradients are near zero, which Adam divides by their own size.
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
LOSS_FLOOR = 1e-6
"""The least limit of a loss, whose terms are about 1 and may cancel: eight times float32's precision."""
FACTOR = 8
"""Limit over the float32 reference's own error, which is a single draw: ours add in another order."""

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]


class Expected(NamedTuple, Generic[T]):
    """A reference's result in float64 and in float32."""

    exact: T
    plain: T


def expected(compute: Callable[[], T]) -> Expected[T]:
    """Call `compute`, which draws no random numbers, in float64 and in float32."""
    with float64():
        exact = compute()
    return Expected(exact, compute())


@contextmanager
def float64() -> Iterator[None]:
    """Make float64 the default dtype, and replace float32 where code names it, as transformers' norms do."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(previous)


def load(kind: type, folder: Path, **keys: Any) -> torch.nn.Module:
    """Load a model of transformers in the default dtype, with attention and experts that have float64."""
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    return kind.from_pretrained(folder, dtype=torch.get_default_dtype(), **eager, **keys)


class _Float64(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.view:  # of bytes as another dtype
            return func(*args, **kwargs)
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})


def _widened(argument):
    return torch.float64 if argument is torch.float32 else argument


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """max |a − b| / max |b|: 0 of equal tensors, as of the gradients of an expert that no token reaches, and infinity
    where something is not a number, which no comparison would notice."""
    difference = (ours - theirs).detach().abs().max()
    if difference == 0:
        return 0.0
    error = float(difference / theirs.detach().abs().max())
    return math.inf if math.isnan(error) else error


def limit(exact: Tensors, plain: Tensors) -> float:
    """Return the largest relative error that rounding explains, from the worst of the tensors."""
    worst = max(relative_error(plain[name], exact[name]) for name in exact)
    return min(max(TOLERANCE, FACTOR * worst), 10 * TOLERANCE)


def assert_close(ours: Tensors, exact: Tensors, plain: Tensors, what: str) -> None:
    """Compare tensors by name with a reference's in float64 and float32."""
    missing = exact.keys() - ours.keys() - {"lm_head.weight"}
    assert not missing, missing
    # A router's bias has no gradient, and a tied head is the embedding.
    worst = {name: relative_error(ours[name], exact[name]) for name in ours.keys() & exact.keys()}
    name, largest = max(worst, key=worst.get), limit(exact, plain)
    assert worst[name] <= largest, f"{what} of {name}: {worst[name]:.2e}, limit {largest:.2e}"


def close_to(exact: float, plain: float, floor: float = 0.0) -> Any:
    """Return an object that equals numbers close to `exact`. floor: the least absolute limit, for sums that cancel."""
    return pytest.approx(exact, rel=TOLERANCE, abs=max(floor, FACTOR * abs(plain - exact)))
