"""Groups of rollouts that have finished since a checkpoint, for a run that resumes from it."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.cluster.groups.rewards import RewardGroup
from megarl.config.continuation import samples_alike
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.core.files import numbered, read_object
from megarl.core.sample import SampleRef
from megarl.rewards.finished_files import GroupFile, write_durably
from megarl.step.state import PendingPrompt

AFTER, RECORD = "after_{:06d}", "record.json"
"""Folder for the groups that finish after the checkpoint of a step (0: before the first one), and the file in it that
records the config, data, code and weights. From these, a later attempt decides whether it can use the groups."""


@dataclass(slots=True)
class FinishedRollouts:
    """Makes the reward process record groups in files as they finish, and returns the groups of earlier attempts.

    A group is used only if the run has the same weights as those that sampled it: the checkpoint's or older ones, or
    newer ones that a resumed run has trained again with the same checksums. Updates on GPUs are not reproducible, so
    groups sampled from newer weights are recorded only if `reproduces`.

    Consumes: files of groups, which the reward process writes. Waits for: nothing; a group without a complete file is
    sampled again. Unblocked by: `begin` with a new checkpoint; until then, no files are written.

    Attributes:
        origin: JSON values that identify the data and the user's code, with the keys `data` and `code`.
        reproduces: whether a resumed run trains the same weights again.
    """

    config: Config
    rewards: RewardGroup
    folder: Path
    origin: Mapping[str, Any]
    reproduces: bool = False
    _step: int | None = field(init=False, default=None)
    """Step of the newest checkpoint, 0 without one. None: no groups are written."""
    _weights: dict[str, str] = field(init=False, default_factory=dict)
    """Digests of the weights that have sampled groups in the current folder, by version."""
    _earlier: dict[str, GroupFile] = field(init=False, default_factory=dict)
    """Files of earlier attempts' unused groups, by STEP.GROUP."""
    _found: dict[str, list[SampleRef]] = field(init=False, default_factory=dict)
    """Groups in `_earlier` that the run can use, because they were sampled from its weights, by STEP.GROUP."""
    _names: set[str] = field(init=False, default_factory=set)
    """Names of earlier attempts' groups that new groups must not reuse: unused, taken and stale ones."""

    def begin(self, step: int) -> None:
        """Write groups that finish from now on into the folder for the checkpoint of this step. Move unused groups of
        earlier attempts there, unless they are too stale. Remove folders older than the previous checkpoint's. If that
        checkpoint was abandoned, a resumed run samples their groups again."""
        for earlier, path in numbered(self.folder, AFTER).items():
            if self._step is not None and earlier < self._step:
                shutil.rmtree(path, ignore_errors=True)  # on NFS, an open file prevents it until a later save
        self._step = step
        self._weights = {version: digest for version, digest in self._weights.items() if int(version) >= step}
        self._write_record()
        oldest = step - self.config.rollout.max_staleness
        for name in [name for name, samples in self._found.items() if _oldest(samples) < oldest]:
            del self._found[name], self._earlier[name]
        for name, file in self._earlier.items():
            self._earlier[name] = file.move(self._current)
        self.rewards.begin_finished(self._current, step)

    def restore(self, step: int, moved: Path | None = None) -> None:
        """Find the groups that earlier attempts have written since the checkpoint of `step`; 0 without one. Remove
        groups with different settings or data. moved: the folder of an earlier attempt whose run folder was moved
        aside."""
        if step == 0 and self.config.checkpoint.every_steps is None:
            return  # without checkpoints, files would accumulate
        if moved is not None and (moved / AFTER.format(0)).exists() and not self.folder.exists():
            self.folder.mkdir()
            (moved / AFTER.format(0)).replace(self.folder / AFTER.format(0))
        self._step = step
        later = {number: path for number, path in numbered(self.folder, AFTER).items() if number >= step}
        for path in later.values():
            self._weights |= self._read_record(path)
        self._write_record()  # write the record before groups move into the folder
        for number, path in later.items():
            if number > step:
                for file in GroupFile.all_in(path):
                    file.move(self._current)
                shutil.rmtree(path)
        self._earlier = {file.name: file for file in GroupFile.all_in(self._current)}
        self._names = set(self._earlier)

    def note_weights(self, version: int, weights: Mapping[str, Any]) -> None:
        """Record the weights that the engines have received. Load the groups that earlier attempts sampled from these
        or older weights, and write the groups that the engines sample from now on. Discard earlier attempts' groups
        from this or newer versions unless the weights are known to be the same. weights: digests (Refit.weights)."""
        if self._step is None or self.config.samples_images:
            return
        is_in_checkpoint = version == self._step > 0
        may_recur = version == 0 or (self.reproduces and self.config.checkpoint.every_steps is not None)
        if not is_in_checkpoint and not may_recur:
            self._discard(version)
            return
        sampled = weights.get("sample")
        digest = None if sampled is None else _digest([sampled["regions"], sampled["trainer"]])
        if not is_in_checkpoint and (digest is None or self._weights.get(str(version)) != digest):
            self._discard(version)
        if digest is not None and self._weights.get(str(version)) != digest:
            self._weights[str(version)] = digest
            self._write_record()
        new = [file for name, file in self._earlier.items() if name not in self._found]
        self._load([file for file in new if file.version <= version])
        if is_in_checkpoint or digest is not None:
            self.rewards.begin_finished(self._current, version)

    def take(self, item: PendingPrompt, prompt_id: str, name: str) -> list[SampleRef] | None:
        """Remove and return a finished group for this prompt, or None. Its tokens must not be older than the item's
        version. name: STEP.GROUP that the group would get now; a group with this name is preferred."""
        usable = [
            found
            for found, samples in self._found.items()
            if samples[0].prompt_id == prompt_id and _oldest(samples) >= item.version
        ]
        if not usable:
            return None
        chosen = name if name in usable else usable[0]
        del self._earlier[chosen]
        return self._found.pop(chosen)

    def free_places(self, number: int, first: int, count: int) -> Sequence[int]:
        """Return the positions in the step of `count` groups to sample, starting at `first`. Skip positions that occur
        in the names of earlier attempts' groups, so that names remain unique."""
        places = range(first, first + count + len(self._names))
        return [place for place in places if f"{number}.{place}" not in self._names][:count]

    @property
    def _current(self) -> Path:
        return self.folder / AFTER.format(self._step)

    def _load(self, files: Sequence[GroupFile]) -> None:
        """Read these groups. The prompts of damaged ones are sampled again, under the same names."""
        if not files:
            return
        loaded = {samples[0].rollout_id.rpartition(".")[0]: samples for samples in self.rewards.load_finished(files)}
        for name in {file.name for file in files} - loaded.keys():
            del self._earlier[name]
            self._names.remove(name)
        self._found |= loaded
        print(f"rollouts: {len(loaded)} prompts have finished rollouts from the previous attempt", flush=True)

    def _discard(self, version: int) -> None:
        """Remove the groups of earlier attempts that have tokens from this version or newer ones."""
        for name in [name for name, file in self._earlier.items() if file.version >= version]:
            self._earlier.pop(name).remove()
            self._names.remove(name)
        self._weights = {key: digest for key, digest in self._weights.items() if int(key) < version}

    def _write_record(self) -> None:
        self._current.mkdir(parents=True, exist_ok=True)
        record = {"config": self.config.model_dump(), **self.origin, "weights": self._weights}
        write_durably(self._current / RECORD, json.dumps(record).encode())

    def _read_record(self, folder: Path) -> dict[str, str]:
        """Return the digests of the weights that have sampled the groups in a folder. Remove the groups if they were
        sampled with other settings or data, and the results of reward functions if the user's code has changed."""
        try:
            record = read_object(folder / RECORD)
        except (UserError, FileNotFoundError):
            # The record is damaged, or missing because an attempt was killed while it created or removed the folder.
            record = {}
        weights = record.get("weights")
        is_alike = isinstance(record.get("config"), dict) and record.get("data") == self.origin["data"]
        is_valid = isinstance(weights, dict) and all(map(str.isdecimal, weights))
        if not (is_alike and is_valid and samples_alike(self.config, record["config"])):
            weights = None
        for file in GroupFile.all_in(folder):
            if weights is None:
                file.remove()
            elif record.get("code") != self.origin["code"]:
                for results in file.results:
                    results.unlink()
        return weights or {}


def _oldest(samples: Sequence[SampleRef]) -> float:
    """Return the oldest weight version that sampled a token; infinity without tokens, since nothing is then stale."""
    return min((sample.version_oldest for sample in samples if sample.num_response_tokens), default=math.inf)


def _digest(values: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(values).encode()).hexdigest()
