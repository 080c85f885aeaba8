"""Checks all data rows with built-in reward functions before a run starts."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from megarl.config.schema import Config
from megarl.core.cores import usable_cores
from megarl.core.errors import UserError
from megarl.core.prompt import Prompt
from megarl.rewards.pool import FunctionPool, function_pool

ROWS_PER_CALL = 256

ROWS_PER_PROCESS = 2000
"""Number of rows per process. For fewer rows, a process takes longer to start than it saves."""

MAX_NAMED = 3
"""Maximum number of rows that a message names."""

Row = tuple[Any, Mapping[str, Any]]
"""(answer, data columns for the check)."""


def check_rows(config: Config, pool: FunctionPool, prompts: Sequence[Prompt]) -> None:
    """Check all rows with the built-in functions that apply to them. Raise UserError with one line per function that
    would fail on every response to some rows. Only print a warning if rewards.failure_limit permits these rows to fail.
    `pool` holds the run's functions; large data is checked by additional processes."""
    if not pool.row_checks:
        return
    num_processes = min(usable_cores(), len(prompts) // ROWS_PER_PROCESS)
    if num_processes <= 1:
        lines = _problem_lines(pool, prompts)
    else:
        with closing(function_pool(config, num_processes)) as larger_pool:
            lines = _problem_lines(larger_pool, prompts)
    failures = [f"rewards.functions: {line}" for line, _ in lines]
    if sum(num_rows for _, num_rows in lines) > config.rewards.failure_limit * len(prompts):
        raise UserError("\n".join(failures))
    for failure in failures:
        print(f"megarl: warning: {failure}", file=sys.stderr, flush=True)


def require_rows(prompts: Sequence[Prompt], check: Callable[[Any], object]) -> None:
    """Check all answers in this process. Raise UserError if `check` raises ValueError for any of them."""
    require_prompts(prompts, lambda prompt: check(prompt.answer))


def require_prompts(prompts: Sequence[Prompt], check: Callable[[Prompt], object]) -> None:
    """Check all prompts in this process. Raise UserError if `check` raises ValueError for any of them."""
    problems = []
    for prompt in prompts:
        try:
            check(prompt)
        except ValueError as error:
            problems.append((prompt.id, str(error)))
    if problems:
        raise UserError(_describe(problems))


def _problem_lines(pool: FunctionPool, prompts: Sequence[Prompt]) -> list[tuple[str, int]]:
    """Return (line, number of rows) for each function that cannot score some rows."""
    found = ((function, _problems(pool, function, prompts)) for function in pool.row_checks)
    return [(_describe(problems), len(problems)) for _, problems in found if problems]


def _problems(pool: FunctionPool, function: str, prompts: Sequence[Prompt]) -> list[tuple[str, str]]:
    """Return (name, problem) for each row that the function cannot score. Identical rows are checked once."""
    columns = pool.row_checks[function]
    hashes, rows = [], dict[bytes, Row]()
    judged = [prompt for prompt in prompts if pool.judges(function, prompt)]
    for prompt in judged:
        row = prompt.answer, {name: prompt.columns[name] for name in columns if name in prompt.columns}
        hashes.append(hashlib.blake2b(pickle.dumps(row), digest_size=16).digest())
        rows.setdefault(hashes[-1], row)
    by_hash = dict(zip(rows, _checked(pool, function, list(rows.values())), strict=True))
    found = ((prompt.id, by_hash[digest]) for prompt, digest in zip(judged, hashes, strict=True))
    return [(name, problem) for name, problem in found if problem is not None]


def _checked(pool: FunctionPool, function: str, rows: Sequence[Row]) -> Iterable[str | None]:
    """Yield each row's problem, or None."""
    parts = [rows[start : start + ROWS_PER_CALL] for start in range(0, len(rows), ROWS_PER_CALL)]
    for checked in [pool.check_rows(function, part) for part in parts]:
        yield from checked.result()


def _describe(problems: Sequence[tuple[str, str]]) -> str:
    """Return one line with the names of the first rows, the number of other rows, and the first row's problem."""
    names = ", ".join(name for name, _ in problems[:MAX_NAMED])
    others = f" and {len(problems) - MAX_NAMED:,} more rows" if len(problems) > MAX_NAMED else ""
    return f"{names}{others}: {problems[0][1]}"
