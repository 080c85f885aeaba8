"""The page on adding an environment: its code blocks run in order, unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import pytest
import yaml

from megarl.config.load import load
from megarl.environments.registry import SHIPPED, environment_class
from tests.paths import BASE
from tests.readme import ROOT, section, text_of
from tests.timing import RUN_S

PAGE = "megarl/environments/README.md"
TURNS = """
import asyncio
from megarl.environments import Task, ToolCall, Turn
from megarl.environments.registry import check_environment

shop = check_environment("shop.py:Shop", {"currency": "USD"})(currency="USD")
shop.reset(Task(id="0", messages=(), answer="5.00 USD", columns={"prices": {"pen": 2.5}}, seed=0))
call = ToolCall("price", {"item": "pen"})
step = asyncio.run(shop.step(Turn([], "", "stop", (call,))))
assert [message["content"] for message in step.observation] == ["2.50 USD"]
step = asyncio.run(shop.step(Turn([], "", "stop", (ToolCall("price", {"item": "ink"}),))))
assert step.observation[0]["content"] == "error: price raised KeyError: 'ink'"
assert asyncio.run(shop.step(Turn([], " 5.00 USD", "stop"))).reward == 1.0

board = check_environment("board.py:Board", {})()
[opening] = board.reset(Task(id="0", messages=(), answer=None, columns={}, seed=0))
board.place = [1, 0]
[moved] = board.step(Turn([], "I move right", "stop")).observation
assert moved["content"][0]["image"].getpixel((65, 1)) == (255, 0, 0)
assert opening["content"][0]["image"].size == (256, 256)
assert board.step(Turn([], "north", "stop")).reward == -0.1
board.step(Turn([], "left", "stop"))
assert board.step(Turn([], "left", "stop")).done
"""
"""Conversations with the classes whose source the page shows."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(PAGE), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a directory with the files of blocks that begin with a file name, and a script with the other blocks."""
    folder = tmp_path_factory.mktemp("page")
    script = []
    for block in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", block)
        if name:
            (folder / name[1]).write_text(block)
        else:
            script.append(block)
    (folder / "script.py").write_text("".join([*script, TURNS]))
    return folder


def test_code_of_the_page_runs(folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stderr


def test_recipe_of_the_page_loads(folder):
    [block] = blocks("yaml")
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"base": str(BASE), "model": {"path": "model"}, **yaml.safe_load(block)}))
    config = load(recipe)
    assert config.environment.max_turns == 8 and config.data.source == "environment"


def test_page_lists_every_environment_and_its_options():
    rows = [line.split(" | ") for line in section(PAGE, "Built-in environments").splitlines() if line[:3] == "| `"]
    listed = {row[0].strip("|` "): row for row in rows[1:]}
    assert listed.keys() == {name for name, place in SHIPPED.items() if find_spec(place.partition(":")[0])}
    for name in listed.keys() - {"search_tool"}:
        options = signature(environment_class(name)).parameters.keys() - {"sandbox"}  # provided by the run
        assert [option for option in options if f"`{option}`" not in listed[name][-1]] == []
