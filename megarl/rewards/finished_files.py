"""Files with finished groups of rollouts: one file per group, and one with the results of the group's reward
functions."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.core.completion import newest
from megarl.core.errors import UserError
from megarl.core.files import is_plain, replacement, retry_when_full, sync
from megarl.core.latents import AnySample
from megarl.core.sample import Sample
from megarl.rewards.result import Result
from megarl.rewards.sample_file import load_samples, sample_bytes

_NAME = re.compile(r"(\d+\.\d+)-(\d+)-([0-9a-f]{8})\.safetensors")
"""STEP.GROUP, the version of the newest weights that sampled the group, and the checksum of the content."""

Results = Mapping[str, Mapping[str, Result]]
"""Results of reward functions, by rollout id and function."""


@dataclass(frozen=True, slots=True)
class GroupFile:
    """A file with a finished group.

    Attributes:
        name: STEP.GROUP of the group.
        version: the version of the newest weights that sampled one of its tokens.
        checksum: checksum of the content in hexadecimal digits.
    """

    path: Path
    name: str
    version: int
    checksum: str

    @classmethod
    def all_in(cls, folder: Path) -> list[GroupFile]:
        """Return the files in a folder, sorted by name. Incomplete files have other names."""
        matches = [_NAME.fullmatch(name) for name in sorted(os.listdir(folder))]
        return [cls(folder / match[0], match[1], int(match[2]), match[3]) for match in matches if match is not None]

    @property
    def results(self) -> list[Path]:
        """The files with the results of the reward functions for this group: at most one, unless it was written twice.
        Their names contain the checksums of both files."""
        return sorted(self.path.parent.glob(f"{self.path.stem}.*.json"))

    def remove(self) -> None:
        for path in (*self.results, self.path):
            path.unlink(missing_ok=True)

    def move(self, folder: Path) -> GroupFile:
        for path in (*self.results, self.path):
            path.replace(folder / path.name)
        return replace(self, path=folder / self.path.name)

    def load(self) -> list[Sample]:
        """Read the group. Raise UserError if the file is damaged."""
        if f"{zlib.crc32(self.path.read_bytes()):08x}" != self.checksum:
            raise UserError(f"{self.path}: the content does not match the checksum in its name")
        groups = load_samples(self.path)
        samples = [sample for _, _, group in groups for sample in group if isinstance(sample, Sample)]
        if max((newest(sample.versions) for sample in samples), default=None) != self.version:
            raise UserError(f"{self.path}: the newest weights that sampled the group differ from those in its name")
        return samples

    def load_results(self) -> Results:
        """Return the results of the reward functions; empty if there are none, or if their file is damaged. Another
        program may have written the file, so its content is checked."""
        for path in self.results:
            content = path.read_bytes()
            if path.name == _results_name(self.path, content):
                try:
                    return {
                        rollout: {name: _result(**fields) for name, fields in results.items()}
                        for rollout, results in json.loads(content).items()
                    }
                except (ValueError, TypeError, AttributeError, RecursionError):
                    return {}
        return {}


def write_group(folder: Path, samples: Sequence[Sample]) -> Path:
    """Write a group to a new file and return its path. The file is complete on disk when it appears. While the disk is
    full, wait as in `retry_when_full`."""
    group: list[AnySample] = sorted(samples, key=lambda sample: _number(sample.rollout_id))  # stable within a rollout
    data = sample_bytes([(0, 0, group)])  # only the driver knows the row and its version
    name, version = samples[0].rollout_id.rpartition(".")[0], max(newest(sample.versions) for sample in samples)
    file = folder / f"{name}-{version}-{zlib.crc32(data):08x}.safetensors"
    write_durably(file, data)
    return file


def write_results(file: Path, results: Results) -> None:
    """Write the results of the reward functions for the group in `file`. No result may be a failure. If a crash loses
    or damages the file, the functions are called again, so nothing waits for the disk."""
    fields = {
        rollout: {name: _fields(result) for name, result in by_name.items()} for rollout, by_name in results.items()
    }
    content = json.dumps(fields).encode()
    path = file.with_name(_results_name(file, content))

    def write() -> None:
        with replacement(path) as stream:
            stream.write(content)

    retry_when_full(write, path)


def write_durably(file: Path, data: bytes) -> None:
    """Write a file, replacing any earlier version. It is complete on disk when it appears."""

    def write() -> None:
        with replacement(file) as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        sync(file.parent)

    retry_when_full(write, file)


def _fields(result: Result) -> dict[str, Any]:
    fields = {"value": result.value, "returned": result.returned, "issues": dict(result.issues)}
    return fields | ({"feedback": result.feedback} if result.feedback else {})


def _result(value: Any, returned: Any, issues: Any, feedback: Any = "") -> Result:
    """Return a result with these fields. Raise ValueError if one has the wrong type."""
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    texts = [returned, feedback, *(text for text in issues.values() if text is not None)]
    if not all(is_plain(number, float) for number in numbers) or not all(isinstance(text, str) for text in texts):
        raise ValueError("not the result of a reward function")
    return Result(value, returned, issues=issues, feedback=feedback)


def _results_name(file: Path, content: bytes) -> str:
    return f"{file.stem}.{zlib.crc32(content):08x}.json"


def _number(rollout_id: str) -> tuple[bool, int]:
    """Return the sort key of a rollout in its group: rollouts are sorted by number, and a greedy rollout is last."""
    number = rollout_id.rpartition(".")[2]
    return (False, int(number)) if number.isdecimal() else (True, 0)
