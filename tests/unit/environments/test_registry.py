"""Lookup of environments by name, and errors for invalid ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from megarl.core.errors import UserError
from megarl.environments import Environment, Step, Task, ToolCall, Turn
from megarl.environments.registry import check_environment, environment_class

FILE = """
from __future__ import annotations
from dataclasses import dataclass
from megarl.environments import Environment, Step, tool
from megarl.rewards.exact import exact_match

@dataclass
class OnlyTools:
    start: int
    scale: int = 2

    @tool
    def add(self, number: int) -> int:
        "Adds a number to the sum."
        self.start += self.scale * number
        return self.start

class OnlyStep:
    def step(self, turn):
        return Step(reward=exact_match("", turn.text, "yes"), done=True)

class Derived(Environment):
    def __init__(self, **options):
        self.options = options

class OneTurnTooFew(Environment):
    def step(self):
        return Step(done=True)

class Neither:
    def act(self):
        pass

class NoAnnotation:
    @tool
    def add(self, number):
        "Adds."

class NoJsonType:
    @tool
    def add(self, number: object()):
        "Adds."

class UnknownType:
    @tool
    def add(self, number: Number):
        "Adds."

class NoDocstring:
    @tool
    def add(self, number: int):
        return number

value = 3
"""


@pytest.fixture
def file(tmp_path) -> Path:
    file = tmp_path / "games.py"
    file.write_text(FILE)
    return file


def turn(text: str, *calls: ToolCall) -> Turn:
    return Turn(np.zeros(1, np.int32), text, "stop", calls)


def test_class_with_only_tools_is_a_complete_environment(file):
    found = check_environment(f"{file}:OnlyTools", {"start": 1})
    assert found.__name__ == "OnlyTools" and issubclass(found, Environment)
    environment = found(start=1)
    [answer] = asyncio.run(environment.step(turn("", ToolCall("add", {"number": 2})))).observation
    assert answer["content"] == "5"
    assert asyncio.run(environment.step(turn("done"))) == Step(done=True)


def test_class_with_only_step_inherits_the_other_methods(file):
    environment = check_environment(f"{file}:OnlyStep", {})()
    assert environment.step(turn("yes")).reward == 1.0
    assert asyncio.run(environment.reset(Task("0", (), None, {}, 0))) is None
    assert asyncio.run(environment.close()) is None


def test_derived_class_is_returned_unchanged(file):
    found = environment_class(f"{file}:Derived")
    assert found.__mro__[1] is Environment
    assert check_environment(f"{file}:Derived", {"any": 1}) is not None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("OnlyTools", {}, "environment.options.start: .*requires this option"),
        ("OnlyTools", {"start": 1, "scala": 3}, "options.scala: .*Did you mean scale. Fix: use one of start, scale"),
        ("OnlyStep", {"depth": 3}, "options.depth: .*the environment takes no options"),
        ("OnlyStap", {}, r"has no class 'OnlyStap'. Fix: define it as class OnlyStap\(Environment\)"),
        ("value", {}, "has no class 'value'"),
        ("Neither", {}, "no method `step`"),
        (
            "OneTurnTooFew",
            {},
            r"step takes \(self\): too many positional arguments. Fix: define it as step\(self, turn\)",
        ),
        ("NoAnnotation", {}, "argument number has no annotation"),
        ("NoJsonType", {}, "tool add: its annotations raised"),
        ("UnknownType", {}, "tool add: its annotations raised NameError: name 'Number'"),
        ("NoDocstring", {}, "tool add has no docstring"),
    ],
)
def test_invalid_class_or_options_are_rejected(file, name, options, message):
    with pytest.raises(UserError, match=message):
        check_environment(f"{file}:{name}", options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("calculater", "environment.class=calculater: unknown environment. Did you mean calculator"),
        ("games.py", "the value names a file but no class. Fix: set environment.class=games.py:CLASS"),
        ("nowhere.py:Game", "nowhere.py is not a Python file"),
    ],
)
def test_unknown_class_name_is_rejected(name, message):
    with pytest.raises(UserError, match=message):
        environment_class(name)
