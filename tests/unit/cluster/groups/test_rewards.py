"""The reward process scores each sample once, while others are sampled, and reports a failure where a function returns
no score."""

from __future__ import annotations

import ast
import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray

from megarl.cluster.groups import rewards
from megarl.cluster.groups.rewards import RewardWorker
from megarl.config.load import load
from megarl.core.completion import CandidateIds, VersionRun
from megarl.core.episode import Episode, RolloutInfo
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample, SampleRef
from megarl.models.run_models import ModelFolders
from megarl.rewards.finished_files import GroupFile, write_group
from megarl.rewards.reading import Unreadable
from tests.paths import QUICKSTART
from tests.timing import LIMIT_S, POLL_S, WAIT_S

FUNCTIONS = """
import os, time

def score(prompt, response, answer, bonus=0):
    with open(__file__ + ".calls", "a") as file:
        file.write(ascii(response) + "\\n")
    if response == "hang":
        time.sleep(3600)
    return len(response) / 10 + bonus

def judge(prompt, first, second, answer, *, row=None):
    if row:
        return first == row["favourite"]
    return 0.75 if len(first) > len(second) else 0.25
"""

TIMEOUT = f"rewards.timeout_s={LIMIT_S}"


def sample(name: str, text: str) -> Sample:
    prompt = Prompt(f"prompt {name[0]}", "?", [5], answer=None)
    return Sample(name, prompt, [7], [-1.0], [True], (VersionRun(0, 1),), "stop", text)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("functions") / "rewards.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture(scope="module")
def worker(file) -> Iterator[RewardWorker]:
    functions = f"rewards.functions=[{{function: '{file}:score', weight: 2.0}}]"
    config = load(QUICKSTART, [functions, f"rewards.judge={file}:judge", TIMEOUT, "run.token_samples=0"])
    worker = RewardWorker(config, ModelFolders(Path(), None, None, None), num_processes=2)
    yield worker
    worker.close()


@pytest.fixture(autouse=True)
def store(monkeypatch) -> None:
    """Replace Ray's object store with one in which a sample is its own reference."""
    monkeypatch.setattr(rewards.ray, "get", lambda refs: refs)


@pytest.fixture
def calls(file) -> Iterator[Path]:
    calls = file.with_name("rewards.py.calls")
    calls.unlink(missing_ok=True)
    return calls


def called(calls: Path) -> list[str]:
    """Return the responses that have been scored."""
    return [ast.literal_eval(line) for line in calls.read_text().splitlines()] if calls.exists() else []


def test_samples_are_scored_once_and_during_rollout(worker, calls, tmp_path):
    samples = [sample("0.0", "one"), sample("0.1", "another"), sample("1.0", "x")]

    async def step():
        for item in samples[:2]:
            worker.begin(item)
        deadline = time.monotonic() + WAIT_S
        while len(called(calls)) < 2:  # the engine is still sampling the third
            assert time.monotonic() < deadline, "scoring must not wait until all samples are ready"
            await asyncio.sleep(POLL_S)
        return await worker.score(samples, {}, 3, tmp_path / "rollouts.jsonl")

    scores, by_token = asyncio.run(step())
    assert [score.parts[name] for score in scores for name in score.parts if name != "judge"] == [0.3, 0.7, 0.1]
    assert [score.value for score in scores[:2]] == [pytest.approx(0.6 + 0.25), pytest.approx(1.4 + 0.75)]
    assert by_token == {}
    assert sorted(called(calls)) == ["another", "one", "x"]
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [(row["step"], row["sample_id"], row["reward"]) for row in rows] == [
        (3, item.id, score.value) for item, score in zip(samples, scores, strict=True)
    ]


