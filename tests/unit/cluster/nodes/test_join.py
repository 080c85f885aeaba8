"""A node between two attempts of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cluster.nodes import join as module
from megarl.cluster.nodes.rendezvous import Invitation, NodeRendezvous
from megarl.cluster.supervision import processes, segments
from megarl.cluster.supervision.scratch import make_memory_folder, make_scratch, memory_folder, remove_scratch
from tests.unit.cluster.nodes.test_rendezvous import INVITED


def test_attempt_finds_no_copies_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(module, "_await_invitation", lambda rendezvous, _: rendezvous.invitation())
    monkeypatch.setattr(processes, "end_descendants", lambda: None)
    rendezvous = NodeRendezvous(tmp_path / "nodes")
    rendezvous.invite(INVITED)
    found: list[bool] = []

    def take_part(rendezvous: NodeRendezvous, invitation: Invitation, scratch: Path, is_spare: bool) -> None:
        found.append(memory_folder(scratch).exists())
        (make_memory_folder(scratch) / "actor-0.0.json").write_text("{}")
        if len(found) == 1:
            rendezvous.invite(replace(INVITED, id="b2"))
        else:
            rendezvous.withdraw()

    monkeypatch.setattr(module, "_take_part", take_part)
    scratch = make_scratch()
    module.join(rendezvous, scratch, timeout_s=0.0, is_spare=False)
    remove_scratch(scratch)
    assert found == [False, False]
