"""Groups of rollouts and their rewards are written as they finish and read back exactly; damaged files are rejected."""

from __future__ import annotations

import asyncio
import json
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.core.completion import VersionRun
from megarl.core.errors import UserError
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.rewards.finished_files import GroupFile
from megarl.rewards.finished_groups import FinishedGroups
from megarl.rewards.result import Result

PROMPT = Prompt("rows:1", "1 + 1 =", np.array([3, 4], np.int32), answer="2", columns={"level": 3})


def sample(rollout: str, version: int = 4, part: int = 0) -> Sample:
    """Return one of the samples of a rollout."""
    rng = np.random.default_rng(abs(hash((rollout, part))))
    logprobs = rng.standard_normal(3).astype(np.float32)
    name = rollout if not part else f"{rollout}/{part}"
    runs = (VersionRun(version - 1, 1), VersionRun(version, 2))
    return Sample(name, PROMPT, (5, 6, 7), logprobs, (True, False, True), runs, "stop", "two", rollout_id=rollout)


def collect(folder: Path, *batches: list[Sample], num_rollouts: int = 2, version: int = 4) -> FinishedGroups:
    """Add batches of samples and wait until the groups are written."""

    async def run() -> FinishedGroups:
        groups = FinishedGroups(num_rollouts)
        groups.begin(folder, version)
        for batch in batches:
            groups.add(batch)
        await groups.written([sample for batch in batches for sample in batch])
        return groups

    return asyncio.run(run())


def test_references_to_images_are_fetched_before_writing(tmp_path):
    image = PromptImage(3, 1, (1, 2, 2), "a", "a reference")
    samples = [replace(sample(f"5.1.{k}"), response_images=(image,)) for k in range(2)]

    def fetch(group):
        assert group == samples
        return [item.with_files([b"encoded"]) for item in group]

    async def run() -> None:
        groups = FinishedGroups(2, fetch)
        groups.begin(tmp_path, 4)
        groups.add(samples)
        await groups.written(samples)

    asyncio.run(run())
    assert load_groups(tmp_path) == [[item.with_files([b"encoded"]) for item in samples]]


def load_groups(folder: Path) -> list[list[Sample]]:
    return [file.load() for file in GroupFile.all_in(folder)]


def test_complete_group_is_written_exactly(tmp_path):
    """The second rollout has two samples. Samples arrive in any order."""
    first, second = [sample("5.1.0")], [sample("5.1.1"), sample("5.1.1", part=1)]
    collect(tmp_path, second, [sample("5.2.0")], first)
    [group] = load_groups(tmp_path)
    assert [s.id for s in group] == ["5.1.0", "5.1.1", "5.1.1/1"]
    for found, expected in zip(group, first + second, strict=True):
        assert found == expected and found.rollout_id == expected.rollout_id
        assert np.array_equal(found.response_logprobs, expected.response_logprobs)
        assert found.prompt == PROMPT and found.versions == expected.versions
    [file] = tmp_path.iterdir()
    assert file.name.startswith("5.1-4-"), "nothing else may be left in the folder"
    [found] = GroupFile.all_in(tmp_path)
    assert (found.path, found.name, found.version) == (file, "5.1", 4)


def test_greedy_rollout_completes_a_group(tmp_path):
    collect(tmp_path, [sample("5.1.greedy")], [sample("5.1.0")])
    [group] = load_groups(tmp_path)
    assert [s.id for s in group] == ["5.1.0", "5.1.greedy"]


@pytest.mark.parametrize(("version", "is_written"), [(4, True), (3, False)])
def test_groups_of_newer_weights_are_not_written(tmp_path, version, is_written):
    """A run that resumes from the checkpoint trains these weights again."""
    collect(tmp_path, [sample("5.1.0"), sample("5.1.1", version=3)], version=version)
    assert bool(load_groups(tmp_path)) == is_written


@pytest.mark.parametrize(("num_earlier", "kept"), [(1, "late"), (2, "two")])
def test_last_of_two_equal_rollouts_is_kept(tmp_path, num_earlier, kept):
    """A reassigned rollout may finish twice. Once the group is complete, it is not written again."""
    batches = [[sample("5.1.0")], [sample("5.1.1")]]
    batches.insert(num_earlier, [replace(sample("5.1.0"), text="late")])
    collect(tmp_path, *batches)
    [[first, second]] = load_groups(tmp_path)
    assert (first.id, first.text, second.id) == ("5.1.0", kept, "5.1.1")


def test_dropped_rollouts_are_forgotten(tmp_path):
    async def run() -> None:
        groups = FinishedGroups(2)
        groups.begin(tmp_path, 4)
        groups.add([sample("5.1.0")])
        groups.forget(["5.1.0", "5.1.1"])
        groups.add([sample("5.1.1")])
        await groups.written([sample("5.1.1")])
        groups.add([sample("5.2.0"), sample("5.2.1")])
        groups.forget(["5.2.0", "5.2.1"])
        assert not groups._writing and not groups._unfinished, "nothing may accumulate"

    asyncio.run(run())
    assert [group[0].id for group in load_groups(tmp_path)] == ["5.2.0"]


