"""Copies on the nodes of killed ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.groups import copies
from megarl.cluster.pending import Answers, ready


@pytest.mark.parametrize(
    ("answers", "is_held"),
    [
        ({"node 0": {"actor-0"}, "node 1": {"actor-1"}}, True),
        ({"node 0": {"actor-0"}, "node 1": set()}, False),
        ({"node 0": {"actor-0"}}, False),
    ],
    ids=["complete", "incomplete", "lost node"],
)
def test_node_lost_during_the_call_holds_no_copies(
    answers: dict[str, set[str]], is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(calls: Any, phase: str, timeout: str, may_fail: Any = ()) -> Any:
        assert list(calls) == ["node 0", "node 1"]
        assert set(may_fail) == set(calls)
        return ready(Answers(answers, set(calls) - set(answers)))

    task = SimpleNamespace(remote=lambda names, step: None)
    monkeypatch.setattr(copies, "_ranks_with_copy", SimpleNamespace(options=lambda **_: task))
    group = copies.CopyingGroup.__new__(copies.CopyingGroup)
    group._worker_role = group.role = "actor"
    group._processes = [SimpleNamespace(index=rank, node=SimpleNamespace(number=rank)) for rank in (0, 1)]
    members = SimpleNamespace(lost=lambda: [])
    group._session = SimpleNamespace(members=members, node_of=lambda process: None, submit=submit)
    assert group.holds_copies(5) is is_held