@pytest.mark.parametrize("is_kept", [True, False])
def test_restored_results_are_not_computed_again(worker, calls, tmp_path, monkeypatch, is_kept):
    monkeypatch.setattr(rewards, "put_samples", list)
    group = [replace(sample(f"{30 + is_kept}.0.{i}", "x" * i), prompt=sample("3", "").prompt) for i in range(8)]

    async def first():
        worker.begin_finished(tmp_path, 1)
        worker.receive(group)
        return await worker.score(group, {}, 30, tmp_path / "rollouts.jsonl")

    async def second():
        files = GroupFile.all_in(tmp_path)
        for results in () if is_kept else files[0].results:
            results.unlink()
        [restored] = await worker.load_finished(files)
        return await worker.score(restored, {}, 30, tmp_path / "rollouts.jsonl")

    expected = asyncio.run(first())
    assert len(called(calls)) == 8
    assert asyncio.run(second()) == expected
    assert len(called(calls)) == (8 if is_kept else 16)


def test_images_of_environments_are_restored(worker, calls, tmp_path, monkeypatch):
    """Files with finished groups contain the images, which exist nowhere else after a restart. Restored samples are not
    scored again."""
    monkeypatch.setattr(rewards, "put_samples", list)
    image = PromptImage(2, 1, (1, 2, 2), "digest")
    episode = Episode(RolloutInfo("done", 1, 1, {}, 0, 0), (None,), {}, None, (), 0, True)
    own = dict(prompt=sample("3", "").prompt, response_images=(image,), episode=episode)
    group = [replace(sample(f"34.0.{i}", "x" * i), **own) for i in range(8)]
    images = {item.id: [b"encoded"] for item in group}

    async def first():
        worker.begin_finished(tmp_path, 1)
        worker.receive(group, images)
        return await worker.score(group, {}, 34, tmp_path / "rollouts.jsonl")

    async def second():
        [restored] = await worker.load_finished(GroupFile.all_in(tmp_path))
        assert [found.file for item in restored for found in item.images] == [b"encoded"] * 8
        return await worker.score([item.without_files for item in restored], {}, 34, tmp_path / "rollouts.jsonl")

    assert asyncio.run(first()) == asyncio.run(second())
    assert len(called(calls)) == 8


def test_images_of_environments_are_saved_in_checkpoints(worker, tmp_path, monkeypatch):
    images = PromptImage(0, 1, (1, 2, 2), "a"), PromptImage(1, 1, (1, 2, 2), "b")
    item = replace(sample("3.0.0", "x"), prompt=Prompt("p", "", [5], images=images[:1]), response_images=images[1:])
    refs = [replace(SampleRef.of(item, item), image_files=(b"a", b"b"))]
    monkeypatch.setattr(rewards, "get_samples", lambda refs: [ref.sample for ref in refs])
    monkeypatch.setattr(rewards, "put_samples", list)
    worker.save_groups([(4, 3, refs)], tmp_path / "rollouts" / "waiting")
    [(_, _, [restored])] = worker.load_groups(tmp_path / "rollouts" / "waiting")
    assert restored == item.with_files([b"a", b"b"])


def test_samples_share_the_bytes_of_an_image(monkeypatch):
    """All images are fetched in one call."""
    stored = {ray.ObjectRef(bytes([i]) * 28): bytes([i]) * 4 for i in (1, 2)}
    calls = []
    monkeypatch.setattr(ray, "get", lambda refs: calls.append(refs) or [bytes(bytearray(stored[ref])) for ref in refs])
    monkeypatch.setattr(rewards, "get_samples", lambda refs: [ref.sample for ref in refs])
    a, b = stored
    images = PromptImage(0, 1, (1, 2, 2), "a"), PromptImage(1, 1, (1, 2, 2), "b")
    items = [replace(sample(f"3.{k}.0", "x"), prompt=Prompt("p", "", [5, 5], images=images)) for k in range(3)]
    refs = [replace(SampleRef.of(item, item), image_files=(a, b)) for item in items[:2]]
    *pictured, plain = rewards._with_own_images([*refs, SampleRef.of(items[2], items[2])])
    files = [[image.file for image in item.images] for item in pictured]
    assert files == [[b"\1" * 4, b"\2" * 4]] * 2 and plain == items[2]
    assert len(calls) == 1 and all(one is other for one, other in zip(*files, strict=True))


