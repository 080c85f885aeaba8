"""A run that is interrupted or killed repeatedly, and resumed each time, ends bitwise equal to an uninterrupted one."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import pytest

from megarl.cluster.supervision.scratch import memory_folder
from megarl.core.checkpoint import Checkpoint
from megarl.run.audit.audit import audit
from megarl.run.checkpoints import Checkpoints
from tests.e2e.gated import STEPS, Recipe
from tests.e2e.run import Run
from tests.e2e.test_faults import INTERRUPTED, check_end
from tests.e2e.test_signals import check_saved
from tests.metrics import MEASURED
from tests.timing import START_S

pytestmark = [pytest.mark.slow, pytest.mark.one_part]
NUM_TRIALS = 2
"""Number of wrong responses that a run scores before it starts; see megarl.environments.trial."""

DIGITS = Path(__file__).with_name("digits.py")
EVALUATION = (
    f"evaluation.sets=[{{name: a, size: 3, functions: [{{function: {DIGITS}:digit_share}}]}}]",
    "evaluation.every_steps=2",
    "evaluation.best.metric=evaluation/a/avg@1",
)
"""Keys of the interrupted runs only, because evaluation must not affect training."""


def kill(run: Run) -> None:
    """Kill all processes at once and delete their scratch folders, as if the machine had failed."""
    scratch = run.scratch()
    for process in run.processes():
        process.kill()
    assert run.end() != 0
    for folder in (scratch, memory_folder(scratch)):
        shutil.rmtree(folder, ignore_errors=True)


def forget_rewards(run: Path) -> None:
    """Remove the rewards of finished rollouts, because the gate counts the calls of the reward function."""
    for file in run.glob("finished_rollouts/*/[0-9]*.json"):
        file.unlink()


def latest(folder: Path) -> int:
    """Return the step of the latest checkpoint, 0 if there is none."""
    path = Checkpoints(folder / "tiny" / "checkpoints").latest()
    return int(path.name.removeprefix("step_")) if path else 0


def assert_loadable(folder: Path) -> None:
    checkpoint = Checkpoint.open(Checkpoints(folder / "tiny" / "checkpoints").latest())
    checkpoint.verify(checkpoint.files)


@pytest.fixture(scope="module", params=[3, pytest.param(5, marks=pytest.mark.exhaustive)])
def attempts(request: pytest.FixtureRequest) -> int:
    """The number of attempts of the resumed run. With five, the third is killed when the rollouts of the last step have
    finished, and the fourth after the last step."""
    return request.param


@pytest.fixture(scope="module")
def resumed(gated: Recipe, attempts: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumed")
    at_once = "checkpoint.background=false"
    with gated.run(folder, 0, *EVALUATION, "checkpoint.on_signal=true", "checkpoint.grace_s=100") as run:
        run.wait_until_held(gated.folder)
        check_end(run, lambda: gated.interrupt_in_a_step(run), 130, INTERRUPTED)  # in the middle of an epoch
    check_saved(run, step=1)
    with gated.run(folder, 6, *EVALUATION) as run:  # killed at a random time, mostly during a save
        run.wait_until(lambda: latest(folder) > 4)
        time.sleep(random.uniform(0, 1))
        kill(run)
    assert_loadable(folder)
    reached = latest(folder)
    assert 5 <= reached <= 7
    forget_rewards(folder / "tiny")
    if attempts == 5:
        folder_of_finished = folder / "tiny" / "finished_rollouts" / f"after_{STEPS - 1:06d}"
        with gated.run(folder, STEPS - 1 - reached, *EVALUATION, at_once) as run:
            run.wait_until(lambda: latest(folder) == STEPS - 1)
            run.wait_until_held(gated.folder)
            run.wait_until(lambda: len(list(folder_of_finished.glob("[0-9]*.safetensors"))) == 4)
            assert f"resuming after step {reached} " in run.output
            kill(run)
        reached = STEPS - 1
        finished = sorted(folder_of_finished.glob("[0-9]*.safetensors"))
        assert [file.name.partition("-")[0] for file in finished] == [f"{STEPS}.{i}" for i in range(4)]
        forget_rewards(folder / "tiny")
        finished[1].unlink()  # as if this prompt's rollouts had not finished
        with gated.run(folder, STEPS - reached, *EVALUATION, at_once) as run:
            run.wait_until(lambda: latest(folder) == STEPS)
            assert f"resuming after step {reached} " in run.output
            assert "3 prompts have finished rollouts" in run.output
            kill(run)  # kill it after the last step, because this run has no step limit
        reached = STEPS
    run = gated.finish(folder, *EVALUATION, at_once)
    assert f"resuming after step {reached} " in run.output
    return folder / "tiny"


def metrics(run: Path, left_out: tuple[str, ...] = (*MEASURED, "evaluation/")) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(left_out)} for line in lines]


def test_resumed_metrics_are_equal(uninterrupted: Path, resumed: Path) -> None:
    assert [line["step"] for line in metrics(resumed)] == list(range(STEPS + 1))
    assert metrics(resumed)[0] == {"step": 0}, "step 0 is an evaluation only"
    assert metrics(resumed)[1:] == metrics(uninterrupted)


@pytest.mark.exhaustive
@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_rollouts_of_undone_steps_are_used(gated, uninterrupted, tmp_path, has_checkpoint: bool) -> None:
    """A run that is killed in its third step, or in the third step after its first checkpoint, repeats the training but
    neither samples nor scores finished groups again."""
    step, every_steps = (5, "checkpoint.every_steps=3") if has_checkpoint else (2, "checkpoint.every_steps=100")
    resumed = 3 if has_checkpoint else 0
    with gated.run(tmp_path, step, every_steps) as run:
        run.wait_for_step(step)
        run.wait_until_held(gated.folder)
        finished = tmp_path / "tiny/finished_rollouts" / f"after_{resumed:06d}"
        run.wait_until(lambda: len(list(finished.glob("[0-9]*.safetensors"))) == 12)
        assert latest(tmp_path) == resumed
        kill(run)
    recorded = len(list(finished.glob("[0-9]*.json")))
    assert 8 <= recorded < 12, "only groups whose rewards are complete have recorded rewards"
    calls = gated.folder / "calls"
    calls.unlink(missing_ok=True)
    run = gated.finish(tmp_path, every_steps)
    assert (f"resuming after step {resumed} " if resumed else "starting at the first step") in run.output
    assert run.output.count("rollouts: 4 prompts have finished rollouts") == 3
    assert calls.stat().st_size == NUM_TRIALS + 16 * (STEPS - resumed) - 4 * recorded
    folder = tmp_path / "tiny"
    for number in range(1, STEPS + 1):
        name = f"step_{number:06d}.jsonl"
        assert (folder / "rollouts" / name).read_text() == (uninterrupted / "rollouts" / name).read_text()
    [weights] = uninterrupted.glob("model/*.safetensors")
    assert (folder / "model" / weights.name).read_bytes() == weights.read_bytes()


def test_every_evaluation_is_recorded_once(resumed: Path) -> None:
    values = {
        line["step"]: line["evaluation/a/avg@1"]
        for line in metrics(resumed, MEASURED)
        if len(line) > 1 and "evaluation/a/avg@1" in line
    }
    assert list(values) == [*range(0, STEPS + 1, 2)]
    for step, value in values.items():
        rows = (resumed / f"evaluations/a/step_{step:06d}.jsonl").read_text().splitlines()
        assert sum(json.loads(row)["reward"] for row in rows) / 3 == pytest.approx(value)


def test_resumed_samples_are_equal(uninterrupted: Path, resumed: Path) -> None:
    names = [f"step_{step:06d}.jsonl" for step in range(1, STEPS + 1)]
    assert sorted(file.name for file in (resumed / "rollouts").iterdir()) == names
    for name in names:
        assert (resumed / "rollouts" / name).read_text() == (uninterrupted / "rollouts" / name).read_text()


def test_resumed_weights_and_optimizer_are_equal(uninterrupted: Path, resumed: Path) -> None:
    [weights] = uninterrupted.glob("model/*.safetensors")
    assert (resumed / "model" / weights.name).read_bytes() == weights.read_bytes()
    ours, theirs = (Checkpoint.open(run / "checkpoints" / f"step_{STEPS:06d}") for run in (resumed, uninterrupted))
    data = {record.path: record.sha256 for record in theirs.files if record.path.endswith(".distcp")}
    assert len(data) == 2
    assert {record.path: record.sha256 for record in ours.files if record.path in data} == data


def test_run_folder_has_attempts_and_checkpoints(attempts: int, resumed: Path) -> None:
    assert not (resumed / "finished_rollouts").exists(), "a finished run needs them no more"
    assert [path.name for path in resumed.parent.glob("tiny*")] == ["tiny"]
    assert {path.name for path in (resumed / "logs").iterdir()} == {f"attempt_{n}" for n in range(1, attempts + 1)}
    names = {path.name for path in (resumed / "checkpoints").iterdir()}
    values = {line["step"]: line.get("evaluation/a/avg@1", -1.0) for line in metrics(resumed, MEASURED)[1:]}
    best = f"step_{max(values, key=values.get):06d}"
    assert (resumed / "checkpoints" / "best").read_text() == f"{best}\n"
    assert names == {"latest", "best", best, f"step_{STEPS - 1:06d}", f"step_{STEPS:06d}"}


def test_audit_accepts_the_run_and_refuses_an_edit(attempts: int, resumed: Path, uninterrupted: Path, tmp_path) -> None:
    is_proven, lines = audit(resumed, reads_all=True)
    proof = "\n".join(lines)
    assert is_proven, proof
    rollouts, sets = f"{STEPS} of {STEPS} rollout files", f"{STEPS // 2 + 1} of {STEPS // 2 + 1} evaluations"
    for line in (
        f"steps        {STEPS} (1 to {STEPS}, finished). Restarts: {attempts - 1}, undone steps: ",
        f"rows         {4 * STEPS} draws from 8 rows, in the order of the data's epochs; {4 * STEPS} trained on, each ",
        f"turns        {4 * STEPS} groups with {16 * STEPS} rollouts, {16 * STEPS} turns and ",
        f"weights      engines confirmed the trainer's checksums after {STEPS} of {STEPS} updates ",
        f"; {attempts - 1} of {attempts - 1} restarts began with the checksums of their step",
        f"{STEPS} of {STEPS} steps, {rollouts} compared ({4 * STEPS} groups), {sets}",
    ):
        assert line in proof
    ours, theirs = (last_weights(run) for run in (resumed, uninterrupted))
    assert ours == theirs, "equal weights must have equal checksums"
    shutil.copytree(resumed, tmp_path / "edited", ignore=shutil.ignore_patterns("checkpoints", "logs"))
    ledger = tmp_path / "edited" / "samples.jsonl"
    rows = ledger.read_text().splitlines(keepends=True)
    number = next(i for i, row in enumerate(rows) if '"kind": "step", "step": 3' in row)
    rows[number] = rows[number].replace('"oldest": [2', '"oldest": [1')
    ledger.write_text("".join(rows))
    is_proven, [line] = audit(tmp_path / "edited")
    assert not is_proven and line.startswith(f"{ledger} line {number + 1}: expected the hash ")


def last_weights(run: Path) -> dict[str, object]:
    rows = [json.loads(row) for row in (run / "samples.jsonl").read_text().splitlines()]
    return [row["weights"] for row in rows if row["kind"] == "step"][-1]


def test_finished_run_starts_no_attempt(gated: Recipe, resumed: Path) -> None:
    attempts = sorted((resumed / "logs").iterdir())
    run = gated.finish(resumed.parent)
    assert (
        run.output
        == f"{resumed}: the run has already finished step {STEPS} of {STEPS}. Increase run.steps to continue it\n"
    )
    assert sorted((resumed / "logs").iterdir()) == attempts


def test_metrics_report_cost_of_checkpoints(uninterrupted: Path) -> None:
    lines = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert all(line["time/checkpoint"] > 0 for line in lines)
    [size] = {line["checkpoint/bytes"] for line in lines if "checkpoint/bytes" in line}
    checkpoint = uninterrupted / "checkpoints" / f"step_{STEPS:06d}" / "actor"
    assert size == pytest.approx(sum(file.stat().st_size for file in checkpoint.iterdir()), rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize("attempts", [3], indirect=True)
def test_damaged_checkpoint_is_rejected_by_name(gated, resumed, tmp_path) -> None:
    """A rank detects a flipped bit. tests/unit/run/test_checkpoints.py covers other damage."""
    shutil.copytree(resumed, tmp_path / "tiny")
    folder = tmp_path / "tiny" / "checkpoints"
    flip_a_bit(folder / f"step_{STEPS:06d}" / "actor" / "__1_0.distcp")
    with gated.run(tmp_path, STEPS, f"run.steps={STEPS + 1}") as run:
        assert run.end(START_S) == 2
    [line] = run.errors
    problem = "actor/__1_0.distcp is corrupt: its SHA-256 is"
    assert line.startswith(f"megarl: error: {folder}/step_{STEPS:06d}: {problem}")
    assert line.endswith(f"Fix: resume from the previous checkpoint with resume={folder}/step_{STEPS - 1:06d}")


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
