"""Groups of rollouts are written as they finish, and read back exactly; damaged files are skipped."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.rewards.finished_groups import FinishedGroups, load_groups

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
    assert file.name.startswith("5.1-"), "nothing else may be left in the folder"


def test_greedy_rollout_completes_a_group(tmp_path):
    collect(tmp_path, [sample("5.1.greedy")], [sample("5.1.0")])
    [group] = load_groups(tmp_path)
    assert [s.id for s in group] == ["5.1.0", "5.1.greedy"]


@pytest.mark.parametrize(("version", "is_written"), [(4, True), (3, False)])
def test_groups_of_newer_weights_are_not_written(tmp_path, version, is_written):
    """A run that resumes from the checkpoint trains these weights again."""
    collect(tmp_path, [sample("5.1.0"), sample("5.1.1", version=3)], version=version)
    assert bool(load_groups(tmp_path)) == is_written


@pytest.mark.parametrize("num_earlier", [1, 2])
def test_first_of_two_equal_rollouts_is_kept(tmp_path, num_earlier):
    """A reassigned rollout may finish twice, before or after the group is complete."""
    batches = [[sample("5.1.0")], [sample("5.1.1")]]
    batches.insert(num_earlier, [replace(sample("5.1.0"), text="late")])
    collect(tmp_path, *batches)
    [[first, second]] = load_groups(tmp_path)
    assert (first.text, second.id) == ("two", "5.1.1")


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


def test_damaged_file_is_skipped_with_a_warning(tmp_path, capsys):
    collect(tmp_path, [sample("5.1.0"), sample("5.1.1")], [sample("5.2.0"), sample("5.2.1")])
    damaged, intact = sorted(tmp_path.iterdir())
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    (tmp_path / ".5.3-0.safetensors").write_bytes(b"torn")
    assert [group[0].id for group in load_groups(tmp_path)] == ["5.2.0"]
    warning = capsys.readouterr().out
    assert str(damaged) in warning and str(intact) not in warning


def test_error_of_a_write_is_raised(tmp_path):
    with pytest.raises(FileNotFoundError):
        collect(tmp_path / "removed", [sample("5.1.0"), sample("5.1.1")])
