"""Writes each group of rollouts to a file as soon as it is complete, so that a resumed run need not sample it again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from megarl.core.completion import newest
from megarl.core.latents import AnySample
from megarl.core.sample import Sample
from megarl.rewards.finished_files import write_group, write_results
from megarl.rewards.result import Result


class FinishedGroups:
    """Collects samples until their group is complete, and then writes the group. Groups with tokens from weights that a
    resumed run cannot identify are not written."""

    def __init__(self, num_rollouts: int, fetch: Callable[[Sequence[Sample]], Sequence[Sample]] = list):
        """Create a collector.

        Args:
            num_rollouts: number of rollouts in a group, including a greedy one.
            fetch: returns samples with encoded images instead of references to images. It is called in a thread.
        """
        self._num_rollouts, self._fetch = num_rollouts, fetch
        self._folder: Path | None = None
        self._version = 0
        self._unfinished: dict[str, dict[str, list[Sample]]] = {}
        """Samples by group name and rollout id."""
        self._writing: dict[str, asyncio.Future[Path]] = {}
        """Writes that have started, by group name, until their samples are scored or dropped."""
        self._recording: dict[str, asyncio.Task[None]] = {}
        """Tasks that write the reward functions' results, by group name. They are kept as long as the entries in
        `_writing`."""

    def begin(self, folder: Path, version: int) -> None:
        """Write groups into this folder from now on. version: the newest weight version that a resumed run can
        identify."""
        self._folder, self._version = folder, version

    def add(self, samples: Sequence[AnySample]) -> list[list[Sample]]:
        """Add the samples of finished rollouts. All samples of a rollout are added together. Return the groups that
        they complete and that are now being written."""
        if self._folder is None:
            return []
        rollouts: dict[tuple[str, str], list[Sample]] = {}
        for sample in samples:
            if isinstance(sample, Sample) and sample.group not in self._writing:
                rollouts.setdefault((sample.group, sample.rollout_id), []).append(sample)
        written = []
        for (name, rollout_id), members in rollouts.items():
            unfinished = self._unfinished.setdefault(name, {})
            unfinished[rollout_id] = members  # a reassigned rollout may finish twice; the last one is scored
            if len(unfinished) == self._num_rollouts:
                group = [sample for each in self._unfinished.pop(name).values() for sample in each]
                if max(newest(sample.versions) for sample in group) <= self._version:
                    loop = asyncio.get_running_loop()
                    self._writing[name] = loop.run_in_executor(None, self._write, self._folder, group)
                    written.append(group)
        return written

    def _write(self, folder: Path, group: Sequence[Sample]) -> Path:
        return write_group(folder, self._fetch(group))

    def record(self, group: Sequence[Sample], calls: Mapping[str, asyncio.Task[dict[str, Result]]]) -> None:
        """Write the reward functions' results for a group that `add` returned, once all calls have succeeded. `calls`:
        rollout id -> call."""
        name = group[0].group
        self._recording[name] = asyncio.create_task(_record(self._writing[name], calls))

    def forget(self, rollout_ids: Collection[str]) -> None:
        """Discard the groups of dropped rollouts, which will not be scored."""
        dropped = {rollout_id.rpartition(".")[0] for rollout_id in rollout_ids}
        for groups in (self._unfinished, self._writing, self._recording):
            for name in [name for name in groups if name.rpartition("/")[2] in dropped]:
                del groups[name]

    async def written(self, samples: Sequence[AnySample]) -> None:
        """Wait until the groups of these scored samples are written. Re-raise the error of a failed write."""
        for name in {sample.group for sample in samples if isinstance(sample, Sample)}:
            self._unfinished.pop(name, None)  # absent if this process started in the middle of the group
            for writes in (self._writing, self._recording):
                if name in writes:
                    await writes.pop(name)


async def _record(writing: asyncio.Future[Path], calls: Mapping[str, asyncio.Task[dict[str, Result]]]) -> None:
    results = await asyncio.gather(*calls.values(), return_exceptions=True)
    succeeded = {
        rollout: result
        for rollout, result in zip(calls, results, strict=True)
        if not isinstance(result, BaseException) and all(each.failure is None for each in result.values())
    }
    if len(succeeded) == len(calls):
        await asyncio.to_thread(write_results, await writing, succeeded)
