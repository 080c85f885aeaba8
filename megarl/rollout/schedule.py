"""The schedule of rollouts: how many prompts are begun at which weights, and which of them a step trains on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

G = TypeVar("G")

WINDOW = 2
"""The prompts among which a step chooses, in units of those that it trains on: the oldest ones that are begun. A step
that could choose among all would prefer short responses, one that took the oldest alone would wait for the longest."""


@dataclass(slots=True, eq=False)
class _Begun(Generic[G]):
    """A group that is begun.

    latest    the version of the weights from which a step may start that trains on it
    is_sure   whether the step from that version waits for it, if none before has taken it
    """

    group: G
    latest: int
    is_sure: bool
    is_finished: bool = False


class RolloutSchedule(Generic[G]):
    """The groups of rollouts that are begun and not yet trained on, in the order of their beginning.

    Step v + 1 starts from the weights of version v. What is begun at version b has no token of an older one, so that
    the steps from b to b + max_staleness may train on it. Two rules keep that:

    - At version v at most those that step v + 1 takes are begun, and num_ahead beside them; of groups that are sure at
      most max_staleness · per_step beside them, for which there is room in the steps that may train on them.
    - A step leaves none of the sure ones behind for which there is no room later: of those that must be taken by step
      v + 1 + j at most j · per_step are left after step v + 1, for each j (the condition for jobs with deadlines).
      Where it has no more to take than those rules ask for, only the oldest can be chosen; else any of a window.

    With drops=False all groups are sure, so that nothing is dropped, and with max_staleness=0 a step then waits for all
    that is begun. With drops=True those are which had to begin again: others are dropped when they are too old.
    """

    def __init__(self, per_step: int, max_staleness: int, num_ahead: int | None = None, drops: bool = False):
        """num_ahead: None for max_staleness · per_step, at most which it is unless the schedule drops."""
        room = max_staleness * per_step
        self._per_step, self._max_staleness, self._drops = per_step, max_staleness, drops
        self._num_ahead = room if num_ahead is None else num_ahead
        self._num_beyond_room = max(0, self._num_ahead - room)
        assert drops or not self._num_beyond_room, "more is begun than steps can take in time"
        self._window = WINDOW * per_step + self._num_beyond_room
        self._begun: list[_Begun[G]] = []

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def groups(self) -> list[G]:
        return [begun.group for begun in self._begun]

    @property
    def unfinished(self) -> list[G]:
        return [begun.group for begun in self._begun if not begun.is_finished]

    @property
    def finished(self) -> list[G]:
        return [begun.group for begun in self._begun if begun.is_finished]

    def has_room(self, version: int, now: int) -> bool:
        """Returns whether steps from version `now` on can take a group of this version in time."""
        latest = version + self._max_staleness
        return latest >= now and self._can_take_by(latest, now)

    def num_to_begin(self, wanted: int, steps_left: int) -> int:
        """Returns how many groups to begin now. wanted: those that the step takes next. steps_left: the steps that
        follow it."""
        ahead = min(self._num_ahead, steps_left * self._per_step + self._num_beyond_room)
        return max(0, wanted + ahead - len(self._begun))

    def num_to_wait_for(self, wanted: int) -> int:
        """Returns how many of the groups that begin now may be sure."""
        num_sure = sum(begun.is_sure for begun in self._begun)
        return max(0, wanted + self._max_staleness * self._per_step - num_sure)

    def begin(self, group: G, version: int, turn: int | None = None, again: bool = False) -> None:
        """turn: the version with which an earlier attempt at the run began it, so that it is no later's turn than it
        was, as far as there is room. again: whether it had to begin again, after its rollouts had been dropped."""
        latest = version + self._max_staleness
        if turn is not None:
            earlier = range(max(turn + self._max_staleness, version), latest)
            latest = next((by for by in earlier if self._can_take_by(by, version)), latest)
        self._begun.append(_Begun(group, latest, again or not self._drops))

    def _can_take_by(self, latest: int, now: int) -> bool:
        """Returns whether steps from version `now` on can take one more group by this version, and those that are there
        in time."""
        return all(
            sum(begun.latest <= later for begun in self._begun) < (later - now + 1) * self._per_step
            for later in range(latest, now + self._max_staleness + 1)
        )

    def finish(self, group: G) -> None:
        next(begun for begun in self._begun if begun.group == group).is_finished = True

    def take(self, version: int, wanted: int) -> G | None:
        """Takes one of the groups that a step from this version trains on, which takes `wanted` from now on; None if it
        must wait for one that is under way."""
        for begun in self._to_choose_from(version, wanted):
            if begun.is_finished:
                self._begun.remove(begun)
                return begun.group
        return None

    def awaited(self, version: int, wanted: int) -> list[G]:
        """Returns the groups under way for one of which such a step waits."""
        return [begun.group for begun in self._to_choose_from(version, wanted) if not begun.is_finished]

    def expire(self, version: int) -> list[G]:
        """Removes the groups that are too old for a step from this version, and returns them."""
        expired = [begun for begun in self._begun if begun.latest < version]
        self._begun = [begun for begun in self._begun if begun.latest >= version]
        return [begun.group for begun in expired]

    def _to_choose_from(self, version: int, wanted: int) -> list[_Begun[G]]:
        """Returns the groups, oldest first, of which any may be taken."""
        for later in range(self._max_staleness + 1):
            urgent = [begun for begun in self._begun if begun.is_sure and begun.latest <= version + later]
            if len(urgent) - later * self._per_step >= wanted:
                return urgent[: self._window]
        return self._begun[: self._window]
