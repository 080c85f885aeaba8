"""Every function of tensors refuses those that would be broadcast to something else than its formula."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
import torch

from megarl import algorithms
from megarl.algorithms.whole_samples import WholeSamples

DTYPES = {"mask": torch.bool, "selected": torch.bool, "row_sample": torch.int64}
OTHERS = {
    "samples": WholeSamples(torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64), 1),
    "level": "sequence",
    "estimator": "k1",
    "weight": "token",
    "num_samples": 3,
}
OF_SAMPLES = {("at_last_token", "reward")}
"""Of another length, which is not known from the other tensors."""


def functions() -> Iterator[Callable]:
    """With two tensors or more; what `loss_of_policy` chooses among is in test_policy_loss."""
    for module in pkgutil.walk_packages(algorithms.__path__, "megarl.algorithms."):
        for name, function in inspect.getmembers(import_module(module.name), inspect.isfunction):
            own = function.__module__ == module.name and name[0] != "_" and name != "loss_of_policy"
            if own and len(tensors(function)) > 1:
                yield function


def tensors(function: Callable) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.annotation == "torch.Tensor"]


def arguments(function: Callable) -> dict[str, object]:
    given = {}
    for name in inspect.signature(function).parameters:
        given[name] = OTHERS.get(name, 0.5)
    return given | {name: torch.zeros(3, dtype=DTYPES.get(name)) for name in tensors(function)}


CASES = [(f, name) for f in functions() for name in tensors(f) if (f.__name__, name) not in OF_SAMPLES]


@pytest.mark.parametrize(("function", "name"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_one_of_another_shape_is_refused(function, name):
    given = arguments(function)
    function(**given)
    for shape in ((1,), (3, 1), ()):
        with pytest.raises(ValueError, match="must share one shape"):
            function(**given | {name: given[name].new_zeros(shape)})


def test_there_are_many_of_them():
    assert len({function for function, _ in CASES}) > 20


@pytest.mark.parametrize("function", list(functions()), ids=lambda function: function.__name__)
def test_each_says_what_it_computes(function):
    assert function.__doc__ and len(function.__doc__) > 40
