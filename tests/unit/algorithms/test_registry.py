"""Discovery of estimators and objectives from their packages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES, find
from megarl.algorithms.specs import ObjectiveSpec, Rows
from megarl.config.algorithm_schema import Advantage, Objective
from tests.paths import ROOT

FOLDER = ROOT / "megarl" / "algorithms"
SPEC = "from megarl.algorithms.specs import ImitationObjective\nSPEC = ImitationObjective(name='{}', formula='', "


def package(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> ModuleType:
    """Return a package of these folders, whose modules are dropped afterwards."""
    created = ModuleType(f"found_in_{folders[0].parent.name}")
    created.__path__ = [str(folder) for folder in folders]
    monkeypatch.setitem(sys.modules, created.__name__, created)
    return created


def write(folder: Path, file: str, name: str, rows: str = "messages") -> Path:
    folder.mkdir(exist_ok=True)
    text = f"{SPEC.format(name)}paper='', loss=abs, rows=('{rows}',))\n"
    (folder / f"{file}.py").write_text(text)
    return folder


def found_names(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> list[str]:
    return list(find(package(monkeypatch, *folders), ObjectiveSpec, lambda spec: get_args(Rows).index(spec.rows[0])))


def test_every_file_is_registered():
    for specs, folder in ((ESTIMATORS, "advantages"), (OBJECTIVES, "objectives")):
        assert set(specs) == {path.stem for path in (FOLDER / folder).glob("*.py")} - {"__init__"}


def test_schema_names_match_registry():
    assert (Advantage.entries, Objective.entries) == (ESTIMATORS, OBJECTIVES)


def test_entries_are_sorted_by_kind_and_name(monkeypatch, tmp_path):
    for name, rows in (("b", "preferences"), ("c", "prompts"), ("a", "preferences"), ("d", "prompts")):
        write(tmp_path / "one", name, name, rows)
    assert found_names(monkeypatch, tmp_path / "one") == ["c", "d", "a", "b"]


def test_file_without_matching_spec_is_rejected(monkeypatch, tmp_path):
    other = write(tmp_path / "other", "a", "b")
    with pytest.raises(ImportError, match=r"\.a: SPEC.name=b differs from the file name"):
        found_names(monkeypatch, other)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "e.py").write_text("")
    with pytest.raises(ImportError, match=r"\.e: missing SPEC. Fix: define SPEC as a ObjectiveSpec"):
        found_names(monkeypatch, tmp_path / "none")


def test_duplicate_names_are_rejected(monkeypatch, tmp_path):
    folders = [write(tmp_path / folder, "f", "f") for folder in ("one", "two")]
    with pytest.raises(ImportError, match="several files define f"):
        found_names(monkeypatch, *folders)
