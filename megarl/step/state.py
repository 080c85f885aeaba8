"""The driver's state of a run: which rows come next, and which are under way."""

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
    """A row of the data whose rollouts have been begun and not yet trained on. version: that of the weights when they
    were begun first, or again after they had been dropped."""

    row: int
    version: int


@dataclass
class RunState:
    """The driver's state after `step` steps, from which a run resumes. The weights then have version `step`."""

    step: int
    cursor: PromptCursor | WeightedCursor
    average: MovingAverage = field(default_factory=MovingAverage)
    """The moving average of the rewards, for estimators that take it as their baseline."""
    under_way: list[PendingPrompt] = field(default_factory=list)
    """The rows whose rollouts are under way, in their order."""
    again: list[PendingPrompt] = field(default_factory=list)
    """Such rows of the attempt before, and those whose rollouts were dropped. They come before others."""
    lengths: dict[int, float] = field(default_factory=dict)
    """The mean tokens of a row's responses when it was last trained on, with rollout.longest_first."""

    def draw(self, n: int, version: int) -> list[PendingPrompt]:
        """Returns the next n rows, whose rollouts are under way from now on. version: that of the weights."""
        rows, self.again = self.again[:n], self.again[n:]
        rows += [PendingPrompt(row, version) for row in self.cursor.take(n - len(rows))]
        self.under_way += rows
        return rows

    def take_up(self, item: PendingPrompt) -> None:
        """Notes that the rollouts of a row that would come again are there."""
        self.again.remove(item)
        self.under_way.append(item)

    def put_back(self, items: Sequence[PendingPrompt], version: int) -> None:
        """Makes rows whose rollouts were dropped come again, before others. version: that of the next step's
        weights."""
        for item in items:
            self.under_way.remove(item)
        self.again += [PendingPrompt(item.row, version) for item in items]

    def dump(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
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
        again.sort(key=lambda item: item.version)  # whose turn is first
        lengths = {int(row): length for row, length in saved["lengths"].items()}
        return cls(saved["step"], cursor, MovingAverage(**saved["average"]), again=again, lengths=lengths)


def weights_of(data: PromptSet | OfflineData) -> Sequence[float] | None:
    return data.weights if isinstance(data, PromptSet) else None
