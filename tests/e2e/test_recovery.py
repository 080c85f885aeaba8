"""A run whose trainer ranks are killed continues with new ranks, and ends bitwise equal to an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.gated import KEYS, STEPS, Recipe
from tests.e2e.run import Run
from tests.e2e.test_resume import metrics
from tests.metrics import MEASURED
from tests.timing import LIMIT_S, START_S

pytestmark = [pytest.mark.slow, pytest.mark.one_part]
VARYING = (*MEASURED, "recovery/")
REPLACED = re.compile(
    r"recovery: replaced the ranks in [0-9.]+ s and restored their (?:initial state|state after step \d+)"
)


@pytest.fixture(scope="module")
def recipe(gated: Recipe) -> Path:
    return gated.file


def finish(run: Run) -> Path:
    """Wait for the end of a run, and check that it leaves nothing behind. Return the run folder."""
    assert run.end(START_S) == 0, run.errors
    assert not run.left_shared_memory()
    assert not run.left_files()
    return run.folder


def assert_equal(run: Path, expected: Path, varying: tuple[str, ...] = VARYING) -> None:
    """Check that both runs have the same metrics, samples and trained model, bit for bit."""
    assert metrics(run, varying) == metrics(expected, varying)
    for file in sorted((expected / "rollouts").iterdir()):
        assert (run / "rollouts" / file.name).read_text() == file.read_text()
    [weights] = expected.glob("model/*.safetensors")
    assert (run / "model" / weights.name).read_bytes() == weights.read_bytes()


def engines(run: Run) -> set[int]:
    return {process.pid for process in run.find_all("ray::EngineActor")}


def ranks(run: Run) -> list[psutil.Process]:
    """Return the trainer ranks that have been launched, in any order."""
    return run.find_all("ray::TrainerActor")


def both_of(ranks: set[int]) -> set[int]:
    """Return both ranks, or an empty set if one is missing."""
    return ranks if len(ranks) == 2 else set()


def kill_a_rank(run: Run, step: int, generator: random.Random) -> None:
    """Kill a rank at some time after `step`, and wait until the ranks have been replaced."""
    num_replaced = len(REPLACED.findall(run.output))
    run.wait_for_step(step)
    time.sleep(generator.uniform(0, 0.3))
    generator.choice(run.wait_until(lambda: ranks(run))).kill()
    run.wait_until(lambda: len(REPLACED.findall(run.output)) > num_replaced)


def run_with_kills(recipe: Path, folder: Path, steps: tuple[int, ...], *keys: str) -> tuple[Path, str]:
    """Kill a rank after each of these steps. Return the run's folder and its output."""
    generator = random.Random(7)
    with Run(recipe, folder, *KEYS, f"run.steps={STEPS}", *keys) as run:
        run.wait_until(lambda: "refit: first refit" in run.output)
        before = engines(run)
        for step in steps:
            kill_a_rank(run, step, generator)
        assert engines(run) == before
        return finish(run), run.output


