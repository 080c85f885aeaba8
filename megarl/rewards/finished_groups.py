"""Writes each group of rollouts to a file as soon as it is complete, so that a resumed run need not sample it again."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path

from megarl.core.completion import newest
from megarl.core.errors import UserError
from megarl.core.files import replacement, retry_when_full, sync
from megarl.core.latents import AnySample
from megarl.core.sample import Sample
from megarl.rewards.sample_file import load_samples, sample_bytes


class FinishedGroups:
    """Collects samples until their group is complete, and then writes the group. Groups with tokens from weights newer
    than the newest checkpoint's are not written, because a resumed run cannot use them."""

    def __init__(self, num_rollouts: int):
        """num_rollouts: number of rollouts in a group, including a greedy one."""
        self._num_rollouts = num_rollouts
        self._folder: Path | None = None
        self._version = 0
        self._unfinished: dict[str, dict[str, list[Sample]]] = {}
        """Samples by group name and rollout id."""
        self._writing: dict[str, asyncio.Future[None]] = {}
        """Writes that have started, by group name, until their samples are scored or dropped."""

    def begin(self, folder: Path, version: int) -> None:
        """Write groups into this folder from now on. version: the weight version in the newest checkpoint."""
        self._folder, self._version = folder, version

    def add(self, samples: Sequence[AnySample]) -> None:
        """Add the samples of finished rollouts. All samples of a rollout are added together."""
        if self._folder is None:
            return
        rollouts: dict[tuple[str, str], list[Sample]] = {}
        for sample in samples:
            if isinstance(sample, Sample) and sample.group not in self._writing:
                rollouts.setdefault((sample.group, sample.rollout_id), []).append(sample)
        for (name, rollout_id), members in rollouts.items():
            group = self._unfinished.setdefault(name, {})
            group.setdefault(rollout_id, members)  # a reassigned rollout may finish twice
            if len(group) == self._num_rollouts:
                self._write(name, [sample for each in self._unfinished.pop(name).values() for sample in each])

    def _write(self, name: str, group: list[Sample]) -> None:
        assert self._folder is not None, "call begin first"
        if max(newest(sample.versions) for sample in group) <= self._version:
            loop = asyncio.get_running_loop()
            self._writing[name] = loop.run_in_executor(None, write_group, self._folder, group)

    def forget(self, rollout_ids: Collection[str]) -> None:
        """Discard the groups of dropped rollouts, which will not be scored."""
        dropped = {rollout_id.rpartition(".")[0] for rollout_id in rollout_ids}
        for groups in (self._unfinished, self._writing):
            for name in [name for name in groups if name.rpartition("/")[2] in dropped]:
                del groups[name]

    async def written(self, samples: Sequence[AnySample]) -> None:
        """Wait until the groups of these samples are written, and raise the error of a write that failed."""
        for name in {sample.group for sample in samples if isinstance(sample, Sample)}:
            self._unfinished.pop(name, None)  # the group was incomplete when this process started to collect
            if name in self._writing:
                await self._writing.pop(name)


def write_group(folder: Path, samples: Sequence[Sample]) -> None:
    """Write a group to a file named after its step, its position and its checksum. The file is complete on disk when it
    appears. While the disk is full, wait as in `retry_when_full`."""
    group: list[AnySample] = sorted(samples, key=lambda sample: _number(sample.rollout_id))  # stable in a rollout
    data = sample_bytes([(0, 0, group)])  # the row and its version are known only to the driver
    name = samples[0].rollout_id.rpartition(".")[0]
    file = folder / f"{name}-{zlib.crc32(data):08x}.safetensors"

    def write() -> None:
        with replacement(file) as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        sync(folder)

    retry_when_full(write, file)


def load_groups(folder: Path) -> list[list[Sample]]:
    """Read the groups in a folder, in the order of their names. A damaged file is skipped with a warning."""
    groups = []
    for file in sorted(folder.glob("[0-9]*.safetensors")):
        try:
            if f"{zlib.crc32(file.read_bytes()):08x}" != file.stem.rpartition("-")[2]:
                raise UserError(f"{file}: the content does not match the checksum in its name")
            [(_, _, samples)] = load_samples(file)
        except UserError as error:
            print(f"megarl: warning: a finished group is sampled again. {error}", flush=True)
        else:
            groups.append(samples)
    return groups


def _number(rollout_id: str) -> tuple[bool, int]:
    """Sort key of a rollout in its group: its number; a greedy rollout is last."""
    number = rollout_id.rpartition(".")[2]
    return (False, int(number)) if number.isdecimal() else (True, 0)
