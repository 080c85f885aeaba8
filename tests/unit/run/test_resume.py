"""Tests of the starting point of a run, which the key `resume` selects."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.checkpoint import FileRecord, seal, write_manifest
from megarl.core.errors import DamagedCheckpoint, InfrastructureFailure, UserError
from megarl.core.prompt import Prompt
from megarl.data.prompts import PromptSet
from megarl.models.paths import Models
from megarl.run.beginning import check_beginning
from megarl.run.checkpoints import Checkpoints
from megarl.run.preflight import _find_folder
from megarl.run.resume import ResumePoint, fall_back
from megarl.run.resume import start as start_with_space
from megarl.step.state import RunState
from tests.marks import each_value
from tests.paths import BASE

PROMPTS = PromptSet(tuple(Prompt(str(i), "", (i,)) for i in range(5)), "hash of the prompts")


CHECKPOINT_BYTES = 100


MODELS = {"model.path": {"folder": "/models/m", "hash": "1234567890"}}


def start(settings: Config, prompts: PromptSet, models: Models = MODELS) -> ResumePoint:
    return start_with_space(settings, prompts, CHECKPOINT_BYTES, models)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def config(root: Path, *overrides: str) -> Config:
    return load(BASE, [f"run.folder={root}", "run.name=a", "model.path=m", "data.source=arithmetic", *overrides])


def save(resume_point: ResumePoint, settings: Config, step: int) -> Path:
    """Write the checkpoint of `step` and the metrics of one further step, as a run with three prompts per step does."""
    while resume_point.state.step < step:
        resume_point.state.cursor.take(3)
        resume_point.state.average.add(1 / (resume_point.state.step + 3), decay=0.9)
        resume_point.state.step += 1
    resume_point.folder.metrics.write_text("".join(json.dumps({"step": n}) + "\n" for n in range(1, step + 2)))
    checkpoints = Checkpoints(resume_point.folder.checkpoints)
    weights = checkpoints.begin(step) / "weights"
    weights.write_bytes(bytes([step] * 8))
    state = {"config": settings.model_dump(), "data_hash": PROMPTS.data_hash, "run": resume_point.state.dump()}
    state["models"] = MODELS
    return checkpoints.commit(step, state, [seal(weights, weights.parent)]).path


def test_never_starts_over_and_keeps_the_earlier_folder(root: Path) -> None:
    first = start(config(root), PROMPTS)
    assert (first.state.step, first.checkpoint) == (0, None)
    save(first, config(root), 1)
    before = sorted(root.rglob("*"))
    with pytest.raises(UserError) as refused:
        start(config(root), PROMPTS)
    assert str(refused.value) == (
        f"run.name=a: {root}/a already contains 2 steps of an earlier run. Fix: set resume=auto to continue that "
        "run, set a different run.name, or set run.replace=true to move the folder aside"
    )
    assert sorted(root.rglob("*")) == before
    second = start(config(root, "run.replace=true"), PROMPTS)
    assert (second.state.step, second.checkpoint, second.folder.moved) == (0, None, root / "a.1")


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_folder_of_a_failed_start_is_reused(root: Path, resume: str) -> None:
    first = start(config(root), PROMPTS)
    (first.folder.logs / "engine-0.log").write_text("out of memory")
    second = start(config(root, f"resume={resume}", "run.seed=3"), PROMPTS)
    assert (second.state.step, second.folder.attempt, second.folder.moved) == (0, 2, None)
    assert (first.folder.logs / "engine-0.log").read_text() == "out of memory"
    assert names(root) == ["a", "latest"]


def test_auto_moves_a_run_without_checkpoints_aside(root: Path) -> None:
    start(config(root), PROMPTS).folder.metrics.write_text('{"step": 1}\n')
    again = start(config(root, "resume=auto"), PROMPTS)
    assert (again.state.step, again.folder.moved) == (0, root / "a.1")


def test_model_inside_the_folder_is_not_moved_aside(root: Path) -> None:
    save(start(config(root), PROMPTS), config(root), 1)
    (root / "a" / "model").mkdir()
    with pytest.raises(
        UserError,
        match=r"^model.path=.*/a/model: the model is inside .*/a, .* move aside. Fix: set a different run.name",
    ):
        start(config(root, "run.replace=true", f"model.path={root}/a/model"), PROMPTS)
    assert names(root) == ["a", "latest"]


def test_auto_resumes_from_the_newest_checkpoint(root: Path) -> None:
    first = start(config(root, "resume=auto"), PROMPTS)
    assert first.describe() == "starting at the first step"
    save(first, config(root), 2)
    newest = save(first, config(root), 3)
    expected = first.state.cursor.take(6)

    again = start(config(root, "resume=auto", "run.steps=300"), PROMPTS)
    assert (again.state.step, again.checkpoint.path) == (3, newest)
    assert again.describe() == f"resuming after step 3 from {newest}"
    assert (again.folder.path, again.folder.attempt) == (root / "a", 2)
    assert [json.loads(line)["step"] for line in again.folder.metrics.read_text().splitlines()] == [1, 2, 3]
    assert again.state.cursor.take(6) == expected
    assert again.state.average == first.state.average and again.state.average.weight > 2


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_partially_removed_checkpoint_is_removed(root: Path) -> None:
    first = start(config(root), PROMPTS)
    saved = [save(first, config(root), step) for step in (1, 2)]
    saved[0].rename(saved[0].with_name(".step_000001.removed"))
    again = start(config(root, "resume=auto"), PROMPTS)
    assert names(again.folder.checkpoints) == ["latest", "step_000002"]


def test_older_checkpoints_are_kept_until_the_newest_is_loaded(root: Path) -> None:
    """Each rank verifies its own files of the newest checkpoint only later, so an older one may still be needed."""
    first = start(config(root), PROMPTS)
    saved = [save(first, config(root), step) for step in (1, 2, 3)]
    again = start(config(root, "resume=auto", "checkpoint.keep=1"), PROMPTS)
    assert again.checkpoint.path == saved[-1] and all(path.exists() for path in saved)


def test_newer_checkpoint_is_removed_only_for_a_valid_one(root: Path) -> None:
    """The run was killed before it pointed `latest` to the newest checkpoint."""
    first = start(config(root), PROMPTS)
    earlier, newest = save(first, config(root), 1), save(first, config(root), 2)
    (earlier / "weights").write_bytes(bytes(8))
    Checkpoints(earlier.parent).point_to(earlier)
    with pytest.raises(ValueError, match=r"step_000001: weights is corrupt: its SHA-256"):
        start(config(root, "resume=auto"), PROMPTS)
    assert newest.exists()


def have_space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - free, free))


def test_disk_needs_space_for_one_more_than_keep(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_space(monkeypatch, 299)
    start(config(root, "checkpoint.keep=2", "checkpoint.every_steps=null"), PROMPTS)
    with pytest.raises(ValueError, match=r"^checkpoint.keep=2: .* 3 more checkpoints need 3 x 0.00"):
        start(config(root, "checkpoint.keep=2"), PROMPTS)
    with pytest.raises(ValueError, match=r"^checkpoint.keep=2: .* 3 more checkpoints need 3 x 0.00"):
        start(config(root, "checkpoint.keep=2", "checkpoint.every_steps=null", "checkpoint.on_signal=true"), PROMPTS)
    have_space(monkeypatch, 300)
    first = start(config(root, "checkpoint.keep=2"), PROMPTS)
    for step in (1, 2, 3):
        save(first, config(root), step)
    have_space(monkeypatch, 99)
    with pytest.raises(InfrastructureFailure, match=r"^checkpoint.keep=3: .* 1 more checkpoint needs 1 x 0.00"):
        start(config(root, "checkpoint.keep=3", "resume=auto"), PROMPTS)
    # Removing the oldest of the three, which a killed run left behind, makes space.
    start(config(root, "checkpoint.keep=2", "resume=auto"), PROMPTS)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_full_disk_leaves_the_folder_unchanged(root: Path, monkeypatch, resume: str) -> None:
    first = start(config(root), PROMPTS)
    save(first, config(root), 2)
    first.folder.rollouts(3).touch()
    first.folder.model.mkdir()
    before = sorted(root.rglob("*"))
    have_space(monkeypatch, 99)
    with pytest.raises(InfrastructureFailure, match=r"^checkpoint.keep=50: "):
        start(config(root, f"resume={resume}", "run.steps=300", "checkpoint.keep=50"), PROMPTS)
    have_space(monkeypatch, 100)
    with pytest.raises(UserError, match=r"^checkpoint.keep=50: "):
        start(config(root, f"resume={resume}", "run.steps=300", "checkpoint.keep=50"), PROMPTS)
    assert sorted(root.rglob("*")) == before
    assert len(first.folder.metrics.read_text().splitlines()) == 3


@pytest.mark.parametrize("copy", ["checkpoints/step_000002.keep", "kept/step_000002"])
def test_renamed_checkpoint_inside_the_folder_raises(root: Path, copy: str) -> None:
    path = save(start(config(root), PROMPTS), config(root), 2)
    shutil.copytree(path, root / "a" / copy)
    with pytest.raises(ValueError, match=rf"^resume=.*{copy}: .* name is not checkpoints/step_000002. Fix: rename it"):
        start(config(root, f"resume={root}/a/{copy}"), PROMPTS)
    assert path.exists()


def test_checkpoint_of_the_same_run_rewinds_it(root: Path) -> None:
    first = start(config(root), PROMPTS)
    earlier, later = save(first, config(root), 2), save(first, config(root), 4)
    again = start(config(root, f"resume={earlier}"), PROMPTS)
    assert again.state.step == 2
    assert not later.exists()
    assert Checkpoints(again.folder.checkpoints).latest() == earlier
    assert len(again.folder.metrics.read_text().splitlines()) == 2


def test_checkpoint_of_another_run_is_not_modified(root: Path) -> None:
    first = start(config(root), PROMPTS)
    earlier, later = save(first, config(root), 2), save(first, config(root), 4)
    branch = start(config(root, "run.name=b", f"resume={earlier}"), PROMPTS)
    assert (branch.state.step, branch.folder.path, branch.folder.attempt) == (2, root / "b", 1)
    assert later.exists()
    assert not branch.folder.metrics.exists()


@pytest.mark.parametrize(
    ("prepare", "prompts", "problem"),
    [
        (
            lambda path: "resume=nowhere",
            PROMPTS,
            r"^resume=\S*nowhere: no such folder. Fix: set resume to never",
        ),
        (lambda path: f"resume={path.parent}", PROMPTS, r"checkpoints: manifest.json is missing"),
        (lambda path: (path / "manifest.json").unlink() or "resume=auto", PROMPTS, r"manifest.json is missing"),
        (lambda path: "run.seed=1", PROMPTS, r"^run.seed=1: .*step_000002 was saved with 0. Fix"),
        (lambda path: "run.steps=1", PROMPTS, r"^run.steps=1: .*step_000002 was saved after step 2"),
        (
            lambda path: "resume=auto",
            PromptSet(PROMPTS.prompts, "another"),
            r"^data.source=arithmetic: the prompts have changed since .*step_000002 was saved \(hash another… "
            "instead of ",
        ),
    ],
    ids=["no folder", "not a checkpoint", "damaged", "another run", "fewer steps", "other prompts"],
)
def test_rejected_checkpoint_leaves_the_folder_unchanged(root, prepare, prompts, problem) -> None:
    path = save(start(config(root), PROMPTS), config(root), 2)
    override = prepare(path)
    before = sorted(root.rglob("*"))
    with pytest.raises(ValueError, match=problem):
        start(config(root, "resume=auto", override), prompts)
    assert sorted(root.rglob("*")) == before
    assert len((root / "a" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("path", ["/models/m", "some/model"])
def test_changed_model_under_the_same_path_raises(root: Path, path: str) -> None:
    settings = config(root, f"model.path={path}")
    saved = save(start(settings, PROMPTS), settings, 2)
    changed = {"model.path": {"folder": "/models/other", "hash": "abcdefghij"}}
    before = sorted(root.rglob("*"))
    with pytest.raises(UserError) as refused:
        start(config(root, f"model.path={path}", "resume=auto"), PROMPTS, changed)
    remedy = " (model.revision selects a commit)" if path == "some/model" else ""
    assert str(refused.value) == (
        f"model.path=/models/other: these weights (hash abcdefgh…) differ from the weights that the run of {saved} "
        f"started from: /models/m (hash 12345678…). Fix: restore the weights{remedy}, or start a new run with "
        "resume=never and a different run.name"
    )
    assert sorted(root.rglob("*")) == before
    again = start(config(root, f"model.path={path}", "model.revision=v1", "resume=auto"), PROMPTS)
    assert again.state.step == 2


def test_moved_model_is_recognized_by_its_hash(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(start(config(root), PROMPTS), config(root), 2)
    elsewhere = config(root, "resume=auto", "model.path=/new/m")
    before = sorted(root.rglob("*"))
    with pytest.raises(UserError, match=r"^model.path=/new/m: .* was saved with m. Fix: restore this value"):
        start(elsewhere, PROMPTS, {"model.path": {"folder": "/new/m", "hash": "of others"}})
    assert sorted(root.rglob("*")) == before
    assert capsys.readouterr().out == ""
    again = start(elsewhere, PROMPTS, {"model.path": {"folder": "/new/m", "hash": MODELS["model.path"]["hash"]}})
    assert again.state.step == 2
    assert capsys.readouterr().out == "model.path=/new/m: same weights as m, the model that the run started from\n"
    assert "/new/m" in again.folder.config.read_text()


def test_checkpoint_path_through_the_latest_link_is_resolved(root: Path) -> None:
    first = start(config(root), PROMPTS)
    save(first, config(root), 1)
    again = start(config(root, f"resume={root}/latest/checkpoints/step_000001"), PROMPTS)
    assert (again.folder.path, again.folder.moved, again.state.step) == (root / "a", None, 1)
    assert again.checkpoint.path.exists()


@pytest.mark.parametrize("pointer", ["latest", "best"])
def test_path_of_a_pointer_selects_its_checkpoint(root: Path, pointer: str) -> None:
    save(start(config(root), PROMPTS), config(root), 1)
    path = root / "a" / "checkpoints" / pointer
    path.write_text("step_000001\n")
    again = start(config(root, f"resume={path}"), PROMPTS)
    assert again.checkpoint.path.name == "step_000001" and again.state.step == 1


def test_run_without_logs_is_resumed(root: Path) -> None:
    save(start(config(root), PROMPTS), config(root), 2)
    shutil.rmtree(root / "a" / "logs")
    again = start(config(root, "resume=auto"), PROMPTS)
    assert (again.state.step, again.folder.attempt) == (2, 2)
    assert again.folder.logs.is_dir()


@pytest.mark.parametrize("damage", ["metrics", "state", "logs"])
def test_folder_that_cannot_be_opened_is_unchanged(root: Path, damage: str, monkeypatch) -> None:
    first = start(config(root), PROMPTS)
    if damage == "state":
        monkeypatch.setattr(RunState, "dump", lambda _: {"step": 2})
    earlier = save(first, config(root), 2)
    monkeypatch.undo()
    save(first, config(root), 4)
    first.folder.rollouts(3).touch()
    if damage == "metrics":
        first.folder.metrics.write_text('{"step": 1}\nnothing\n{"step": 3}\n')
    if damage == "logs":
        shutil.rmtree(root / "a" / "logs")
        (root / "a" / "logs").touch()
    before = sorted(root.rglob("*"))
    text = first.folder.metrics.read_text()
    with pytest.raises((ValueError, KeyError, FileExistsError, NotADirectoryError)):
        start(config(root, f"resume={earlier}"), PROMPTS)
    assert sorted(root.rglob("*")) == before
    assert first.folder.metrics.read_text() == text


def test_damaged_earlier_checkpoint_keeps_later_ones(root: Path) -> None:
    first = start(config(root), PROMPTS)
    earlier, newest = save(first, config(root), 1), save(first, config(root), 2)
    (earlier / "weights").write_bytes(bytes(8))
    with pytest.raises(ValueError, match=r"step_000001: weights is corrupt: its SHA-256"):
        start(config(root, f"resume={earlier}"), PROMPTS)
    assert newest.exists()
    assert start(config(root, "resume=auto"), PROMPTS).state.step == 2


def test_weighted_prompt_order_is_resumed(root: Path) -> None:
    prompts = PromptSet(PROMPTS.prompts, PROMPTS.data_hash, weights=(1.0, 2.0, 3.0, 4.0, 5.0))
    keys = ("data.source=d.jsonl", "data.weight_column=w", "data.solved_weight=0.1")
    first = start(config(root, *keys), prompts)
    first.state.cursor.take(3)
    first.state.cursor.note({4: 1.0, 3: 0.5})
    save(first, config(root, *keys), 2)
    again = start(config(root, *keys, "resume=auto"), prompts)
    assert [again.state.cursor.take(2) for _ in range(5)] == [first.state.cursor.take(2) for _ in range(5)]


def damage(kind: str, checkpoint: Path) -> None:
    weights, manifest = checkpoint / "weights", checkpoint / "manifest.json"
    {
        "missing manifest": manifest.unlink,
        "corrupt manifest": lambda: manifest.write_text(manifest.read_text().replace('"step": ', '"step": 1')),
        "binary manifest": lambda: manifest.write_bytes(b"\xff\xfe\x00"),
        "deep manifest": lambda: manifest.write_text("[" * 100_000),
        "list manifest": lambda: manifest.write_text("[1]"),
        "missing file": weights.unlink,
        "short file": lambda: weights.write_bytes(b"1"),
        "folder": lambda: (weights.unlink(), weights.mkdir()),
        "moved": lambda: checkpoint.rename(checkpoint.with_name("elsewhere")),
    }[kind]()


DAMAGES = (
    *("missing manifest", "corrupt manifest", "binary manifest", "deep manifest", "list manifest"),
    *("missing file", "short file", "folder"),
)


@pytest.fixture
def spaced(tmp_path: Path) -> Path:
    """A folder whose name a shell splits into words."""
    (tmp_path / "a b").mkdir()
    return tmp_path / "a b"


@pytest.mark.parametrize("kind", DAMAGES)
def test_printed_remedy_of_a_damaged_checkpoint_works(spaced: Path, kind: str) -> None:
    first = start(config(spaced), PROMPTS)
    saved = [save(first, config(spaced), step) for step in (1, 2, 3)]
    damage(kind, saved[2])
    damage("short file", saved[1])
    with pytest.raises(UserError, match="Fix: resume from the previous checkpoint with ") as error:
        start(config(spaced, "resume=auto"), PROMPTS)
    [override] = shlex.split(str(error.value).rpartition(" with ")[2])
    settings = config(spaced, override)
    assert check_beginning(settings) is None
    assert _find_folder(settings).path == spaced / "a"
    again = start(settings, PROMPTS)
    assert (again.checkpoint.path, again.folder.moved) == (saved[0], None)
    assert names(again.folder.checkpoints) == ["latest", "step_000001"]


def test_remedy_without_an_earlier_checkpoint_works(root: Path) -> None:
    first = start(config(root), PROMPTS)
    damage("short file", save(first, config(root), 1))
    with pytest.raises(UserError, match=r"No earlier checkpoint exists\. Fix: start from scratch with ") as error:
        start(config(root, "resume=auto"), PROMPTS)
    settings = config(root, *shlex.split(str(error.value).rpartition(" with ")[2]))
    assert check_beginning(settings) is None and _find_folder(settings).path == root / "a"
    assert start(settings, PROMPTS).folder.moved == root / "a.1"


def test_previous_checkpoint_replaces_a_moved_newest_one(root: Path, capsys) -> None:
    first = start(config(root), PROMPTS)
    saved = [save(first, config(root), step) for step in (1, 2)]
    damage("moved", saved[1])
    assert start(config(root, "resume=auto"), PROMPTS).checkpoint.path == saved[0]
    assert (
        f"{saved[1]}: the newest checkpoint was moved or removed. Resuming from {saved[0]}\n" in capsys.readouterr().out
    )


@pytest.mark.parametrize(("kind", "is_launched"), each_value([*DAMAGES, "moved"], [True, False]))
def test_job_falls_back_to_the_last_intact_checkpoint(
    root: Path, kind: str, is_launched: bool, monkeypatch, capsys
) -> None:
    first = start(config(root), PROMPTS)
    saved = [save(first, config(root), step) for step in (1, 2, 3)]
    if is_launched:
        (root / "a" / "launch").mkdir()
    else:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    Checkpoints(saved[0].parent).point_to_best(3)
    damage(kind, saved[2])
    damage("short file", saved[1])
    settings = config(root, "resume=auto")
    again = start(settings, PROMPTS)
    output = capsys.readouterr().out
    assert (again.checkpoint.path, again.state.step) == (saved[0], 1)
    assert f"{saved[0]}" in output and ("last intact checkpoint" in output or kind == "moved")
    assert save(again, settings, 2) == saved[1] and Checkpoints(saved[0].parent).latest() == saved[1]
    assert start(settings, PROMPTS).state.step == 2


def test_job_without_an_intact_checkpoint_ends(root: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first = start(config(root), PROMPTS)
    saved = [save(first, config(root), step) for step in (1, 2)]
    for path in saved:
        damage("short file", path)
    with pytest.raises(UserError, match="No earlier checkpoint exists"):
        start(config(root, "resume=auto"), PROMPTS)
    assert all(path.exists() for path in saved)


def test_job_sets_a_checkpoint_aside_whose_weights_are_corrupt(root: Path, monkeypatch) -> None:
    """A rank finds the damage after the run has started."""
    first = start(config(root), PROMPTS)
    saved = [save(first, config(root), step) for step in (1, 2)]
    settings = config(root, "resume=auto")
    (saved[1] / "weights").write_bytes(b"damaged!")
    checkpoint = start(settings, PROMPTS).checkpoint
    with pytest.raises(DamagedCheckpoint, match="weights is corrupt: its SHA-256") as damage:
        checkpoint.verify(checkpoint.files)
    assert fall_back(settings, checkpoint.path, damage.value) is None, "it is not a job"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    line = fall_back(settings, checkpoint.path, damage.value)
    assert line.startswith(f"{saved[1]}: weights is corrupt: its SHA-256 is")
    assert line.endswith(f"moved it to {saved[1]}.damaged and resumes from the last intact checkpoint {saved[0]}")
    assert start(settings, PROMPTS).checkpoint.path == saved[0]


@pytest.mark.parametrize("text", ["", "/etc", "../../b/checkpoints/step_000001", "step_1", "\ufffd"])
def test_pointer_to_anything_but_a_checkpoint_raises(root: Path, text: str) -> None:
    first = start(config(root), PROMPTS)
    saved = save(first, config(root), 1)
    (saved.parent / "latest").write_text(text)
    with pytest.raises(
        UserError, match=r"latest: '.*' is not the name of a checkpoint. Fix: .* such as step_000001$"
    ) as e:
        start(config(root, "resume=auto"), PROMPTS)
    (saved.parent / "latest").write_text(str(e.value).split()[-1])
    assert start(config(root, "resume=auto"), PROMPTS).state.step == 1


def test_manifest_that_lists_files_outside_the_folder_is_corrupt(root: Path) -> None:
    first = start(config(root), PROMPTS)
    saved = save(first, config(root), 1)
    content = json.loads((saved / "manifest.json").read_text())["content"]
    for path in (str(saved / "weights"), "../step_000001/weights"):
        records = [FileRecord(path, 8, content["files"][0]["sha256"])]
        write_manifest(saved, 1, content["state"], records)
        with pytest.raises(UserError, match=r"does not describe a file in the folder"):
            start(config(root, f"resume={saved}"), PROMPTS)


def test_allowed_changes_are_recorded_with_their_step(root: Path) -> None:
    """Changes stay in the manifest of later attempts. A run that goes back before a change loses it."""
    first = start(config(root), PROMPTS)
    save(first, config(root), 2)
    rate = ("resume=auto", "actor.optimizer.lr=0.5")
    with pytest.raises(UserError, match=r"allow the change with --allow-changes actor\.optimizer\.lr, or start a new"):
        start(config(root, *rate), PROMPTS)
    settings = config(root, *rate, "run.allow_changes=[actor.optimizer.lr]")
    second = start(settings, PROMPTS)
    change = {"after_step": 2, "key": "actor.optimizer.lr", "from": 1e-6, "to": 0.5}
    assert json.loads(second.folder.manifest.read_text())["changes"] == [change]
    assert "\nactor.optimizer.lr changed from 1.0e-06 to 0.5 (run.allow_changes)" in second.describe()
    again = start(settings, PROMPTS)  # killed before it saved a checkpoint
    assert json.loads(again.folder.manifest.read_text())["changes"] == [change]
    save(again, settings, 4)
    third = start(config(root, *rate, "actor.optimizer.weight_decay=0.1", "run.allow_changes=[actor]"), PROMPTS)
    decay = {"after_step": 4, "key": "actor.optimizer.weight_decay", "from": 0.0, "to": 0.1}
    assert json.loads(third.folder.manifest.read_text())["changes"] == [change, decay]
    back = start(config(root, f"resume={root}/a/checkpoints/step_000002"), PROMPTS)
    assert json.loads(back.folder.manifest.read_text())["changes"] == []


def test_changes_of_a_run_from_another_checkpoint_are_recorded(root: Path) -> None:
    checkpoint = save(start(config(root), PROMPTS), config(root), 2)
    settings = config(
        root, f"resume={checkpoint}", "run.name=b", "rollout.temperature=0.5", "run.allow_changes=[rollout]"
    )
    for attempt in (1, 2):  # the first is killed before its first step
        manifest = json.loads(start(settings, PROMPTS).folder.manifest.read_text())
        assert manifest["attempt"] == attempt
        assert manifest["changes"] == [{"after_step": 2, "key": "rollout.temperature", "from": 1.0, "to": 0.5}]
