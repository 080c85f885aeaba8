"""Copies of trained ranks' state in shared memory, for replacement processes to restore."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from megarl.cluster.groups.ranks import RankActor, RankGroup
from megarl.cluster.groups.remote import remote
from megarl.cluster.placement import Process
from megarl.cluster.session import Session
from megarl.cluster.supervision import segments
from megarl.cluster.supervision.scratch import make_memory_folder, own_scratch
from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.core.copy_files import slot_of
from megarl.core.errors import InfrastructureFailure
from megarl.core.files import DISK_FULL

READ_ONLY_METHODS = {"prepare_refit", "send", "checksums", "start_delivery", "finish_copies"}
"""Methods that may run while a thread copies the rank's state, because they neither change nor move it.
`examine_device` is excluded, because its speed probe would compete with the copy. It is called before the copy starts,
so it does not delay the step."""


class CopyingRank(RankActor):
    """A rank with copies of its state. Its worker is a TrainerWorker."""

    def copy_room(self) -> tuple[int, int]:
        """Return the size of this rank's copies and the free shared memory on its node, in bytes."""
        return self._worker.copy_bytes(), shutil.disk_usage(segments.SHARED_MEMORY).free

    def _find(self, method: str) -> Callable[..., Any]:
        if self._worker is not None and method not in READ_ONLY_METHODS:
            self._worker.wait_for_copy()
        return super()._find(method)

    def copy_state(self, step: int) -> str:
        return _unless_full(lambda: self._worker.copy_state(step, make_memory_folder(own_scratch())))

    def start_delivery(self, step: int, keepers: Sequence[int]) -> None:
        self._worker.start_delivery(step, make_memory_folder(own_scratch()), keepers)

    def discard_copies(self) -> None:
        self._worker.discard_copies(make_memory_folder(own_scratch()))

    def restore_state(self, step: int, keepers: Sequence[int]) -> None:
        self._worker.restore_state(step, make_memory_folder(own_scratch()), keepers)


@ray.remote(num_cpus=0, max_retries=0)
def _ranks_with_copy(names: Sequence[str], step: int) -> set[str]:
    """Return the names of the ranks whose copies of the state after `step` are on this task's node."""
    folder = make_memory_folder(own_scratch())
    return {name for name in names if slot_of(folder, name, step) is not None}


def _unless_full(copy: Callable[[], None]) -> str:
    """Run `copy`. Return "", or the reason if the copy does not fit in shared memory. The run then continues without
    it."""
    try:
        copy()
    except (InfrastructureFailure, OSError) as failure:
        if isinstance(failure, OSError) and failure.errno not in DISK_FULL:
            raise
        return str(failure)
    return ""


def _first_problem(parts: Sequence[str]) -> str:
    return next(filter(None, parts), "")


def _first_problems(parts: Sequence[tuple[str, str] | None]) -> tuple[str, str] | None:
    finished = [part for part in parts if part is not None]
    if len(finished) < len(parts):
        return None
    copied, delivered = map(_first_problem, zip(*finished, strict=True))
    return copied, delivered


class CopyingGroup(RankGroup):
    """All ranks of a model with copies of its state."""

    def __init__(self, session: Session, config: Config, role: Role, model_folder: Path, processes: Sequence[Process]):
        super().__init__(session, config, role, model_folder, processes, config.cluster.replace_ranks)
        self._worker_role = role  # names the files of checkpoints and copies

    @remote(timeout="checkpoint")
    def copy_room(self) -> tuple[int, int]:
        """Return the size of each rank's copies and the free shared memory on its node, in bytes."""
        ...

    @remote(timeout="checkpoint", join=_first_problem)
    def copy_state(self, step: int) -> str:
        """Start copying each rank's state after `step` to its node's shared memory, for a replacement process to
        restore. The result is "" or describes a rank whose node's shared memory is full. The next call on a rank waits
        until its state is copied, unless the method is in READ_ONLY_METHODS."""
        ...

    @remote(timeout="checkpoint")
    def start_delivery(self, step: int, keepers: Sequence[int]) -> None:
        """Start delivering each rank's copy of the state after `step` to its keeper. See core.partners.keepers."""

    @remote(timeout="checkpoint", join=_first_problems)
    def finish_copies(self, waits: bool) -> tuple[str, str] | None:
        """Return the results of the latest copies and of their delivery, each as in `copy_state`. If any are
        unfinished, wait for them or, unless `waits`, return None."""
        ...

    @remote(timeout="checkpoint")
    def discard_copies(self) -> None:
        """Discard all copies of the model."""

    @remote(timeout="checkpoint")
    def restore_state(self, step: int, keepers: Sequence[int]) -> None:
        """Restore the state after `step` from copies made by earlier processes of these ranks."""

    def holds_copies(self, step: int) -> bool:
        """Return whether each rank has a complete copy of its state after `step` on a node that is not lost. A node
        lost during
        the call counts as having no copies. No rank may be running: see `kill`."""
        lost = self._session.members.lost()
        placed = {p.node.number: p for p in self._processes if p.node.number not in lost}
        names = [f"{self._worker_role}-{process.index}" for process in self._processes]
        calls = {
            f"node {number}": _ranks_with_copy.options(scheduling_strategy=self._session.node_of(p)).remote(names, step)
            for number, p in placed.items()
        }
        answers = self._session.submit(calls, f"{self.role} copies", "start", may_fail=list(calls)).result()
        return len(set().union(*answers.values.values())) == len(self._processes)
