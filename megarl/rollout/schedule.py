"""Decide how many groups to start with each weight version, and on which groups a step trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

G = TypeVar("G")

WINDOW = 2
"""A step chooses among the WINDOW · per_step oldest groups. Choosing among all groups would favor short responses.
Always taking the oldest groups would mean waiting for the longest response."""


@dataclass(slots=True, eq=False)
class _Started(Generic[G]):
    """A group whose rollouts have been started.

    Attributes:
        latest: latest version from which a step that trains on the group may start.
        is_guaranteed: whether the step from that version waits for the group if no earlier step has taken it.
    """

    group: G
    latest: int
    is_guaranteed: bool
    is_finished: bool = False


class RolloutSchedule(Generic[G]):
    """The groups that have been started but not trained on yet, oldest first.

    Step v + 1 starts from weight version v. A group started at version b has no tokens from older versions, so steps
    that start from versions b to b + max_staleness may train on it. Two rules ensure that one of these steps can:

    - At version v, at most num_ahead groups are started in addition to those that step v + 1 takes. At most
      max_staleness · per_step of the additional groups are guaranteed, because later steps have no room for more.
    - A step takes every guaranteed group for which later steps have no room: for each j, at most j · per_step of the
      groups that must be taken by step v + 1 + j are left after step v + 1 (as in deadline scheduling). If these groups
      fill the step, it chooses only among them; otherwise, it chooses among a window of the oldest groups.

    With drops=False, all groups are guaranteed and none are dropped; with max_staleness=0, a step then waits for all
    started groups. With drops=True, only restarted groups are guaranteed; the rest are dropped when they are too old.

    Consumes: groups, when their rollouts start. Waits for: nothing; `awaited` returns the groups for which its caller
    must wait. Unblocked by: `finish`. `take` may then return the group.
    """

    def __init__(self, per_step: int, max_staleness: int, num_ahead: int | None = None, drops: bool = False):
        """`num_ahead` is the number of groups to start ahead of the current step. None: max_staleness · per_step, which
        is the maximum unless `drops` is set."""
        room = max_staleness * per_step
        self._per_step, self._max_staleness, self._drops = per_step, max_staleness, drops
        self._num_ahead = room if num_ahead is None else num_ahead
        self._num_beyond_room = max(0, self._num_ahead - room)
        assert drops or not self._num_beyond_room, (
            "num_ahead exceeds the number of groups that steps can train on in time"
        )
        self._window = WINDOW * per_step + self._num_beyond_room
        self._started: list[_Started[G]] = []

    def __len__(self) -> int:
        return len(self._started)

    @property
    def unfinished(self) -> list[G]:
        return [started.group for started in self._started if not started.is_finished]

    @property
    def finished(self) -> list[G]:
        return [started.group for started in self._started if started.is_finished]

    def has_room(self, version: int, now: int) -> bool:
        """Return whether steps from version `now` onward can take one more group from `version` in time."""
        latest = version + self._max_staleness
        return latest >= now and self._can_take_by(latest, now)

    def num_to_begin(self, wanted: int, steps_left: int) -> int:
        """Return the number of groups to start now. The step still needs `wanted`, and `steps_left` steps follow."""
        ahead = min(self._num_ahead, steps_left * self._per_step + self._num_beyond_room)
        return max(0, wanted + ahead - len(self._started))

    def num_to_wait_for(self, wanted: int) -> int:
        """Return how many of the groups to start now may be guaranteed."""
        num_guaranteed = sum(started.is_guaranteed for started in self._started)
        return max(0, wanted + self._max_staleness * self._per_step - num_guaranteed)

    def begin(
        self,
        group: G,
        version: int,
        earlier_version: int | None = None,
        is_restart: bool = False,
        index: int | None = None,
    ) -> None:
        """Add a group that is started now.

        Args:
            index: its position among the started groups, which are in the order in which steps prefer them. None: last.
            earlier_version: version at which an earlier attempt of the run started the group. The group keeps the
                deadline from that version if there is room.
            is_restart: whether the group is restarted because its rollouts were dropped.
        """
        latest = version + self._max_staleness
        if earlier_version is not None:
            earlier = range(max(earlier_version + self._max_staleness, version), latest)
            latest = next((deadline for deadline in earlier if self._can_take_by(deadline, version)), latest)
        index = len(self._started) if index is None else index
        self._started.insert(index, _Started(group, latest, is_restart or not self._drops))

    def _can_take_by(self, latest: int, now: int) -> bool:
        """Return whether steps can take one more group by version `latest`, and all started groups in time. `now` is
        the version from which the next step starts."""
        return all(
            sum(started.latest <= later for started in self._started) < (later - now + 1) * self._per_step
            for later in range(latest, now + self._max_staleness + 1)
        )

    def finish(self, group: G) -> None:
        next(started for started in self._started if started.group == group).is_finished = True

    def take(self, version: int, wanted: int) -> G | None:
        """Remove and return a finished group for the step that starts from `version` and still needs `wanted` groups.
        Return None if the step must wait for an unfinished group."""
        for started in self._candidates(version, wanted):
            if started.is_finished:
                self._started.remove(started)
                return started.group
        return None

    def awaited(self, version: int, wanted: int) -> list[G]:
        """Return the unfinished groups that the step may take. The caller waits until one of them finishes."""
        return [started.group for started in self._candidates(version, wanted) if not started.is_finished]

    def expire(self, version: int) -> list[G]:
        """Remove and return the groups that are too old for the step that starts from `version`."""
        expired = [started for started in self._started if started.latest < version]
        self._started = [started for started in self._started if started.latest >= version]
        return [started.group for started in expired]

    def _candidates(self, version: int, wanted: int) -> list[_Started[G]]:
        """Return the groups that the step may take, oldest first."""
        for later in range(self._max_staleness + 1):
            urgent = [
                started for started in self._started if started.is_guaranteed and started.latest <= version + later
            ]
            if len(urgent) - later * self._per_step >= wanted:
                return urgent[: self._window]
        return self._started[: self._window]
