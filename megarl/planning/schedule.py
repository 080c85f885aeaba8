"""The schedule of rollouts: how many prompts are begun at which weights, and which of them a step trains on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

G = TypeVar("G")

WINDOW = 2
"""The prompts among which a step chooses, in units of those that it trains on: the oldest ones that are begun. A step
that could choose among all would prefer short responses, one that took the oldest alone would wait for the longest."""


@dataclass(slots=True)
class _Begun(Generic[G]):
    """A group that is begun. latest: the version of the weights from which a step may start that trains on it."""

    group: G
    latest: int
    is_finished: bool = False


class RolloutSchedule(Generic[G]):
    """The groups of rollouts that are begun and not yet trained on, in the order of their beginning.

    Step v + 1 starts from the weights of version v. What is begun at version b has no token of an older one, so that
    the steps from b to b + max_staleness may train on it. Two rules keep that, and nothing is ever dropped:

    - At version v at most those that step v + 1 takes are begun, and max_staleness · per_step beside them.
    - A step leaves none behind for which there is no room later: of those that must be taken by step v + 1 + j at most
      j · per_step are left after step v + 1, for each j (the condition for jobs with deadlines). Where it has no more
      to take than those rules ask for, only the oldest can be chosen; else any of a window.

    With max_staleness=0 both say that a step waits for all that is begun.
    """

    def __init__(self, per_step: int, max_staleness: int):
        self._per_step, self._max_staleness = per_step, max_staleness
        self._begun: list[_Begun[G]] = []

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def groups(self) -> list[G]:
        return [begun.group for begun in self._begun]

    @property
    def unfinished(self) -> list[G]:
        return [begun.group for begun in self._begun if not begun.is_finished]

    def num_to_begin(self, wanted: int, steps_left: int) -> int:
        """Returns how many groups to begin now. wanted: those that the step takes next. steps_left: the steps that
        follow it."""
        ahead = min(self._max_staleness, steps_left) * self._per_step
        return max(0, wanted + ahead - len(self._begun))

    def begin(self, group: G, version: int) -> None:
        self._begun.append(_Begun(group, version + self._max_staleness))

    def finish(self, group: G) -> None:
        next(begun for begun in self._begun if begun.group == group).is_finished = True

    def take(self, version: int, wanted: int) -> G | None:
        """Takes one of the groups that a step from this version trains on, which takes `wanted` from now on; None if it
        must wait for one that is under way."""
        for place, begun in enumerate(self._begun[: self._num_to_choose_from(version, wanted)]):
            if begun.is_finished:
                return self._begun.pop(place).group
        return None

    def _num_to_choose_from(self, version: int, wanted: int) -> int:
        """Returns the number of groups, the oldest, of which any may be taken."""
        for later in range(self._max_staleness + 1):
            urgent = sum(begun.latest <= version + later for begun in self._begun)  # the oldest, as versions only grow
            if urgent - later * self._per_step >= wanted:
                return min(urgent, WINDOW * self._per_step)
        return WINDOW * self._per_step
