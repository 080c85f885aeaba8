"""The driver's state in a run: the next rows in the data, and the rows with pending rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field, ValidationError

from megarl.algorithms.baselines import MovingAverage
from megarl.config.fields import Section
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint
from megarl.core.ranges import FiniteFloat
from megarl.data.cursor import PromptCursor
from megarl.data.offline import OfflineData
from megarl.data.prompts import PromptSet
from megarl.data.weighted_cursor import WeightedCursor

Count = Annotated[int, Field(ge=0, lt=2**53)]
Row = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,15})$")]
"""A row index as a key of a JSON object."""


class _Average(Section):
    total: FiniteFloat
    weight: FiniteFloat


class _Cursor(Section):
    num_prompts: Count
    seed: int
    shuffle: bool
    epoch: Count
    position: Count


class _WeightedCursor(Section):
    num_prompts: Count
    seed: int
    takes: Count
    rates: dict[Row, FiniteFloat]


class _Saved(Section):
    """The state that `RunState.dump` returns."""

    step: Count
    weights_version: Count
    cursor: dict[str, Any]
    average: _Average
    under_way: list[Count]
    under_way_since: list[Count]
    under_way_draws: list[Count]
    num_draws: Count
    lengths: dict[Row, FiniteFloat]


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """A row in the data whose rollouts have started but have not been trained on.

    Attributes:
        version: weight version when the rollouts first started; if they were dropped, the version from which they may
            restart.
        draw: number of rows that the run drew before this one. It distinguishes draws of the same row.
    """

    row: int
    version: int
    draw: int


@dataclass
class RunState:
    """The driver's state after `step` steps. A run can resume from it. The weight version at that point is also `step`.

    Consumes: rows from the cursor, in `draw`.
    Waits for: nothing; the queue waits for the rows' rollouts.
    Unblocked by: the queue, which takes rows out of `under_way` or puts them back.
    """

    step: int
    cursor: PromptCursor | WeightedCursor
    average: MovingAverage = field(default_factory=MovingAverage)
    """Moving average of rewards, for estimators that use it as their baseline."""
    under_way: list[PendingPrompt] = field(default_factory=list)
    """Rows with pending rollouts, in the order in which these started."""
    again: list[PendingPrompt] = field(default_factory=list)
    """Rows whose rollouts were dropped, or pending when the previous attempt ended. They are drawn before new rows."""
    lengths: dict[int, float] = field(default_factory=dict)
    """Mean number of response tokens for each row when it was last trained on, with rollout.longest_first."""
    num_draws: int = 0
    """Number of rows drawn so far. Restarts of dropped rollouts do not count."""

    def draw(self, n: int, version: int) -> list[PendingPrompt]:
        """Return the next n rows and mark them as pending. version: the current weight version."""
        rows, self.again = self.again[:n], self.again[n:]
        drawn = self.cursor.take(n - len(rows))
        rows += [PendingPrompt(row, version, self.num_draws + i) for i, row in enumerate(drawn)]
        self.num_draws += len(drawn)
        self.under_way += rows
        return rows

    def take_up(self, row: int, version: int) -> PendingPrompt:
        """Mark a row from the previous attempt as pending, because its rollouts were restored."""
        item = next(item for item in self.again if (item.row, item.version) == (row, version))
        self.again.remove(item)
        self.under_way.append(item)
        return item

    def put_back(self, items: Sequence[PendingPrompt], version: int) -> None:
        """Schedule rows with dropped rollouts again, before new rows. version: the weight version of the next step."""
        for item in items:
            self.under_way.remove(item)
        self.again += [replace(item, version=version) for item in items]

    @property
    def pending(self) -> list[PendingPrompt]:
        """The rows that were drawn and that no step has taken yet."""
        return [*self.again, *self.under_way]

    def dump(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "step": self.step,
            "weights_version": self.step,
            "cursor": self.cursor.state(),
            "average": asdict(self.average),
            "under_way": [item.row for item in self.pending],
            "lengths": {str(row): length for row, length in self.lengths.items()},
            "under_way_since": [item.version for item in self.pending],
            "under_way_draws": [item.draw for item in self.pending],
            "num_draws": self.num_draws,
        }

    @classmethod
    def restore(cls, saved: Mapping[str, Any], config: Config, data: PromptSet | OfflineData) -> RunState:
        if config.data.draws_by_weight:
            cursor = WeightedCursor.restore(saved["cursor"], weights_of(data), config.data.solved_weight)
        else:
            cursor = PromptCursor.restore(saved["cursor"])
        under_way = zip(saved["under_way"], saved["under_way_since"], saved["under_way_draws"], strict=True)
        again = [PendingPrompt(*item) for item in under_way]
        again.sort(key=lambda item: item.version)  # rows with the oldest version come first
        lengths = {int(row): length for row, length in saved["lengths"].items()}
        average, num_draws = MovingAverage(**saved["average"]), saved["num_draws"]
        return cls(saved["step"], cursor, average, again=again, lengths=lengths, num_draws=num_draws)


def saved_state(checkpoint: Checkpoint, config: Config, num_rows: int) -> Mapping[str, Any]:
    """Return the driver's state in a checkpoint of a run whose data has `num_rows` rows. Raise DamagedCheckpoint if a
    value is invalid."""
    saved: Any = checkpoint.state.get("run")
    _validate(checkpoint, "run", saved, _Saved)
    cursor = saved["cursor"]
    _validate(checkpoint, "run.cursor", cursor, _WeightedCursor if config.data.draws_by_weight else _Cursor)
    rows = {"under_way": saved["under_way"], "lengths": map(int, saved["lengths"])}
    rows["cursor.rates"] = map(int, cursor.get("rates", {}))
    num_pending = len(saved["under_way"])
    limits = [
        ("step", saved["step"] == checkpoint.step, f"differs from the checkpoint's step {checkpoint.step}"),
        ("cursor.num_prompts", cursor["num_prompts"] == num_rows, f"differs from the {num_rows} rows of the data"),
        ("cursor.position", cursor.get("position", 0) <= num_rows, f"exceeds the {num_rows} rows of the data"),
        *(
            (key, len(saved[key]) == num_pending, f"has {len(saved[key])} items, but under_way has {num_pending}")
            for key in ("under_way_since", "under_way_draws")
        ),
        (
            "under_way_draws",
            all(draw < saved["num_draws"] for draw in saved["under_way_draws"]),
            f"contains a draw that is not among the {saved['num_draws']} draws of the run",
        ),
        *(
            (key, all(row < num_rows for row in each), "contains a row that is not in the data")
            for key, each in rows.items()
        ),
    ]
    for key, is_valid, problem in limits:
        if not is_valid:
            first, _, last = key.partition(".")
            raise checkpoint.malformed(f"run.{key}", saved[first][last] if last else saved[first], problem)
    return saved


def _validate(checkpoint: Checkpoint, key: str, value: Any, kind: type[Section]) -> None:
    """Raise DamagedCheckpoint if the value of a key in a checkpoint's state does not have this type."""
    try:
        kind.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, (key, *problem["loc"])))
        raise checkpoint.malformed(key, problem["input"], f"is invalid ({problem['msg']})") from None


def weights_of(data: PromptSet | OfflineData) -> Sequence[float] | None:
    return data.weights if isinstance(data, PromptSet) else None
