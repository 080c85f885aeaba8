"""Every tensor function rejects inputs that would silently broadcast."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
import torch

from megarl import algorithms
from megarl.algorithms.corrections import factors
from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES
from megarl.algorithms.returns import at_last_token
from megarl.algorithms.sample_segments import SampleSegments
from megarl.algorithms.specs import TokenEstimator
from megarl.algorithms.transition import Transition

BOOLS = ("mask", "selected", "is_far", "continues")
DTYPES = {**dict.fromkeys(BOOLS, torch.bool), "row_sample": torch.int64}
OTHERS = {
    "samples": SampleSegments(torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64), 1),
    "level": "sequence",
    "estimator": "k1",
    "weight": "token",
    "weights": (1.0,),
    "num_samples": 3,
    "kind": "flow",
    "step": Transition(torch.ones(3), torch.ones(3), torch.ones(3)),
    "reduction": "mean",
}
LATENTS = {"x", "x0", "x_next", "noise", "v", "old_v", "other", "latents", "conditional", "unconditional"}
"""Tensors of shape [B, …] in functions of denoising steps; all others are one-dimensional."""
COLUMNS = {"teachers"}
"""Tensors of shape [N, K]."""
OTHER_SHAPE = {("at_last_token", "reward"), ("per_sample", "latents")}
"""(function, tensor) pairs in which the tensor's dimensions are independent of the other tensors."""


def functions() -> Iterator[Callable]:
    """Yield the public functions with at least two tensors in their signature."""
    for module in pkgutil.walk_packages(algorithms.__path__, "megarl.algorithms."):
        for name, function in inspect.getmembers(import_module(module.name), inspect.isfunction):
            is_public = function.__module__ == module.name and name[0] != "_"
            if is_public and len(tensors(function)) > 1:
                yield function


def tensors(function: Callable) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.annotation == "torch.Tensor"]


def is_latent(function: Callable, name: str) -> bool:
    return name in LATENTS and function.__module__.split(".")[-1] in ("transition", "diffusion_nft")


def arguments(function: Callable) -> dict[str, object]:
    values = {}
    for name in inspect.signature(function).parameters:
        values[name] = OTHERS.get(name, 0.5)
    for name in tensors(function):
        shape = (3, 2) if is_latent(function, name) else (3, 1) if name in COLUMNS else (3,)
        values[name] = torch.zeros(shape, dtype=DTYPES.get(name))
    return values


CASES = [(f, name) for f in functions() for name in tensors(f) if (f.__name__, name) not in OTHER_SHAPE]


@pytest.mark.parametrize(("function", "name"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_mismatched_shape_is_rejected(function, name):
    values = arguments(function)
    function(**values)
    wrong: tuple[tuple[int, ...], ...] = ((1,), (3, 1), ())
    if is_latent(function, name):
        wrong = ((1, 2), (3, 1), (3,), ())
    elif name in COLUMNS:
        wrong = ((1, 1), (3, 2), (3,), ())
    for shape in wrong:
        with pytest.raises(ValueError, match=r"must have (the same )?shape"):
            function(**values | {name: values[name].new_zeros(shape)})


@pytest.mark.parametrize("shape", [(3, 1), ()])
def test_sample_rewards_must_be_one_dimensional(shape):
    mask, row_sample = torch.ones(3, dtype=torch.bool), torch.arange(3)
    with pytest.raises(ValueError, match="reward must have one dimension"):
        at_last_token(torch.zeros(shape), mask, row_sample)


@pytest.mark.parametrize("shape", [(1,), (3, 1), ()])
def test_mask_and_row_sample_must_have_equal_length(shape):
    for mask, row_sample in (((3,), shape), (shape, (3,))):
        with pytest.raises(ValueError, match="mask and row_sample must have the same shape"):
            SampleSegments(torch.ones(mask, dtype=torch.bool), torch.zeros(row_sample, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="log_ratio and mask must have the same shape"):
        factors(torch.zeros(shape), OTHERS["samples"], None, None, None, 0.5, 2.0)


def test_functions_of_every_algorithm_are_covered():
    seen = {function for function, _ in CASES}
    losses = [spec.loss for spec in OBJECTIVES.values() if spec.is_policy_objective]
    orders = [spec.selection.order for spec in OBJECTIVES.values() if spec.selects_tokens]
    estimates = [spec.estimate for spec in ESTIMATORS.values() if isinstance(spec, TokenEstimator)]
    assert seen.issuperset([*losses, *orders, *estimates])
    assert len(seen) > 20


@pytest.mark.parametrize("function", list(functions()), ids=lambda function: function.__name__)
def test_every_tensor_function_has_a_docstring(function):
    assert function.__doc__ and len(function.__doc__) > 40
