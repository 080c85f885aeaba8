"""The rules that a sample ledger must satisfy, applied line by line."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.core.files import shown
from megarl.data.cursor import PromptCursor
from megarl.run.audit.chain import MALFORMED, Broken

FORMAT = 1
"""Version of the ledger's format."""

SCOPES = ("sample", "all")
"""Parts of the weights whose checksums a refit compares."""

MAX_REASONS = 5
"""Maximum number of distinct reasons that a proof lists."""

MAX_ROWS = 2**23
"""Maximum number of data rows for which the order of an epoch is computed. The computation takes seconds."""

COUNTS = ("draw", "row", "rollouts", "samples", "turns", "tokens", "failed")
TABLE = (*COUNTS, "prompt", "group", "oldest", "newest")


class _Rule(Exception):
    """A rule that a line violates: what the rule expects, and what the line contains."""


@dataclass(slots=True)
class Step:
    """A step that counts: no later line has undone it. `groups` lists all groups that it took, and `num_dropped` is the
    number of dropped samples."""

    number: int
    line: int
    first_draw: int
    taken: array[int]
    rows: array[int]
    groups: list[str]
    num_dropped: int
    weights: Mapping[str, Any]


@dataclass(slots=True)
class Totals:
    """Totals over one step, or over all steps that count."""

    trained: int = 0
    rollouts: int = 0
    turns: int = 0
    tokens: int = 0
    oldest: int = 0
    """Maximum number of versions between the oldest token of a step and the weights from which the step starts."""
    left_out: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    unconfirmed: int = 0
    """Groups with tokens from a version whose weights the engines have not confirmed."""

    def add(self, other: Totals, sign: int = 1) -> None:
        for name in ("trained", "rollouts", "turns", "tokens", "unconfirmed"):
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))
        self.oldest = max(self.oldest, other.oldest)
        for name in ("left_out", "failed", "dropped"):
            for reason, count in getattr(other, name).items():
                getattr(self, name)[reason] += sign * count


