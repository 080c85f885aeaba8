"""Learning tasks in environments. The initial model writes well-formed turns with random choices.

A control receives random rewards.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.e2e.agents import CALCULATOR, DIGITS, LETTERS, SEARCHER, SPELLER, Agent
from tests.e2e.learning_tasks import Task, sampled_rows, write_rows
from tests.paths import VERIFIERS

AIMLESS = Path(__file__).with_name("aimless.py")
PACKAGES = Path(__file__).with_name("verifiers_packages")


class InEnvironment(Task):
    """An environment task, measured by the share of rollouts with the correct answer."""

    agent: Agent
    environment: str
    aimless: str = ""

    def overrides(self, folder: Path, shuffled: bool) -> list[str]:
        model = folder.parent / f"{self.environment} model"  # shared with the control
        if not model.exists():
            self.agent.write(model)
        return [
            f"model.path={model}",
            *self.world(shuffled),
            "rewards.functions=[]",
            "rollout.context_length=160",
            "rollout.max_new_tokens=128",
            "run.export=false",
            *self.data_overrides(folder),
        ]

    def world(self, shuffled: bool) -> list[str]:
        """Return the overrides that select the environment; if `shuffled`, one with random rewards."""
        return [f"environment.class={f'{AIMLESS}:{self.aimless}' if shuffled else self.environment}"]

    @abstractmethod
    def data_overrides(self, folder: Path) -> list[str]:
        """Write the environment's data into the folder. Return the overrides that select them."""

    @abstractmethod
    def is_right(self, row: dict[str, Any]) -> bool:
        """Return whether a saved rollout is right, regardless of its reward."""

    def shares(self, start: Path, run: Path) -> list[float]:
        return [fmean(map(self.is_right, step)) for step in sampled_rows(run)]


class Search(InEnvironment):
    """Search a corpus for the number of a letter and answer with it.

    The initial model mostly searches for a random letter and answers with a random number. Its share is near 0.2.
    """

    agent, environment, aimless = SEARCHER, "search", "AimlessSearch"

    def data_overrides(self, folder: Path) -> list[str]:
        numbers = {letter: str(number) for number, letter in enumerate(LETTERS)}
        rows = [{"prompt": letter, "answer": number} for letter, number in numbers.items()]
        passages = [{"title": letter, "text": number} for letter, number in numbers.items()]
        corpus = write_rows(folder / "corpus.jsonl", passages)
        return [
            f"data.source={write_rows(folder / 'questions.jsonl', rows)}",
            f"environment.options={{corpus: {corpus}, topk: 1, instructions: false}}",
            "environment.max_turns=2",
            "environment.turn_tokens=6",
            "rollout.stop=['</search>', '</answer>']",
        ]

    def is_right(self, row: dict[str, Any]) -> bool:
        return row["response"] == f"<answer>{row['answer']}</answer>"


class Calculation(InEnvironment):
    """Compute sums and products of small numbers with two tools, called in the question's order.

    The initial model mostly calls one tool, chosen at random. Its share is near 0.2.
    """

    agent, environment, aimless = CALCULATOR, "calculator", "AimlessCalculator"

    def data_overrides(self, folder: Path) -> list[str]:
        return [
            "data.source=environment",
            "environment.options={low: 2, high: 5}",
            "environment.max_turns=3",
            "environment.turn_tokens=16",
            "environment.tool_format=hermes",
        ]

    def is_right(self, row: dict[str, Any]) -> bool:
        question = next(message["content"] for message in row["messages"] if message["role"] == "user")
        expected = eval(re.fullmatch(r"What is (.*)\?", question)[1])
        return row["response"].strip() == str(expected)


class Letters(InEnvironment):
    """State the positions of two letters in the alphabet, in a verifiers environment with its own harness.

    The initial model mostly states a random number. Its share is near 0.2.
    """

    agent, environment = SPELLER, "verifiers"

    def world(self, shuffled: bool) -> list[str]:
        env = {
            "taskset": {"id": "letters", "aimless": shuffled},
            "agent": {"harness": {"id": "letters"}, "runtime": {"type": "subprocess"}},
        }
        options = {"env": env, "path": [str(VERIFIERS), str(PACKAGES)]}
        return [f"environment.class={self.environment}", f"environment.options={json.dumps(options)}"]

    def data_overrides(self, folder: Path) -> list[str]:
        return ["data.source=environment", "environment.max_turns=2", "environment.turn_tokens=4"]

    def is_right(self, row: dict[str, Any]) -> bool:
        asked = [message["content"] for message in row["messages"] if message["role"] == "user"]
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        return said == [DIGITS[LETTERS.index(letter)] for letter in asked]
