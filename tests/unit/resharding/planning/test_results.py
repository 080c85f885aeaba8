from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.resharding.planning import results
from megarl.resharding.planning.results import cached

VALUE = {"a": 1 / 3, "b": {"c": 2**60}, "d": True}


class Computation:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> dict[str, Any]:
        self.times += 1
        return VALUE


def test_equal_inputs_are_computed_once(tmp_path: Path):
    compute = Computation()
    assert [cached(tmp_path / "new", inputs, compute) for inputs in ([1, "a"], [1, "a"], [1, "b"])] == [VALUE] * 3
    assert compute.times == 2
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_changed_code_recomputes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compute = Computation()
    cached(tmp_path, 0, compute)
    package = tmp_path / "package"
    (package / "config").mkdir(parents=True)
    (package / "config" / "a.py").write_text("pass")
    monkeypatch.setattr(results, "ROOT", package)
    for text in ("pass", "pass", "1"):
        (package / "config" / "a.py").write_text(text)
        results._code_hash.cache_clear()
        cached(tmp_path, 0, compute)
    results._code_hash.cache_clear()
    assert compute.times == 3


def test_hashed_packages_exist():
    assert all(list((results.ROOT / name).rglob("*.py")) for name in results.PACKAGES)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("true", "false"),
        lambda text: json.dumps({"content": json.loads(text)["content"]}),
    ],
)
def test_damaged_file_is_recomputed_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage):
    compute = Computation()
    cached(tmp_path, 0, compute)
    [file] = tmp_path.iterdir()
    file.write_text(damage(file.read_text()))
    assert cached(tmp_path, 0, compute) == VALUE
    assert caplog.messages == [f"{file} is corrupt and will be recomputed"]
    assert cached(tmp_path, 0, compute) == VALUE
    assert compute.times == 2 and len(caplog.messages) == 1


def test_unwritable_folder_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    assert cached(tmp_path / "file", 0, Computation()) == VALUE
    [message] = caplog.messages
    assert "could not cache the result" in message
