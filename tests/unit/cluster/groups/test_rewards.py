"""The rows of samples that the process of the rewards writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster.groups import rewards
from megarl.cluster.groups.rewards import RewardWorker
from megarl.config.load import load
from megarl.core.types import Prompt, Sample, VersionRun
from tests.paths import QUICKSTART


def test_rows_hold_texts_that_utf8_cannot_carry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards.ray, "get", lambda refs: refs)
    prompt = Prompt("1", "a\udc80 é", [1, 2], answer="\ud800")
    sample = Sample("1.0", prompt, [3], [-0.5], [True], (VersionRun(0, 1),), "stop", text="b\udfff")
    worker = RewardWorker(load(QUICKSTART), SimpleNamespace(reward_model=None))
    worker.score([sample, sample], {}, 1, tmp_path / "rows")
    lines = (tmp_path / "rows").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        assert (row["prompt"], row["response"], row["answer"]) == (prompt.text, sample.text, prompt.answer)
    assert len(lines) == 2
