"""The driver's state in a run: the next rows in the data, and the rows with pending rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.algorithms.baselines import MovingAverage
from megarl.config.schema import Config
from megarl.data.cursor import PromptCursor
from megarl.data.offline import OfflineData
from megarl.data.prompts import PromptSet
from megarl.data.weighted_cursor import WeightedCursor


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """A row in the data whose rollouts have started but have not been trained on. version: the weight version with
    which the rollouts first started. If they were dropped, it is the version with which they may restart."""

    row: int
    version: int


@dataclass
class RunState:
    """The driver's state after `step` steps, from which a run can resume. The weight version is then also `step`."""

    step: int
    cursor: PromptCursor | WeightedCursor
    average: MovingAverage = field(default_factory=MovingAverage)
    """Moving average of rewards, for estimators that use it as their baseline."""
    under_way: list[PendingPrompt] = field(default_factory=list)
    """Rows with pending rollouts, in the order in which the rollouts started."""
    again: list[PendingPrompt] = field(default_factory=list)
    """Rows whose rollouts were pending when the previous attempt ended, or were dropped. They come before new rows."""
    lengths: dict[int, float] = field(default_factory=dict)
    """Mean number of response tokens for each row when it was last trained on, with rollout.longest_first."""

    def draw(self, n: int, version: int) -> list[PendingPrompt]:
        """Return the next n rows and mark them as pending. version: the current weight version."""
        rows, self.again = self.again[:n], self.again[n:]
        rows += [PendingPrompt(row, version) for row in self.cursor.take(n - len(rows))]
        self.under_way += rows
        return rows

    def take_up(self, item: PendingPrompt) -> None:
        """Mark a row from the previous attempt as pending, because its rollouts were restored."""
        self.again.remove(item)
        self.under_way.append(item)

    def put_back(self, items: Sequence[PendingPrompt], version: int) -> None:
        """Schedule rows with dropped rollouts again, before new rows. version: the weight version for the next step."""
        for item in items:
            self.under_way.remove(item)
        self.again += [PendingPrompt(item.row, version) for item in items]

    def dump(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "step": self.step,
            "weights_version": self.step,
            "cursor": self.cursor.state(),
            "average": asdict(self.average),
            "under_way": [item.row for item in (*self.again, *self.under_way)],
            "lengths": {str(row): length for row, length in self.lengths.items()},
            "under_way_since": [item.version for item in (*self.again, *self.under_way)],
        }

    @classmethod
    def restore(cls, saved: Mapping[str, Any], config: Config, data: PromptSet | OfflineData) -> RunState:
        if config.data.draws_by_weight:
            cursor = WeightedCursor.restore(saved["cursor"], weights_of(data), config.data.solved_weight)
        else:
            cursor = PromptCursor.restore(saved["cursor"])
        under_way = zip(saved["under_way"], saved["under_way_since"], strict=True)
        again = [PendingPrompt(row, version) for row, version in under_way]
        again.sort(key=lambda item: item.version)  # rows with the oldest version come first
        lengths = {int(row): length for row, length in saved["lengths"].items()}
        return cls(saved["step"], cursor, MovingAverage(**saved["average"]), again=again, lengths=lengths)


def weights_of(data: PromptSet | OfflineData) -> Sequence[float] | None:
    return data.weights if isinstance(data, PromptSet) else None
