"""Groups of rollouts that finish after a checkpoint, for a run that resumes from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.cluster.groups.rewards import RewardGroup
from megarl.config.continuation import samples_alike
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint
from megarl.core.files import numbered, read_object, replace_text
from megarl.core.sample import SampleRef
from megarl.step.state import PendingPrompt

AFTER, CONFIG = "after_{:06d}", "config.json"
"""Folder for the groups that finish after the checkpoint of a step, and the config with which they were sampled."""


@dataclass(slots=True)
class FinishedRollouts:
    """Tells the reward process where to write groups as they finish, and returns those of an earlier attempt.

    A group is used only if the checkpoint's weights, or older ones, sampled all of its tokens. A resumed run trains the
    newer weights again, and on GPUs they come out slightly different."""

    config: Config
    rewards: RewardGroup
    folder: Path
    _step: int | None = field(init=False, default=None)
    """Step of the newest checkpoint."""
    _found: dict[str, list[SampleRef]] = field(init=False, default_factory=dict)
    """Unused groups of an earlier attempt, by STEP.GROUP."""
    _names: set[str] = field(init=False, default_factory=set)
    """The names of all groups of an earlier attempt."""

    def begin(self, step: int) -> None:
        """Write groups that finish from now on into the folder for the checkpoint of this step. Remove the folders for
        checkpoints before the previous one, which is complete."""
        for earlier, path in numbered(self.folder, AFTER).items():
            if self._step is not None and earlier < self._step:
                shutil.rmtree(path)
        if self._step is not None:
            self._found.clear()
        self._step, folder = step, self.folder / AFTER.format(step)
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / CONFIG, json.dumps(self.config.model_dump()))
        self.rewards.begin_finished(folder, step)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Read the groups that an earlier attempt has written since the checkpoint. Remove the files of groups with
        other settings, and those for later checkpoints, whose weights are trained again."""
        for step, path in numbered(self.folder, AFTER).items():
            if step < checkpoint.step:  # trained on, or in the checkpoint
                continue
            is_alike = (path / CONFIG).exists() and samples_alike(self.config, read_object(path / CONFIG))
            for samples in self.rewards.load_finished(path, checkpoint.step) if is_alike else ():
                self._found[samples[0].rollout_id.rpartition(".")[0]] = samples
            if step > checkpoint.step or not is_alike:
                shutil.rmtree(path)
        self._names = set(self._found)
        if self._found:
            print(f"rollouts: {len(self._found)} prompts have finished rollouts from the previous attempt", flush=True)
        self.begin(checkpoint.step)

    def take(self, item: PendingPrompt, prompt_id: str, name: str) -> list[SampleRef] | None:
        """Remove and return a finished group for this prompt, or None. Its tokens must not be older than the item's
        version. name: STEP.GROUP that the group would get now; a group with this name is preferred."""
        usable = [
            found
            for found, samples in self._found.items()
            if samples[0].prompt_id == prompt_id and min(s.version_oldest for s in samples) >= item.version
        ]
        if not usable:
            return None
        return self._found.pop(name if name in usable else usable[0])

    def free_places(self, number: int, first: int, count: int) -> Sequence[int]:
        """Return positions in the step for `count` groups to sample, starting at `first`. Positions that the earlier
        attempt's groups have in their names are skipped, so that names remain unique."""
        places = range(first, first + count + len(self._names))
        return [place for place in places if f"{number}.{place}" not in self._names][:count]
