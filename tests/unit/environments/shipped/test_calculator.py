import asyncio
import re

import pytest

from megarl.environments import Step, ToolCall
from megarl.environments.registry import check_environment
from megarl.environments.tools import describe, tools_of
from tests.unit.environments.shipped.turns import question, task, turn

CalculatorEnvironment = check_environment("calculator", {"low": 2, "high": 99})


def asked(seed: int, **options: int) -> tuple[CalculatorEnvironment, str]:
    environment = CalculatorEnvironment(**options)
    [message] = asyncio.run(environment.reset(task(seed=seed)))
    return environment, message["content"]


def test_question_depends_only_on_the_seed():
    assert asked(3)[1] == asked(3)[1]
    assert len({asked(seed)[1] for seed in range(50)}) > 40


@pytest.mark.parametrize("seed", range(20))
def test_tools_compute_the_answer(seed):
    environment, text = asked(seed)
    a, b, c = map(int, re.findall(r"\d+", text))
    names = ("multiply", "add") if "(" not in text else ("add", "multiply")
    value = a
    for name, other in zip(names, (b, c), strict=True):
        step = asyncio.run(environment.step(turn("", ToolCall(name, {"a": value, "b": other}))))
        assert not step.done and step.reward is None
        [message] = step.observation
        value = int(message["content"])
    assert value == eval(text.removeprefix("What is").removesuffix("?"))
    assert asyncio.run(environment.step(turn(f"It is {value}."))) == Step(reward=1.0, done=True)
    assert asyncio.run(environment.step(turn(f"It is {value + 1}."))) == Step(reward=0.0, done=True)


def test_numbers_are_within_the_configured_range():
    numbers = [int(number) for seed in range(50) for number in re.findall(r"\d+", asked(seed, low=3, high=5)[1])]
    assert set(numbers) == {3, 4, 5}


def test_question_of_the_data_row_is_used():
    environment = CalculatorEnvironment()
    assert asyncio.run(environment.reset(task(question("6 * 7?"), "42"))) is None
    assert asyncio.run(environment.reward(turn("42"))) == 1.0
    assert asyncio.run(environment.reward(turn("42", ToolCall("add", {"a": 40, "b": 2})))) == 0.0


def test_tool_descriptions_include_the_arguments():
    described = [describe(name, tool)["function"] for name, tool in tools_of(CalculatorEnvironment).items()]
    assert [one["name"] for one in described] == ["add", "multiply"]
    assert described[0]["description"] == "Returns the sum of two numbers."
    assert described[0]["parameters"]["properties"] == {
        "a": {"type": "integer", "description": "the first number"},
        "b": {"type": "integer", "description": "the second number"},
    }
