"""Counters in a checkpoint's files, which another program may have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import UserError
from megarl.megatron.checkpoint.sharded import _checked_counters

COUNTERS = {"num_updates": 3, "skipped_updates": 0, "loss_scale": 65536.0}


def test_valid_counters_are_returned() -> None:
    assert _checked_counters(COUNTERS, Path("actor")) == COUNTERS


@pytest.mark.parametrize("value", [None, "3", -1, 10**400, float("nan"), float("inf"), [3], {"a": 1}, True])
def test_malformed_counter_is_named(value: Any) -> None:
    for name in COUNTERS:
        with pytest.raises(
            UserError, match=rf"^actor: counters\.{name}=.* is not a nonnegative number\. Fix: resume from another"
        ):
            _checked_counters(COUNTERS | {name: value}, Path("actor"))


@pytest.mark.parametrize("counters", [None, {}, [1], "a"])
def test_missing_counters_are_named(counters: Any) -> None:
    with pytest.raises(UserError, match=r"^actor: counters=.* has no num_updates\. Fix: "):
        _checked_counters(counters, Path("actor"))
