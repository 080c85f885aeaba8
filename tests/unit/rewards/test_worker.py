"""Conversion of a user function's return values to results."""

import numpy as np
import pytest
import torch

from megarl.rewards.worker import call
from megarl.sandbox.sandbox import SandboxError
from megarl.usercode.failures import ServiceUnavailable


@pytest.mark.parametrize(
    "one",
    [True, 1, 1.0, np.bool_(True), np.float32(1), np.int64(1), np.array(1.0), torch.tensor(1.0), torch.tensor(True)],
)
def test_real_numbers_of_any_type_are_accepted(one):
    assert call(lambda: one, ()) == {"value": 1.0, "returned": "1.0"}
    assert call(lambda: [one, 2], ())["value"] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "returned"),
    [
        (None, "NoneType"),
        ("1", "str"),
        (1j, "complex"),
        (10**400, "int"),
        (np.array([1.0]), "ndarray"),
        (torch.tensor([1.0]), "Tensor"),
        ([1.0, None], "a list of 2"),
    ],
)
def test_non_numeric_return_type_is_reported(value, returned):
    assert call(lambda: value, ()) == {"value": None, "returned": returned}


def test_exception_is_reported_in_one_line():
    def function() -> None:
        raise ValueError("first\n second")

    result = call(function, ())
    stack = result.pop("stack")
    assert result == {"value": None, "failure": "raised ValueError: first second", "kind": "error"}
    assert stack.startswith("Traceback (most recent call last):") and stack.endswith("ValueError: first\n second\n")
    assert "in function" in stack and "worker.py" not in stack.replace("test_worker.py", "")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("a"), "error"),
        (OSError("disk"), "error"),
        (ConnectionRefusedError("no server"), "away"),
        (ServiceUnavailable("503"), "away"),
        (SandboxError("the sandbox exited with status -9"), "lost"),
    ],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_failure_has_the_kind_of_its_cause(error: Exception, kind: str, is_wrapped: bool):
    def function() -> None:
        if not is_wrapped:
            raise error
        try:
            raise error
        except Exception as cause:
            raise ValueError("a library's error") from cause

    assert call(function, ())["kind"] == kind