def test_reward_model_does_not_read_images_of_environments():
    item = replace(sample("3.0.0", "x"), response_images=(PromptImage(1, 1, (1, 2, 2), "a"),))
    unread = rewards._read(None, item)
    assert isinstance(unread, Unreadable) and "Fix: set reward_model.path=null" in str(unread)


def test_damaged_finished_group_is_skipped(worker, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rewards, "put_samples", list)
    for name in ("32.0", "32.1"):
        write_group(tmp_path, [replace(sample(f"{name}.0", "x"), prompt=sample("3", "").prompt)])
    damaged, intact = GroupFile.all_in(tmp_path)
    damaged.path.write_bytes(damaged.path.read_bytes()[:-1])
    [group] = asyncio.run(worker.load_finished([damaged, intact]))
    assert group[0].id == "32.1.0"
    warning = capsys.readouterr().out
    assert str(damaged.path) in warning and str(intact.path) not in warning


def test_group_is_restored_if_no_function_scores_single_samples(worker, tmp_path, monkeypatch):
    """Batch functions score it again."""
    monkeypatch.setattr(rewards, "put_samples", list)
    monkeypatch.setattr(worker, "_functions_for", lambda sample: [])
    write_group(tmp_path, [replace(sample("33.0.0", "x"), prompt=sample("3", "").prompt)])
    [group] = asyncio.run(worker.load_finished(GroupFile.all_in(tmp_path)))
    assert group[0].id == "33.0.0" and "33.0.0" not in worker._begun


def test_late_samples_are_not_scored_again(worker, calls, tmp_path):
    """The message of an engine may arrive after the driver has requested the scores, or has dropped the rollout."""
    samples = [sample("20.0", "one"), sample("20.1", "another")]

    async def step():
        await worker.score(samples, {}, 20, tmp_path / "rollouts.jsonl")
        worker.forget(["21.0"])
        worker.receive([*samples, sample("21.0", "dropped"), sample("22.0", "new")])
        assert set(worker._begun) - {"1.0"} == {"22.0"}
        await worker._begun.pop("22.0")[1]

    asyncio.run(step())
    assert sorted(called(calls)) == ["another", "new", "one"]


def test_number_of_remembered_rollouts_is_bounded(worker, monkeypatch):
    monkeypatch.setattr(rewards, "MAX_ENDED", 2)
    worker.forget(["30.0", "30.1"])
    worker.forget(["30.2"])
    assert list(worker._ended) == ["30.1", "30.2"]


def test_resampled_sample_is_scored_again(worker, calls, tmp_path):
    """This happens when a sample's engine is lost."""

    async def step():
        worker.begin(sample("0.0", "lost"))
        return await worker.score([sample("0.0", "found!"), sample("0.1", "x")], {}, 1, tmp_path / "rollouts.jsonl")

    scores, _ = asyncio.run(step())
    assert [score.value for score in scores] == [pytest.approx(1.2 + 0.75), pytest.approx(0.2 + 0.25)]


def test_restored_results_are_those_of_the_restored_samples(worker, calls, tmp_path, monkeypatch):
    """One sample finishes twice, because its engine was lost after it reported the sample."""
    monkeypatch.setattr(rewards, "put_samples", list)
    group = [replace(sample(f"40.0.{i}", "x" * i), prompt=sample("4", "").prompt) for i in range(8)]

    async def first():
        worker.begin_finished(tmp_path, 1)
        worker.receive([replace(group[0], text="lost with its engine")])
        worker.receive(group)
        await worker.score(group, {}, 40, tmp_path / "rollouts.jsonl")

    async def second():
        [restored] = await worker.load_finished(GroupFile.all_in(tmp_path))
        calls.unlink()
        scores, _ = await worker.score(restored, {}, 40, tmp_path / "rollouts.jsonl")
        return [(item.text, score.parts["score"]) for item, score in zip(restored, scores, strict=True)]

    asyncio.run(first())
    assert asyncio.run(second()) == [("x" * i, i / 10) for i in range(8)]
    assert not called(calls), "the results were restored"


