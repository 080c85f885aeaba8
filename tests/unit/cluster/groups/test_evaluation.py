"""Evaluation sets are scored by their own functions, in processes separate from those of the training functions."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import GetTimeoutError, ObjectLostError

from megarl.cluster.groups import rewards
from megarl.cluster.groups.rewards import RewardWorker
from megarl.config.load import load
from megarl.core.completion import VersionRun
from megarl.core.episode import Episode, RolloutInfo
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.models.run_models import ModelFolders
from megarl.rewards.prompt_thumbnails import MAX_SECONDS
from tests.paths import QUICKSTART
from tests.prompt_image_run import decode, encoded, prompt
from tests.unit.cluster.groups.test_rewards import sample

FUNCTIONS = """
calls = 0

def counting(prompt, response, answer):
    global calls
    calls += 1
    return calls

def length(prompt, response, answer):
    if response == "odd":
        raise KeyError(response)
    return len(response)

def rank(prompts, responses, answers):
    return [sorted(responses).index(response) for response in responses]
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rewards.ray, "get", lambda refs: refs)
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    own = [{"function": f"{file}:length", "weight": 2.0}, {"function": f"{file}:rank"}]
    world = {"class": "world.py:World"}
    sets = [
        {"name": "runs"},
        {"name": "own", "functions": own},
        {"name": "played", "functions": own[:1], "environment": world},
        {"name": "alone", "functions": [], "environment": world},
    ]
    keys = [
        "environment.weight=0.5",
        f"rewards.functions=[{{function: '{file}:counting'}}]",
        f"evaluation.sets={json.dumps(sets)}",
        "run.token_samples=0",
    ]
    worker = RewardWorker(load(QUICKSTART, keys), ModelFolders(Path(), None, None, None), num_processes=1)
    yield worker
    worker.close()


def test_evaluation_does_not_affect_stateful_functions(worker, tmp_path: Path) -> None:
    samples = [sample("0.0", "a"), sample("0.1", "b")]

    async def step() -> list[list[float]]:
        before, _ = await worker.score(samples, {}, 1, tmp_path / "rollouts.jsonl")
        evaluated = await worker.evaluate(samples, "runs", 1, tmp_path / "evaluations" / "runs.jsonl")
        after, _ = await worker.score(samples, {}, 2, tmp_path / "rollouts.jsonl")
        return [[score.value for score in scores] for scores in (before, evaluated, after)]

    assert asyncio.run(step()) == [[1, 2], [1, 2], [3, 4]]


def test_images_of_prompts_have_thumbnails(worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step files and evaluation files both refer to the thumbnails."""
    monkeypatch.setitem(vars(worker), "_decoder", decode)
    item = prompt("prompt 0", "see ", encoded((200, 10, 30)), "?")
    samples = [replace(sample("1.0.0", "one"), prompt=item)]
    files = [tmp_path / folder / "step_000001.jsonl" for folder in ("rollouts", "evaluations")]
    files[0].parent.mkdir()

    async def score() -> None:
        await worker.score(samples, {}, 1, files[0])
        await worker.evaluate(samples, "runs", 1, files[1])

    asyncio.run(score())
    for file in files:
        [image] = json.loads(file.read_text())["prompt_images"]
        assert image["start"] == len("see ") and (file.parent / image["thumbnail"]).is_file()


def test_unavailable_images_are_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost image is skipped. The first timeout ends the requests."""
    names = ("stored", "lost", "late", "last")
    refs = {name: rewards.ray.ObjectRef.from_random() for name in names}
    failures = {refs["lost"]: ObjectLostError(refs["lost"].hex(), None, ""), refs["late"]: GetTimeoutError("late")}
    requested = []

    def get(ref, *, timeout: float) -> bytes:
        assert 0 <= timeout <= MAX_SECONDS
        requested.append(ref)
        if ref in failures:
            raise failures[ref]
        return b"file"

    monkeypatch.setattr(rewards.ray, "get", get)
    images = [PromptImage(0, 1, (1, 2, 2), name, refs[name]) for name in names]
    images.insert(0, PromptImage(0, 1, (1, 2, 2), "local", b"bytes"))
    files = [(image.digest, file) for image, file in rewards._fetch_images(images)]
    assert files == [("local", b"bytes"), ("stored", b"file")]
    assert requested == [refs[name] for name in names[:3]]


def test_set_uses_its_functions_and_reports_failures(worker, tmp_path: Path) -> None:
    samples, file = [sample("own.0.0", "bbb"), sample("own.0.1", "odd"), sample("own.0.2", "a")], tmp_path / "own.jsonl"

    async def evaluate_twice() -> list:
        await worker.evaluate(samples, "own", 3, file)  # a run that is killed after this call evaluates again
        return await worker.evaluate(samples, "own", 3, file)

    scores = asyncio.run(evaluate_twice())
    assert [score.value for score in scores] == [2 * 3 + 1, None, 2 * 1 + 0]
    assert "raised KeyError: 'odd' on sample own.0.1" in scores[1].failure
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["sample_id"], row["step"], row["reward"]) for row in rows] == [
        ("own.0.0", 3, 7.0),
        ("own.0.1", 3, None),
        ("own.0.2", 3, 2.0),
    ]


def part(name: str, text: str, rewards: tuple[float, ...], failure: str | None = None, is_last: bool = True) -> Sample:
    """Return a sample of a rollout in an environment, with one token per turn and one turn per reward."""
    n = len(rewards)
    info = RolloutInfo("failed" if failure else "done", n, 1, {}, 0, 0)
    episode = Episode(info, rewards, {}, failure, ({"role": "user", "content": "go"},), 0, is_last)
    prompt = sample("0", "").prompt
    ids, logprobs, mask = [7, 8] * n, [-1.0] * 2 * n, [True, False] * n
    rollout = name.partition("/")[0]
    return Sample(
        name, prompt, ids, logprobs, mask, (VersionRun(0, 2 * n),), "stop", text, rollout_id=rollout, episode=episode
    )


def test_rollouts_combine_environment_and_function_rewards(worker, tmp_path: Path) -> None:
    file = tmp_path / "played.jsonl"
    samples = [
        part("0.0", "bbb", (1.0, 3.0)),
        part("0.0/1", "odd", (1.0, 3.0), is_last=False),  # from another agent; the function would fail on it
        part("0.1", "bbb", (1.0,), failure="step raised KeyError"),
        part("0.2", "odd", (1.0,)),
    ]

    async def evaluate_both() -> list:
        return [await worker.evaluate(samples, name, 3, file) for name in ("alone", "played")]

    alone, played = asyncio.run(evaluate_both())
    assert [score.value for score in alone] == [0.5 * 4, 0.5 * 4, None, 0.5]
    assert [score.value for score in played] == [0.5 * 4 + 2 * 3, 0.5 * 4 + 2 * 3, None, None]
    assert alone[2].failure == played[2].failure == "environment: step raised KeyError"
    assert "raised KeyError: 'odd' on sample 0.2" in played[3].failure
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["rollout_id"], row["turn_rewards"], row["mask"]) for row in rows[:2]] == [
        ("0.0", [1.0, 3.0], [1, 1, 1, 1])
    ] * 2
    assert rows[0]["messages"] == [{"role": "user", "content": "go"}]
