"""Where a run begins, by the key `resume`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.batch import Prompt
from megarl.checkpoints import Checkpoints, seal
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.data.prompts import PromptSet
from megarl.resume import Start, start

BASE = Path(__file__).parents[2] / "configs" / "base.yaml"
PROMPTS = PromptSet(tuple(Prompt(str(i), "", (i,)) for i in range(5)), "hash of the prompts")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def config(root: Path, *overrides: str) -> Config:
    return load(BASE, [f"run.folder={root}", "run.name=a", "model.path=m", "data.source=arithmetic", *overrides])


def save(begin: Start, settings: Config, step: int) -> Path:
    """What a run leaves after `step` with three prompts a step: the metrics of one step more, and a checkpoint."""
    while begin.state.step < step:
        begin.state.cursor.take(3)
        begin.state.average.add(1 / (begin.state.step + 3), decay=0.9)
        begin.state.step += 1
    begin.folder.metrics.write_text("".join(json.dumps({"step": n}) + "\n" for n in range(1, step + 2)))
    checkpoints = Checkpoints(begin.folder.checkpoints)
    weights = checkpoints.begin(step) / "weights"
    weights.write_bytes(bytes([step] * 8))
    state = {"config": settings.model_dump(), "data_hash": PROMPTS.data_hash, "run": begin.state.dump()}
    return checkpoints.commit(step, state, [seal(weights, weights.parent)]).path


def test_never_starts_anew_and_keeps_the_earlier_folder(root: Path) -> None:
    first = start(config(root), PROMPTS)
    assert (first.state.step, first.checkpoint) == (0, None)
    save(first, config(root), 1)
    second = start(config(root), PROMPTS)
    assert (second.state.step, second.checkpoint, second.folder.moved) == (0, None, root / "a.1")


def test_auto_goes_on_from_the_newest(root: Path) -> None:
    first = start(config(root, "resume=auto"), PROMPTS)
    assert first.describe() == "starts at the first step"
    save(first, config(root), 2)
    newest = save(first, config(root), 3)
    expected = first.state.cursor.take(6)

    again = start(config(root, "resume=auto", "run.steps=300"), PROMPTS)
    assert (again.state.step, again.checkpoint.path) == (3, newest)
    assert again.describe() == f"goes on after step 3, from {newest}"
    assert (again.folder.path, again.folder.attempt) == (root / "a", 2)
    assert [json.loads(line)["step"] for line in again.folder.metrics.read_text().splitlines()] == [1, 2, 3]
    assert again.state.cursor.take(6) == expected
    assert again.state.average == first.state.average and again.state.average.weight > 2


def test_what_a_killed_run_did_not_come_to_is_done(root: Path) -> None:
    """It was killed while it removed a checkpoint, before it came to the next."""
    first = start(config(root), PROMPTS)
    saved = [save(first, config(root), step) for step in (1, 2, 3, 4)]
    saved[0].rename(saved[0].with_name(".step_000001.removed"))
    again = start(config(root, "resume=auto", "checkpoint.keep=2"), PROMPTS)
    left = sorted(path.name for path in again.folder.checkpoints.iterdir())
    assert left == ["latest", "step_000003", "step_000004"]


def test_a_folder_of_the_same_run_goes_back_to_it(root: Path) -> None:
    first = start(config(root), PROMPTS)
    earlier, later = save(first, config(root), 2), save(first, config(root), 4)
    again = start(config(root, f"resume={earlier}"), PROMPTS)
    assert again.state.step == 2
    assert not later.exists()
    assert Checkpoints(again.folder.checkpoints).latest() == earlier
    assert len(again.folder.metrics.read_text().splitlines()) == 2


def test_a_folder_of_another_run_is_left_as_it_is(root: Path) -> None:
    first = start(config(root), PROMPTS)
    earlier, later = save(first, config(root), 2), save(first, config(root), 4)
    branch = start(config(root, "run.name=b", f"resume={earlier}"), PROMPTS)
    assert (branch.state.step, branch.folder.path, branch.folder.attempt) == (2, root / "b", 1)
    assert later.exists()
    assert not branch.folder.metrics.exists()


@pytest.mark.parametrize(
    ("prepare", "prompts", "problem"),
    [
        (lambda path: "resume=nowhere", PROMPTS, r"^resume=nowhere: there is no such folder; give never, auto or"),
        (lambda path: f"resume={path.parent}", PROMPTS, r"checkpoints: manifest.json is missing"),
        (lambda path: (path / "manifest.json").unlink() or "resume=auto", PROMPTS, r"manifest.json is missing"),
        (lambda path: "run.seed=1", PROMPTS, r"^run.seed=1: .*step_000002 is of a run with 0;"),
        (lambda path: "run.steps=1", PROMPTS, r"^run.steps=1: .*step_000002 has 2 steps done;"),
        (
            lambda path: "resume=auto",
            PromptSet(PROMPTS.prompts, "another"),
            r"^data.source=arithmetic: its prompts have changed since .*step_000002 was saved \(hash another…, then ",
        ),
    ],
    ids=["no folder", "not a checkpoint", "damaged", "another run", "fewer steps", "other prompts"],
)
def test_what_is_refused_leaves_the_folder_untouched(root, prepare, prompts, problem) -> None:
    path = save(start(config(root), PROMPTS), config(root), 2)
    override = prepare(path)
    before = sorted(root.rglob("*"))
    with pytest.raises(ValueError, match=problem):
        start(config(root, "resume=auto", override), prompts)
    assert sorted(root.rglob("*")) == before
    assert len((root / "a" / "metrics.jsonl").read_text().splitlines()) == 3


def test_the_newest_run_is_found_by_its_link(root: Path) -> None:
    """The link to the newest run, through which its checkpoints have another path."""
    first = start(config(root), PROMPTS)
    save(first, config(root), 1)
    again = start(config(root, f"resume={root}/latest/checkpoints/step_000001"), PROMPTS)
    assert (again.folder.path, again.folder.moved, again.state.step) == (root / "a", None, 1)
    assert again.checkpoint.path.exists()


def test_a_damaged_earlier_checkpoint_costs_no_later_one(root: Path) -> None:
    first = start(config(root), PROMPTS)
    earlier, newest = save(first, config(root), 1), save(first, config(root), 2)
    (earlier / "weights").write_bytes(bytes(8))
    with pytest.raises(ValueError, match=r"step_000001: weights is damaged: its SHA-256"):
        start(config(root, f"resume={earlier}"), PROMPTS)
    assert newest.exists()
    assert start(config(root, "resume=auto"), PROMPTS).state.step == 2