def test_unrequested_scores_are_dropped(worker):
    async def step():
        tasks = [worker.begin(sample(name, "one")) for name in ("0.0", "0.1", "1.0")]
        worker.forget({"0.0", "0.1", "7.0"})
        assert set(worker._begun) == {"1.0"}
        await tasks[2]
        assert [task.cancelled() for task in tasks] == [True, True, False]

    asyncio.run(step())


def test_pending_samples_are_restored_from_a_checkpoint(worker, tmp_path, monkeypatch):
    whole = Sample(
        *("3.0.1", Prompt("p", "?", [5, 6], answer={"a": 1}, columns={"c": [2]}), [7, 8], [-1.0, -0.5], [True, False]),
        *((VersionRun(2, 1), VersionRun(3, 1)), "length", "text", CandidateIds.of([[7, 9], [8]])),
        routes=np.full((4, 2, 1), 3, np.int8),
    )
    groups = [(17, 2, [whole, sample("3.0.0", "one")]), (4, 3, [sample("3.1.0", "x")])]
    refs = [(row, version, [SampleRef.of(sample, sample) for sample in samples]) for row, version, samples in groups]
    monkeypatch.setattr(rewards, "get_samples", lambda refs: [ref.sample for ref in refs])
    record = worker.save_groups(refs, tmp_path / "rollouts" / "waiting")
    assert (tmp_path / record.path).stat().st_size == record.num_bytes
    monkeypatch.setattr(rewards, "put_samples", list)
    found = worker.load_groups(tmp_path / "rollouts" / "waiting")
    assert [(row, version) for row, version, _ in found] == [(17, 2), (4, 3)]
    assert found[1][2] == groups[1][2] and found[0][2] == groups[0][2]
    again = found[0][2][0]
    assert again.candidate_ids.ids.tolist() == [7, 9, 8] and again.routes.tolist() == whole.routes.tolist()
    assert again.prompt.answer == {"a": 1} and again.prompt.columns == {"c": [2]}


def test_functions_and_judge_receive_the_columns_of_the_row(worker, tmp_path):
    prompt = Prompt("prompt 0", "?", [5], columns={"bonus": 10, "favourite": "one"})
    samples = [replace(sample(f"0.{k}", text), prompt=prompt) for k, text in enumerate(("one", "other"))]
    scores, _ = asyncio.run(worker.score(samples, {}, 1, tmp_path / "rollouts.jsonl"))
    assert [score.value for score in scores] == [pytest.approx(2 * 10.3 + 1), pytest.approx(2 * 10.5 + 0)]


def test_hanging_call_fails_only_its_sample(worker, file, tmp_path):
    samples = [sample("0.0", "hang"), sample("0.1", "x")]
    scores, _ = asyncio.run(worker.score(samples, {}, 1, tmp_path / "rollouts.jsonl"))
    failure = f"rewards.functions: score did not return within {TIMEOUT} on sample 0.0"
    assert [score.failure for score in scores] == [failure, None]
    assert scores[1].value == pytest.approx(0.2 + 0.25)
    row, _ = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert json.loads(row)["failure"] == failure and json.loads(row)["reward"] is None