def test_damaged_file_is_refused(tmp_path):
    """Every byte counts, as does the length."""
    collect(tmp_path, [sample("5.1.0"), sample("5.1.1")])
    (tmp_path / ".5.3-4-00000000.safetensors").write_bytes(b"incomplete")
    [file] = GroupFile.all_in(tmp_path)
    content = file.path.read_bytes()
    flipped = [content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in range(0, len(content), 97)]
    torn = [content[:length] for length in (0, 1, 8, len(content) // 2, len(content) - 1)]
    for damaged in (*flipped, *torn, content + b"x"):
        file.path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{file.path}: the content does not match the checksum in its name"):
            file.load()
    file.path.write_bytes(content)
    assert len(file.load()) == 2


@pytest.mark.parametrize("version", [3, 5])
def test_file_with_the_wrong_version_is_refused(tmp_path, version):
    collect(tmp_path, [sample("5.1.0"), sample("5.1.1")])
    [file] = tmp_path.iterdir()
    file.rename(tmp_path / file.name.replace("5.1-4-", f"5.1-{version}-"))
    with pytest.raises(UserError, match="the newest weights that sampled the group differ"):
        load_groups(tmp_path)


RESULTS = {
    "5.1.0": {"exact": Result(0.1 + 0.2, "0.3"), "tokens": Result([1, -0.5, 1e-300])},
    "5.1.1": {"exact": Result(None, issues={"verbatim": "too long", "unrated": None})},
}


def record(folder: Path, results: dict[str, dict[str, Result]]) -> GroupFile:
    """Write a group, and results that the functions return after the group is written."""

    async def run() -> None:
        groups, gate = FinishedGroups(2), asyncio.Event()
        groups.begin(folder, 4)

        async def call(rollout: str) -> dict[str, Result]:
            await gate.wait()
            if rollout not in results:
                raise ValueError("the function raised this")
            return results[rollout]

        samples = [sample("5.1.0"), sample("5.1.1")]
        [group] = groups.add(samples)
        groups.record(group, {s.rollout_id: asyncio.create_task(call(s.rollout_id)) for s in samples})
        gate.set()
        await groups.written(samples)
        assert not groups._recording

    asyncio.run(run())
    [file] = GroupFile.all_in(folder)
    return file


def test_results_of_reward_functions_are_restored(tmp_path):
    file = record(tmp_path, RESULTS)
    assert file.load_results() == RESULTS
    (tmp_path / "new").mkdir()
    moved = file.move(tmp_path / "new")
    assert moved.load_results() == RESULTS and not file.results
    moved.remove()
    assert not any((tmp_path / "new").iterdir())


def test_failures_of_reward_functions_are_not_restored(tmp_path):
    results = {**RESULTS, "5.1.1": {"exact": Result(None, failure="timeout")}}
    assert record(tmp_path, results).load_results() == {}


def test_failing_call_leaves_the_group_in_use(tmp_path):
    file = record(tmp_path, {"5.1.0": RESULTS["5.1.0"]})
    assert file.load_results() == {} and len(file.load()) == 2


def test_damaged_results_are_ignored(tmp_path):
    """A crash may leave a part of the file, or nothing."""
    file = record(tmp_path, RESULTS)
    [path] = file.results
    content = path.read_bytes()
    for damaged in (b"", content[:-1], b"x" + content[1:], content + b" "):
        path.write_bytes(damaged)
        assert file.load_results() == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"value": "1.0", "returned": "", "issues": {}},
        {"value": [1.0, None], "returned": "", "issues": {}},
        {"value": True, "returned": "", "issues": {}},
        {"value": 1.0, "returned": 1, "issues": {}},
        {"value": 1.0, "returned": "", "issues": []},
        {"value": 1.0, "returned": "", "issues": {"verbatim": 1}},
        {"value": 1.0, "returned": ""},
        {"value": 1.0, "returned": "", "issues": {}, "failure": "x"},
        [],
    ],
)
def test_malformed_results_are_ignored(tmp_path, fields):
    """Their checksum is correct."""
    collect(tmp_path, [sample("5.1.0"), sample("5.1.1")])
    [file] = GroupFile.all_in(tmp_path)
    content = json.dumps({"5.1.0": {"exact": fields}}).encode()
    file.path.with_name(f"{file.path.stem}.{zlib.crc32(content):08x}.json").write_bytes(content)
    assert len(file.results) == 1 and file.load_results() == {}


def test_results_of_another_group_are_ignored(tmp_path):
    """A group with the same name was sampled again after its file was damaged."""
    file = record(tmp_path, RESULTS)
    [path] = file.results
    path.rename(path.with_name(path.name.replace(file.checksum, "00000000")))
    assert file.load_results() == {}


def test_error_of_a_write_is_raised(tmp_path):
    with pytest.raises(FileNotFoundError):
        collect(tmp_path / "removed", [sample("5.1.0"), sample("5.1.1")])