def test_killed_ranks_are_replaced(recipe: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """Ranks are killed after steps 2 and 8, but their state is copied only after steps 1, 5 and 10."""
    folder, output = run_with_kills(recipe, tmp_path, (2, 8), "cluster.copy_every_steps=5")
    assert "recovery: trained step 2 again in " in output
    assert "recovery: trained step 6 again in " in output
    assert_equal(folder, uninterrupted)
    counts = [row["recovery/replacements"] for row in metrics(folder, ()) if "recovery/replacements" in row]
    assert sum(counts) == 2


@pytest.mark.exhaustive
def test_ranks_lost_while_engines_sleep_are_replaced(recipe: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """Engines release their memory while ranks train."""
    keys = ("rollout.sleep=true", "cluster.copy_every_steps=5")
    folder, output = run_with_kills(recipe, tmp_path, (2, 5, 8), *keys)
    assert "recovery: trained step 2 again in " in output
    assert_equal(folder, uninterrupted)


def spares(run: Run, *generations: int) -> list[int]:
    """Wait until the spare of each rank is ready. Return their process ids. generations: the number of spares that each
    rank has had."""
    logs = [run.folder / f"logs/attempt_1/spare-trainer-{rank}.log" for rank in range(len(generations))]

    def are_ready() -> bool:
        texts = [log.read_text() if log.exists() else "" for log in logs]
        return tuple(text.count("ready to become a rank") for text in texts) == generations

    run.wait_until(are_ready)
    return [run.named(f"spare-trainer-{rank}").pid for rank in range(len(generations))]


@pytest.mark.exhaustive
def test_spares_become_the_ranks(recipe: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """The run is held while spares start. One of the second spares dies, and is replaced."""
    hold = recipe.with_name("hold")
    with Run(recipe, tmp_path, *KEYS, f"run.steps={STEPS}", "cluster.spare_processes=true") as run:
        run.wait_for_step(1)
        hold.touch()
        found = spares(run, 1, 1)
        replace_ranks(run, hold)
        assert [run.named(f"trainer-{rank}").pid for rank in range(2)] == found
        run.wait_for_step(4)
        hold.touch()
        dead, alive = spares(run, 2, 2)
        psutil.Process(dead).kill()
        hold.unlink()
        run.wait_until(lambda: "the spare process of trainer-0 failed" in run.output)
        hold.touch()
        found = spares(run, 3, 2)
        assert found[1] == alive
        replace_ranks(run, hold)
        assert [run.named(f"trainer-{rank}").pid for rank in range(2)] == found
        folder = finish(run)
    assert_equal(folder, uninterrupted)


def replace_ranks(run: Run, hold: Path) -> None:
    """Kill a rank of a run that is held, release the run, and wait until the ranks have been replaced."""
    num_replaced = len(REPLACED.findall(run.output))
    run.named("trainer-1").kill()
    hold.unlink()
    run.wait_until(lambda: len(REPLACED.findall(run.output)) > num_replaced)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_twenty_kills_do_not_change_a_run(recipe: Path, tmp_path: Path) -> None:
    keys = (*KEYS, "actor.layout={pp: 2, dp: 2}", "rollout.replicas=2", "run.steps=64")  # a busy test may kill late
    (tmp_path / "expected").mkdir()
    with Run(recipe, tmp_path / "expected", *keys) as run:
        expected = finish(run)
    generator = random.Random(11)
    with Run(recipe, tmp_path, *keys) as run:
        run.wait_until(lambda: "refit: first refit" in run.output)
        before = engines(run)
        for number in range(20):
            kill_a_rank(run, 2 * number, generator)
        assert engines(run) == before and len(before) == 2
        folder = finish(run)
    assert_equal(folder, expected)


@pytest.mark.exhaustive
def test_losses_during_a_replacement_are_replaced(recipe: Path, uninterrupted: Path, tmp_path: Path) -> None:
    with Run(recipe, tmp_path, *KEYS, f"run.steps={STEPS}") as run:
        run.wait_for_step(4)
        known: set[int] = set()
        for number in range(3):
            # Both ranks must exist; else, the next loss could be that of the other one, in the same replacement.
            new = run.wait_until(lambda known=known: both_of({rank.pid for rank in ranks(run)} - known))
            known |= new
            os.kill(min(new), signal.SIGKILL)
            run.wait_until(lambda number=number: run.output.count("replacing all ranks") == number + 1)
        folder = finish(run)
    assert_equal(folder, uninterrupted)
    assert sum(row.get("recovery/replacements", 0) for row in metrics(folder, ())) == 3


@pytest.mark.exhaustive
def test_suspended_rank_is_replaced(recipe: Path, uninterrupted: Path, tmp_path: Path) -> None:
    with Run(recipe, tmp_path, *KEYS, f"run.steps={STEPS}", f"cluster.timeouts.update={LIMIT_S}") as run:
        run.wait_for_step(3)
        suspended = run.suspend("ray::TrainerActor.update")
        folder = finish(run)
    assert not suspended.is_running()
    assert_equal(folder, uninterrupted)
    assert f"no response from trainer-0, trainer-1 within {LIMIT_S} s" in run.output


@pytest.mark.exhaustive
def test_ranks_lost_in_evaluation_and_export_are_replaced(recipe: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """The first rank is killed while an evaluation waits for its rewards, and a later one during the export."""
    functions = tmp_path / "functions"
    functions.mkdir()
    (functions / "reward.py").write_text((recipe.parent / "reward.py").read_text())
    hold = functions / "hold"
    hold.touch()
    function, source = f"{functions}/reward.py:digit_share", recipe.parent / "prompts.jsonl"
    held = f"{{name: held, source: {source}, functions: [{{function: {function}}}]}}"
    evaluation = f"evaluation={{every_steps: {STEPS // 2}, at_start: false, sets: [{held}]}}"
    with Run(recipe, tmp_path, *KEYS, "checkpoint.every_steps=null", evaluation, f"run.steps={STEPS}") as run:
        run.wait_until_held(functions)
        ranks(run)[0].kill()
        hold.unlink()
        run.wait_until(lambda: REPLACED.search(run.output))
        hold.touch()
        run.wait_until_held(functions)
        suspended = ranks(run)[0]
        suspended.suspend()
        hold.unlink()
        run.wait_until((run.folder / ".model").exists)
        suspended.kill()
        folder = finish(run)
    assert_equal(folder, uninterrupted, (*VARYING, "evaluation/"))
    assert f"restored their state after step {STEPS // 2}\n" in run.output
    assert f"restored their state after step {STEPS}\n" in run.output


@pytest.mark.exhaustive
def test_engines_sample_ahead_during_a_replacement(recipe: Path, tmp_path: Path) -> None:
    """Each row is trained once, and no rollout is staler than allowed."""
    ahead = ("cluster.placement=disaggregated", "rollout.max_staleness=2", f"run.steps={STEPS}")
    generator = random.Random(13)
    with Run(recipe, tmp_path, *KEYS, *ahead) as run:
        run.wait_until(lambda: "refit: first refit" in run.output)
        before = engines(run)
        for step in (0, 3, 6, 9):
            kill_a_rank(run, step, generator)
        assert engines(run) == before
        folder = finish(run)
    names = []
    for step in range(1, STEPS + 1):
        rows = [json.loads(line) for line in (folder / f"rollouts/step_{step:06}.jsonl").read_text().splitlines()]
        names += [row["sample_id"] for row in rows]
        assert {run["version"] for row in rows for run in row["version"]} <= {*range(max(0, step - 3), step)}
        assert len(rows) == 16
    assert len(set(names)) == len(names) == 16 * STEPS


@pytest.mark.exhaustive
def test_fine_tuning_survives_a_killed_rank(recipe: Path, tmp_path: Path) -> None:
    turns = [
        [{"role": "user", "content": f"{i} + {i} ="}, {"role": "assistant", "content": str(2 * i)}] for i in range(8)
    ]
    data = tmp_path / "conversations.jsonl"
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    keys = (
        "algorithm.objective={name: sft, aggregation: token_mean}",
        f"data={{format: messages, source: {data}}}",
        "batch.samples_per_prompt=1",
        "rewards.functions=[]",
        "actor.optimizer.lr=0.01",
        "checkpoint.every_steps=3",
        "run.export=true",
        f"run.steps={STEPS}",
    )
    folders = []
    for name in ("uninterrupted", "killed"):
        (tmp_path / name).mkdir()
        with Run(recipe, tmp_path / name, *keys, vllm=True) as run:
            if name == "killed":
                run.wait_for_step(2)
                kill_a_rank(run, 2, random.Random(17))
            folders.append(finish(run))
    expected, found = folders
    assert metrics(found, VARYING) == metrics(expected, VARYING)
    [weights] = expected.glob("model/*.safetensors")
    assert (found / "model" / weights.name).read_bytes() == weights.read_bytes()