def test_rows_can_hold_text_that_is_not_valid_utf8(worker, tmp_path):
    prompt = Prompt("1", "a\udc80 é", [1, 2], answer="\ud800")
    item = Sample("1.0", prompt, [3], [-0.5], [True], (VersionRun(0, 1),), "stop", text="b\udfff")
    other = Sample("1.1", prompt, [3], [-0.5], [True], (VersionRun(0, 1),), "stop", text="x")
    scores, _ = asyncio.run(worker.score([item, other], {}, 1, tmp_path / "rows"))
    assert [score.failure for score in scores] == [None, None]
    row, _ = map(json.loads, (tmp_path / "rows").read_text(encoding="utf-8").splitlines())
    assert (row["prompt"], row["response"], row["answer"]) == (prompt.text, item.text, prompt.answer)


def test_batch_functions_run_once_after_the_last_sample(tmp_path):
    """The other function scores single samples as they arrive. Results are in the order of the config."""
    file = tmp_path / "both.py"
    file.write_text(
        "calls = 0\n"
        "def best(prompts, responses, answers):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    longest = {}\n"
        "    for prompt, response in zip(prompts, responses):\n"
        "        longest[prompt] = max(longest.get(prompt, ''), response, key=len)\n"
        "    found = [100 * calls + (longest[p] == r) for p, r in zip(prompts, responses)]\n"
        "    return [None if 'odd' in r else n for r, n in zip(responses, found)]\n"
        "def short(prompt, response, answer):\n    return len(response) / 10\n"
    )
    functions = [{"function": f"{file}:best", "weight": 2.0}, {"function": f"{file}:short"}]
    config = load(QUICKSTART, [f"rewards.functions={json.dumps(functions)}", "run.token_samples=0"])
    worker = RewardWorker(config, ModelFolders(Path(), None, None, None), num_processes=1)
    texts = {"0.0": "one", "0.1": "longer", "1.0": "an odd one", "1.1": "x"}
    prompts = [Prompt(f"p{i}", str(i), [5]) for i in range(2)]
    samples = [replace(sample(name, text), prompt=prompts[int(name[0])]) for name, text in texts.items()]

    async def step():
        for item in samples[:3]:
            await worker.begin(item)
        return await worker.score(samples, {}, 1, tmp_path / "rollouts.jsonl")

    try:
        scores, _ = asyncio.run(step())
    finally:
        worker.close()
    assert [score.value for score in scores] == [200.3, 202.6, None, 200.1]
    assert [list(scores[i].parts) for i in (0, 2)] == [["best", "short"], ["short"]]
    reason = "best returned NoneType instead of a finite number or a bool on sample 1.0"
    assert scores[2].failure == f"rewards.functions: {reason}"


@pytest.mark.parametrize(
    ("responses", "values"),
    [(["[[10]]", "none", "[[1]]", "none"], [1.0, 0.0, 0.0, 0.0]), (["[[10]]", "none", "none"], [1.0, None, None])],
)
def test_unrated_responses_fail_only_if_they_are_the_majority(tmp_path, responses, values):
    file = tmp_path / "rate.py"
    file.write_text(
        "from megarl.rewards.rating import rating\n"
        "def rate(prompts, responses, answers):\n    return [rating(text, (1, 10)) for text in responses]\n"
    )
    functions = [{"function": f"{file}:rate", "name": "rate"}]
    config = load(QUICKSTART, [f"rewards.functions={json.dumps(functions)}", "run.token_samples=0"])
    worker = RewardWorker(config, ModelFolders(Path(), None, None, None), num_processes=1)
    samples = [sample(f"0.{i}", text) for i, text in enumerate(responses)]
    try:
        scores, _ = asyncio.run(worker.score(samples, {}, 1, tmp_path / "rollouts.jsonl"))
    finally:
        worker.close()
    assert [score.value for score in scores] == values
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == values
    reason = "the judge's answer has no rating [[1 to 10]]: …'none'"
    assert [row.get("issues") for row in rows] == [
        {"rate_unrated": reason} if text == "none" else None for text in responses
    ]
    if None in values:
        assert rows[1]["failure"].startswith(f"rewards.functions: rate: {reason} (2 of 3 responses have no rating, so")
