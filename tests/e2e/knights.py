"""Knights and Knaves: reasoning-gym's puzzles with two people, and a tiny model that stops thinking at the wrong time.

The model's thoughts assume roles, one assignment after the other, and check each statement until one contradicts them.
It must learn to continue until an assignment fits, to answer with it, and to write the answer's tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from megarl.data import reasoning
from megarl.rewards.knights_knaves import knights_knaves
from megarl.rewards.think_answer import TAGS, think_answer_format
from tests.e2e.agents import Agent, Text
from tests.e2e.learning_tasks import Task, sampled_rows, write_rows

ANOTHER = Path(__file__).with_name("digits.py")

PEOPLE = ("Zoey", "Oliver")
IS = {True: " is a knight", False: " is a knave"}
VERDICT = {True: " (true)", False: " (false)"}
JOINED = {"and": " and ", "or": " or ", "->": " then ", "<=>": " if and only if "}
SUPPOSE, SAYS, AND, FITS, NOT = "Suppose ", " says ", ", and ", ": it fits. ", ": no. "
WORDS = (*PEOPLE, *IS.values(), *VERDICT.values(), *JOINED.values(), *TAGS, "if ", ". ", SUPPOSE, SAYS, AND, FITS, NOT)
STOPS_RIGHT, STOPS_WRONG, FORGETS_TAGS = 0.7, 0.3, 0.5
"""Probabilities that a demonstration stops after a valid assignment or a contradictory one, or has no tags."""

Statement = tuple[Any, ...]
"""reasoning-gym's form: ("lying", 1), or ("->", ("telling-truth", 0), ("lying", 1))."""


@dataclass(frozen=True)
class Puzzle:
    question: str
    answer: str
    statements: Sequence[Statement]


def puzzles(size: int, seed: int) -> list[Puzzle]:
    """Return reasoning-gym's puzzles in a short wording."""
    rows = reasoning.reasoning_rows([(reasoning.Task("knights_knaves", {"n_people": len(PEOPLE)}), size)], seed)
    entries = [row.columns["metadata"] for row in rows]
    return [
        Puzzle(question_text(entry["statements"]), answer(entry["solution"]), entry["statements"]) for entry in entries
    ]


def question_text(statements: Sequence[Statement]) -> str:
    return "".join(f"{name}{SAYS}{said(one)}. " for name, one in zip(PEOPLE, statements, strict=True))


def answer(roles: Sequence[bool]) -> str:
    return AND.join(name + IS[role] for name, role in zip(PEOPLE, roles, strict=True))


@cache
def demonstrated() -> list[Puzzle]:
    return puzzles(2000, seed=1)


def seldom_solved(random: Random) -> Text:
    """Return a rollout with correct thoughts that stops at random and sometimes answers without tags."""
    puzzle = random.choice(demonstrated())
    thoughts = ""
    for supposed in product((True, False), repeat=len(PEOPLE)):
        thoughts += thought(puzzle.statements, supposed)
        if random.random() < (STOPS_RIGHT if thoughts.endswith(FITS) else STOPS_WRONG):
            break
    tagged = answer(supposed) if random.random() < FORGETS_TAGS else f"<answer>{answer(supposed)}</answer>"
    return [
        (f"<|user|>{puzzle.question}<eos><|assistant|>", False),
        (f"<think>{thoughts}</think>{tagged}<eos>", True),
    ]


def thought(statements: Sequence[Statement], supposed: Sequence[bool]) -> str:
    """Return the thoughts about an assignment of roles, up to the first statement that contradicts it."""
    text = SUPPOSE + "".join(name + IS[role] for name, role in zip(PEOPLE, supposed, strict=True)) + ". "
    for name, role, statement in zip(PEOPLE, supposed, statements, strict=True):
        truth = verdict(statement, supposed)
        text += name + SAYS + said(statement, supposed) + truth
        if truth != VERDICT[role]:
            return text + NOT
    return text + FITS


def said(statement: Statement, supposed: Sequence[bool] | None = None) -> str:
    """Return a statement's text, with a verdict on each part if an assignment of roles is given."""
    kind, *parts = statement
    if kind in JOINED:
        first, second = (said(part, supposed) + verdict(part, supposed) for part in parts)
        return ("if " if kind == "->" else "") + first + JOINED[kind] + second
    person, role = role_of(statement)
    return PEOPLE[person] + IS[role]


def verdict(statement: Statement, supposed: Sequence[bool] | None) -> str:
    if supposed is None:
        return ""
    from reasoning_gym.logic.knights_knaves import KnightsKnavesDataset

    return VERDICT[bool(KnightsKnavesDataset.test_satisfiability(statement, supposed))]


def role_of(statement: Statement) -> tuple[int, bool]:
    """Return the person that a simple statement is about, and whether it calls them a knight."""
    kind, about = statement
    if kind == "not":
        person, role = role_of(about)
        return person, not role
    return about, kind == "telling-truth"


SOLVER = Agent(WORDS, seldom_solved, updates=900, rollouts=16, characters="")


class Knights(Task):
    """The share of correct, tagged answers, which starts near 0.15. Rewards are Logic-RL's.

    The control receives the rewards of other samples.
    """

    def overrides(self, folder: Path, shuffled: bool) -> list[str]:
        model = folder.parent / "solver"  # shared with the control
        if not model.exists():
            SOLVER.write(model)
        rows = [{"prompt": puzzle.question, "answer": puzzle.answer} for puzzle in puzzles(1024, seed=2)]
        functions = "{function: think_answer_format, options: {right: 1.0, wrong: -1.0}}, {function: knights_knaves}"
        return [
            f"model.path={model}",
            f"data.source={write_rows(folder / 'puzzles.jsonl', rows)}",
            f"rewards.functions=[{f'{{function: {ANOTHER}:logic_of_another}}' if shuffled else functions}]",
            "rollout.max_new_tokens=128",
            "rollout.context_length=160",
            "actor.tokens_per_microbatch=4096",
            "run.export=false",
        ]

    def shares(self, start: Path, run: Path) -> list[float]:
        return [fmean(map(self.is_right, step)) for step in sampled_rows(run)]

    def parts(self, run: Path) -> dict[str, list[float]]:
        return {"format": [fmean(map(self.has_format, step)) for step in sampled_rows(run)]}

    @staticmethod
    def is_right(row: dict[str, Any]) -> bool:
        return knights_knaves(row["prompt"], row["response"], row["answer"]) > 0

    @staticmethod
    def has_format(row: dict[str, Any]) -> bool:
        return think_answer_format(row["prompt"], row["response"], row["answer"]) > 0