class History:
    """The run's history as recorded in the lines read so far.

    Attributes:
        base, head: the ledger covers the steps after `base` up to `head`.
        reached: the last step that the other files may still contain: `head`, or a later step if a `back` line follows
            it, because the files are cut after that line is written.
    """

    def __init__(self, kept: Collection[int] = (), saved: Collection[int] = ()) -> None:
        """kept, saved: the steps with rollout files and with checkpoints, which are compared with the ledger."""
        self._kept, self._saved = frozenset(kept), frozenset(saved)
        self.tables: dict[int, list[dict[str, Any]]] = {}
        """Group tables of the steps that count and have a rollout file."""
        self.pending: dict[int, tuple[int, dict[int, int]]] = {}
        """Number of draws and the pending rows, by draw, after each saved step."""
        self.line = 0
        self.timeline = -1
        self.undone = self.num_starts = self.num_refits = self.num_same_weights = 0
        """Counts of undone steps, of attempts after the first, of these attempts' first refits, and of the first refits
        whose checksums match the step's."""
        self.attempts: dict[int, dict[str, Any]] = {}
        self._begin(0)

    def _begin(self, step: int) -> None:
        self.base = self.head = self.reached = step
        self.steps: list[Step] = []
        self.totals = Totals()
        self._per_step: list[Totals] = []
        self.open: dict[int, int] = {}
        """draw -> row, for rows that no step has taken yet."""
        self.num_draws = self.first_draw = 0
        self.checkpoints: dict[int, str] = {}
        self.evaluations: dict[tuple[int, str], Mapping[str, Any]] = {}
        self.weights: dict[int, Mapping[str, Any]] = {}
        """version -> digests of the weights in the engines."""
        self._groups: set[str] = set()
        self._awaits_refit = True
        self.has_ended = False
        self.settings: Mapping[str, Any] = {}
        self._order: tuple[int, Sequence[int]] = (-1, ())

    def read(self, number: int, content: Mapping[str, Any], place: str) -> None:
        """Apply the rules to the next line. Raise Broken if it violates one."""
        self.line = number
        try:
            kind = content["kind"]
            if kind not in ("run", "back", "refit", "step", "evaluation", "checkpoint", "end"):
                raise _Rule("a known kind of line", f"kind={shown(kind)}")
            require(type(content["step"]) is int and content["step"] >= 0, "a step", shown(content["step"]))
            expected = self.timeline + (kind in ("run", "back"))
            require(content["timeline"] == expected, f"timeline {expected}", shown(content["timeline"]))
            require(number > 1 or kind == "run", "a line `run`, which begins a ledger", f"a line `{kind}`")
            is_after_end = self.has_ended and kind not in ("run", "back")
            require(not is_after_end, "no line after `end`", f"a line `{kind}`")
            getattr(self, f"_read_{kind}")(content["step"], content)
        except _Rule as rule:
            raise Broken(place, *map(str, rule.args)) from None
        except MALFORMED as error:
            raise Broken(place, "a complete line", f"a malformed one ({type(error).__name__}: {error})") from None

    def _read_run(self, step: int, content: Mapping[str, Any]) -> None:
        require(content["format"] == FORMAT, f"format {FORMAT}", shown(content["format"]))
        self.timeline += 1
        self.undone += len(self.steps)
        self.num_starts += self.timeline > 0
        self.tables.clear()
        self._begin(step)
        self._set(content)
        self.num_draws = self.first_draw = natural(content["num_draws"])
        pending = content["pending"]
        self.open = dict(zip(naturals(pending["draw"]), naturals(pending["row"]), strict=True))
        require(all(draw < self.num_draws for draw in self.open), "pending draws of the run", shown(pending["draw"]))
        require(len(self.open) == len(pending["draw"]), "no duplicate pending draw", shown(pending["draw"]))
        if content["checkpoint"] is not None:
            self.checkpoints[step] = content["checkpoint"]

    def _read_back(self, step: int, content: Mapping[str, Any]) -> None:
        require(
            self.base <= step <= self.head, f"a return to one of the steps {self.base} to {self.head}", f"step {step}"
        )
        self.timeline += 1
        self.num_starts += 1
        self.has_ended, self._awaits_refit = False, True
        self.reached = max(self.reached, self.head)
        while self.head > step:
            self._undo()
        for later in [number for number in self.checkpoints if number > step]:
            del self.checkpoints[later]
        for key in [key for key in self.evaluations if key[0] > step]:
            del self.evaluations[key]
        data = self.settings["data"]
        require(content["data"] == data, f"the run's data {data}", shown(content["data"]))
        self._set(content)
        expected, found = self.checkpoints.get(step), content["checkpoint"]
        require(found == expected, f"the recorded checkpoint {expected} of step {step}", shown(found))
        require(content["num_draws"] == self.num_draws, f"{self.num_draws} drawn rows", shown(content["num_draws"]))
        pending = dict(zip(content["pending"]["draw"], content["pending"]["row"], strict=True))
        if pending != self.open:
            difference = sorted(pending.items() ^ self.open.items())[:MAX_REASONS]
            raise _Rule(
                f"the {len(self.open)} pending rows after step {step}",
                f"{len(pending)}, with differences in these (draw, row): {difference}",
            )

    def _set(self, content: Mapping[str, Any]) -> None:
        """Check and store the settings of an attempt."""
        for name in ("max_staleness", "prompts_per_step"):
            is_valid = content[name] is None or natural(content[name]) >= 0
            require(is_valid, f"a number or null as {name}", shown(content[name]))
        natural(content["data"]["rows"])
        self.settings = self.attempts[natural(content["attempt"])] = dict(content)

    def _undo(self) -> None:
        """Undo the last step."""
        step = self.steps.pop()
        self.undone += 1
        self.head -= 1
        self.open.update(zip(step.taken, step.rows, strict=True))
        for draw in range(step.first_draw, self.num_draws):
            del self.open[draw]
        self.num_draws = step.first_draw
        self._groups.difference_update(step.groups)
        self.tables.pop(step.number, None)
        self.totals.add(self._per_step.pop(), -1)
        self.totals.oldest = max((each.oldest for each in self._per_step), default=0)

    def _read_refit(self, step: int, content: Mapping[str, Any]) -> None:
        require(step == self.head, f"a refit with the weights of step {self.head}", f"step {step}")
        weights, earlier = content["weights"], self.weights.get(step)
        self._check_weights(step, weights)
        if earlier is not None:
            self.num_refits += 1
            self.num_same_weights += self._check_same(step, earlier, weights)
        else:
            self.weights[step] = weights
        self._awaits_refit = False

    def _check_weights(self, step: int, weights: Mapping[str, Any]) -> None:
        require(weights["version"] == step, f"weight version {step}", shown(weights["version"]))
        require(natural(weights["num_engines"]) > 0, "an engine", "none")
        for scope in SCOPES:
            if scope in weights:
                trainer, engines = weights[scope]["trainer"], weights[scope]["engines"]
                is_equal = isinstance(trainer, str) and engines in (None, trainer)
                require(is_equal, f"engines with the trainer's checksum {trainer}", shown(engines))

    def _check_same(self, step: int, earlier: Mapping[str, Any], weights: Mapping[str, Any]) -> bool:
        """Check that the weights of `step` have the same checksums as before. Return whether any could be compared."""
        compared = [scope for scope in SCOPES if scope in earlier and scope in weights]
        compared = [scope for scope in compared if earlier[scope]["regions"] == weights[scope]["regions"]]
        for scope in compared:
            before, after = earlier[scope]["trainer"], weights[scope]["trainer"]
            require(after == before, f"the weights of step {step} with checksum {before}", shown(after))
        return bool(compared)

    def _read_step(self, step: int, content: Mapping[str, Any]) -> None:
        require(step == self.head + 1, f"step {self.head + 1}", f"step {step}")
        first_draw, weights = self.num_draws, content["weights"]
        if weights:
            require(not self._awaits_refit, "a refit before the first step of an attempt", f"step {step}")
        self._draw(content["drawn"])
        tables = [content[name] for name in ("trained", "left_out") if content[name]]
        taken, rows, groups, totals = array("q"), array("q"), [], Totals()
        for table in tables:
            require(len({len(table[name]) for name in TABLE}) == 1, "columns of one length", "different lengths")
            self._take(step, table)
            self._check_versions(step, table, totals)
            for name in ("rollouts", "turns", "tokens"):
                setattr(totals, name, getattr(totals, name) + sum(table[name]))
            taken.extend(table["draw"])
            rows.extend(table["row"])
            groups += table["group"]
        new = set(groups)
        if len(new) < len(groups) or not self._groups.isdisjoint(new):
            again = next(name for name in groups if name in self._groups or groups.count(name) > 1)
            raise _Rule("each group in one step only", f"group {again} again")
        self._groups |= new
        totals.trained = len(content["trained"].get("draw", ()))
        totals.left_out.update(content["left_out"].get("why", ()))
        self._check_number(totals)
        self._check_failures(tables, content["failed"], totals)
        num_dropped = self._check_dropped(content["dropped"], taken, totals)
        if weights:
            self._check_weights(step, weights)
        self.weights[step] = weights
        self.steps.append(Step(step, self.line, first_draw, taken, rows, groups, num_dropped, weights))
        self._per_step.append(totals)
        self.totals.add(totals)
        if step in self._kept:
            self.tables[step] = tables
        if step in self._saved:
            self.pending[step] = self.num_draws, dict(self.open)
        self.head = self.reached = step

    @property
    def knows_order(self) -> bool:
        """Whether the order of the draws is determined by the data's size and the seed, and can be computed."""
        return self.settings["data"]["shuffle"] is not None and self.settings["data"]["rows"] <= MAX_ROWS

    def _draw(self, rows: Sequence[int]) -> None:
        """Add newly drawn rows, in the order of the data."""
        naturals(rows)
        data = self.settings["data"]
        size = data["rows"]
        for row in rows:
            if row >= size:
                raise _Rule(f"one of the {size} rows of the data", f"row {row}")
            if self.knows_order:
                epoch, position = divmod(self.num_draws, size)
                if self._order[0] != epoch:
                    state = {"num_prompts": size, "seed": data["seed"], "shuffle": data["shuffle"], "position": 0}
                    self._order = epoch, PromptCursor.restore({**state, "epoch": epoch}).take(size)  # pyright: ignore[reportArgumentType]
                expected = self._order[1][position]
                if row != expected:
                    raise _Rule(f"row {expected} as draw {self.num_draws} (epoch {epoch})", f"row {row}")
            self.open[self.num_draws] = row
            self.num_draws += 1

    def _take(self, step: int, table: Mapping[str, Sequence[Any]]) -> None:
        """Take the rows of a table's groups. Each row must be drawn and not yet taken."""
        for name in COUNTS:
            naturals(table[name])
        for draw, row in zip(table["draw"], table["row"], strict=True):
            if self.open.pop(draw, None) != row:
                raise _Rule(f"a pending row as draw {draw}", f"row {row}, {self._fate(draw)}")
        for rollouts, failed, samples in zip(table["rollouts"], table["failed"], table["samples"], strict=True):
            if failed > rollouts or not samples:
                raise _Rule(
                    "at most as many failures as rollouts, and a sample", f"{failed} failures, {samples} samples"
                )

    def _fate(self, draw: int) -> str:
        """Describe what happened to a draw that is not pending."""
        if draw >= self.num_draws:
            return "which was not drawn"
        step = next((step for step in self.steps if draw in step.taken), None)
        if step is None:
            return "which is another row, or taken twice in this step"
        return f"which step {step.number} (line {step.line}) took"

    def _check_versions(self, step: int, table: Mapping[str, Sequence[Any]], totals: Totals) -> None:
        bound = self.settings["max_staleness"]
        earliest = step if bound is None else max(0, step - 1 - bound)
        unconfirmed = [version for version in range(max(earliest, self.base), step) if not self.is_confirmed(version)]
        for oldest, newest, draw in zip(table["oldest"], table["newest"], table["draw"], strict=True):
            if oldest is None and newest is None:  # no token was sampled
                continue
            if type(oldest) is not int or type(newest) is not int or not earliest <= oldest <= newest < step:
                raise _Rule(
                    f"tokens of draw {draw} from versions {earliest} to {step - 1} (rollout.max_staleness={bound})",
                    f"versions {shown(oldest)} to {shown(newest)}",
                )
            totals.oldest = max(totals.oldest, step - 1 - oldest)
            totals.unconfirmed += oldest < self.base or any(oldest <= version <= newest for version in unconfirmed)

    @property
    def num_confirmed(self) -> int:
        """Number of steps after which the engines confirmed the trainer's checksums."""
        return sum(self.is_confirmed(step.number) for step in self.steps)

    def is_confirmed(self, version: int) -> bool:
        """Return whether all engines have confirmed checksums of the trainer's weights for this version."""
        weights = self.weights.get(version) or {}
        return any(scope in weights and weights[scope]["engines"] is not None for scope in SCOPES)

    def _check_number(self, totals: Totals) -> None:
        """Check that the step took at least prompts_per_step groups, and trained on exactly that many or, if fewer have
        a score, on all of these."""
        wanted, has_spare = self.settings["prompts_per_step"], totals.left_out.keys() - {"no score"}
        num_taken = totals.trained + sum(totals.left_out.values())
        require(num_taken >= wanted, f"at least {wanted} groups (batch.prompts_per_step)", f"{num_taken}")
        is_right = totals.trained == wanted or (totals.trained < wanted and not has_spare)
        require(is_right, f"{wanted} trained groups (batch.prompts_per_step)", f"{totals.trained}")

    def _check_failures(
        self, tables: Sequence[Mapping[str, Any]], failed: Mapping[str, Sequence[str]], totals: Totals
    ) -> None:
        names = failed.get("rollout", ())
        reasons = failed.get("why", ())
        require(len(names) == len(reasons) == len(set(names)), "a reason for each failed rollout", f"{len(reasons)}")
        found = Counter(name.rpartition(".")[0] for name in names)
        expected = {
            group: count
            for table in tables
            for group, count in zip(table["group"], table["failed"], strict=True)
            if count
        }
        require(found == expected, f"failed rollouts by group {shown(expected)}", shown(dict(found)))
        totals.failed.update(reasons)

    def _check_dropped(self, dropped: Mapping[str, Sequence[Any]], taken: Sequence[int], totals: Totals) -> int:
        """Check that the row of each dropped group is still pending or was taken by the step in a later round. Return
        the number of dropped samples."""
        draws, reasons = dropped.get("draw", ()), dropped.get("why", ())
        for draw in draws:
            if draw not in self.open and draw not in taken:
                raise _Rule(f"a pending row as draw {draw}", f"a dropped group whose row {self._fate(draw)}")
        require(len(reasons) == len(draws), "a reason for each dropped group", f"{len(reasons)} reasons")
        totals.dropped.update(reasons)
        return sum(naturals(dropped.get("samples", ())))

    def _read_evaluation(self, step: int, content: Mapping[str, Any]) -> None:
        require(step == self.head, f"an evaluation after step {self.head}", f"step {step}")
        for each in content["sets"]:
            key = step, each["set"]
            require(key not in self.evaluations, f"one evaluation of {each['set']} after step {step}", "another one")
            naturals([each["prompts"], each["rollouts"], each["failed"]])
            require(each["failed"] <= each["rollouts"], "at most as many failures as rollouts", shown(each["failed"]))
            self.evaluations[key] = each

    def _read_checkpoint(self, step: int, content: Mapping[str, Any]) -> None:
        is_live = self.base < step <= self.head and step not in self.checkpoints
        require(is_live, f"a new checkpoint of a step up to {self.head}", f"one of step {step}")
        require(isinstance(content["checkpoint"], str), "a checkpoint's SHA-256", shown(content["checkpoint"]))
        self.checkpoints[step] = content["checkpoint"]

    def _read_end(self, step: int, content: Mapping[str, Any]) -> None:
        require(step == self.head, f"the end after step {self.head}", f"step {step}")
        self.has_ended = True


def require(holds: bool, expected: str, found: str) -> None:
    if not holds:
        raise _Rule(expected, found)


def natural(value: Any) -> int:
    naturals([value])
    return value


def naturals(values: Iterable[Any]) -> Sequence[int]:
    """Return the values as a list. Raise _Rule unless all are integers from 0 to 2^63 − 1."""
    listed = list(values)
    is_valid = set(map(type, listed)) <= {int} and (not listed or 0 <= min(listed) <= max(listed) < 2**63)
    require(is_valid, "nonnegative integers below 2^63", shown(listed))
    return listed
