"""Reward functions of other trainers are rejected, and the printed wrapper makes them work."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.rewards.registry import resolve, takes_batches
from megarl.rewards.worker import call, call_batch

PROMPT, RESPONSE, ANSWER = "1 + 1 = ", "2", "two"
ROW = {"data_source": "gsm8k", "extra_info": {"index": 3}, "level": 5, "solution": "two"}
MESSAGES = [{"role": "user", "content": PROMPT}]

RETURNS_ARGUMENTS = "    assert {condition}, locals()\n    return {result}\n"
VERL = "data_source == 'gsm8k' and solution_str == '2' and ground_truth == 'two'"

FOREIGN = {
    "verl": (
        "def f(data_source, solution_str, ground_truth, extra_info=None):",
        f"{VERL} and extra_info['index'] == 3",
    ),
    "verl's keywords": ("def f(data_source, solution_str, ground_truth, extra_info=None, **kwargs):", VERL),
    "verl's annotations": ("def f(data_source: str, solution_str: str, ground_truth: str, extra_info: dict):", VERL),
    "verl's options": ("def f(data_source, solution_str, ground_truth, extra_info=None, strict=True):", VERL),
    "verl's scorer": (
        "def f(solution_str, ground_truth, method='strict'):",
        "solution_str == '2' and method == 'strict'",
    ),
    "verl's keyword-only": ("def f(*, data_source, solution_str, ground_truth):", VERL),
    "verl's positional-only": ("def f(data_source, solution_str, ground_truth, /):", VERL),
    "verl's asynchronous": ("async def f(data_source, solution_str, ground_truth, extra_info=None):", VERL),
    "verl's batch": (
        "def f(data_sources, solution_strs, ground_truths, extra_infos):",
        "data_sources == ['gsm8k'] * 2 and solution_strs == ['2'] * 2 and ground_truths == ['two'] * 2",
    ),
    "TRL": ("def f(completions, **kwargs):", "completions == ['2'] * 2 and kwargs['solution'] == ['two'] * 2"),
    "TRL's column": ("def f(completions, solution, **kwargs):", "completions == ['2'] * 2 and solution == ['two'] * 2"),
    "TRL's prompts": (
        "def f(prompts, completions, completion_ids=None, **kwargs):",
        "prompts == ['1 + 1 = '] * 2 and completions == ['2'] * 2 and kwargs['level'] == [5, 5]",
    ),
    "TRL without keywords": ("def f(prompts, completions, level):", "completions == ['2'] * 2 and level == [5, 5]"),
    "TRL's asynchronous": ("async def f(completions, **kwargs):", "completions == ['2'] * 2"),
    "TRL's number of tokens": (
        "def f(completions, num_response_tokens, **kwargs):",
        "num_response_tokens == [1, 1] and kwargs['level'] == [5, 5]",
    ),
    "OpenRLHF": ("def f(queries, prompts, labels):", "queries == ['1 + 1 = 2'] * 2 and labels == ['two'] * 2"),
    "verifiers": ("def f(completion, answer, **kwargs):", "completion == '2' and answer == 'two'"),
    "swapped": ("def f(response, answer, prompt):", "(response, answer, prompt) == ('2', 'two', '1 + 1 = ')"),
    "response first": ("def f(response, prompt, answer):", "(response, answer, prompt) == ('2', 'two', '1 + 1 = ')"),
    "without prompt": ("def f(response, ground_truth, level):", "(response, ground_truth, level) == ('2', 'two', 5)"),
}
"""Name -> definition of a reward function for another trainer, and the condition that its arguments must meet."""


def refusal(tmp_path: Path, code: str) -> str:
    file = tmp_path / "reward.py"
    file.write_text(code)
    with pytest.raises(ValueError, match="another trainer's signature") as error:
        resolve(f"{file}:f")
    return str(error.value)


@pytest.mark.parametrize("returns_dict", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_printed_wrapper_passes_the_right_arguments(tmp_path: Path, name: str, returns_dict: bool) -> None:
    """A function of verl may return a dict with the score. TRL's returns numbers."""
    definition, condition = FOREIGN[name]
    is_batch = "prompts" in definition or "completions" in definition or "solution_strs" in definition
    score = "{'score': 0.5}" if returns_dict and "completions" not in definition else "0.5"
    result = f"[{score}, {score}]" if is_batch else score
    code = f"{definition}\n{RETURNS_ARGUMENTS.format(condition=condition, result=result)}"
    first, *wrapper = refusal(tmp_path, code).splitlines()
    assert len(wrapper) in (3, 5, 6) and all(line.startswith("    ") for line in wrapper)
    assert first.endswith(f"Fix: add this wrapper to reward.py, and use {tmp_path}/reward.py:megarl_f")
    assert scores(wrapped(tmp_path, code, wrapper), ROW) == ([0.5, 0.5] if is_batch else [0.5])


@pytest.mark.parametrize("prompt", [PROMPT, MESSAGES], ids=["text", "messages"])
@pytest.mark.parametrize("parameters", ["prompts, completions, **kwargs", "prompts, completions, level"])
def test_trl_wrapper_passes_messages_for_messages(tmp_path: Path, prompt: Any, parameters: str) -> None:
    """The function receives the prompts as they are in the data, not the text with the chat template."""
    completion = RESPONSE if prompt == PROMPT else [{"role": "assistant", "content": RESPONSE}]
    condition = f"prompts == [{prompt!r}] * 2 and completions == [{completion!r}] * 2"
    code = f"def f({parameters}):\n{RETURNS_ARGUMENTS.format(condition=condition, result='[0.5, 0.5]')}"
    _, *wrapper = refusal(tmp_path, code).splitlines()
    assert scores(wrapped(tmp_path, code, wrapper), {**ROW, "prompt": prompt}) == [0.5, 0.5]


@pytest.mark.parametrize("parameters", ["completion_ids, **kwargs", "completions, completion_ids"])
def test_function_that_needs_token_ids_is_refused(tmp_path: Path, parameters: str) -> None:
    (tmp_path / "reward.py").write_text(f"def f({parameters}):\n    return []\n")
    with pytest.raises(ValueError, match="cannot pass: completion_ids") as error:
        resolve(f"{tmp_path}/reward.py:f")
    assert str(error.value) == (
        f"rewards.functions: {tmp_path}/reward.py:f has another trainer's signature ({parameters}) and requires "
        "arguments that megarl cannot pass: completion_ids (the token ids of responses). Fix: define f(prompts, "
        "responses, answers, num_response_tokens), which receives each response's text and its number of tokens, and "
        "use these instead"
    )


def test_function_that_needs_trls_trainer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def f(completions, trainer_state, log_extra=None):\n    return []\n")
    with pytest.raises(ValueError, match=r"cannot pass: trainer_state\. Fix: remove trainer_state from f$"):
        resolve(f"{tmp_path}/reward.py:f")


def wrapped(tmp_path: Path, code: str, wrapper: Sequence[str]) -> Callable[..., Any]:
    (tmp_path / "wrapped.py").write_text(f"{code}\n{textwrap.dedent(chr(10).join(wrapper))}\n")
    return resolve(f"{tmp_path / 'wrapped.py'}:megarl_f")


def scores(function: Callable[..., Any], row: Mapping[str, Any]) -> list[float]:
    """Call the function as a worker does, with the row's columns by parameter name."""
    values = {**row, "num_response_tokens": 1}
    columns = {name: values[name] for name in inspect.signature(function).parameters if name in values}
    if takes_batches(function):
        keywords: dict[str, Any] = {name: [value] * 2 for name, value in columns.items()}
        keywords |= {"row": [row, row]} if "row" in inspect.signature(function).parameters else {}
        reply = call_batch(function, ([PROMPT] * 2, [RESPONSE] * 2, [ANSWER] * 2), keywords)
        return [result["value"] for result in reply["results"]]
    return [call(function, (PROMPT, RESPONSE, ANSWER), columns)["value"]]


@pytest.mark.parametrize(
    "definition",
    [
        "def f(prompt, response, answer):",
        "def f(prompt, response, answer, extra_info=None, data_source=None):",
        "def f(question, output, gold):",
        "def f(question, answer, reference):",
        "def f(prompt, completion, ground_truth):",
        "def f(prompts, responses, answers):",
        "def f(prompts, responses, answers, data_source):",
        "def f(*arguments):",
        "def f(a, b, c):",
        "def f(_prompt, text, _):",
    ],
)
def test_functions_with_megarls_order_are_accepted(tmp_path: Path, definition: str) -> None:
    (tmp_path / "reward.py").write_text(f"{definition}\n    return 1.0\n")
    assert callable(resolve(f"{tmp_path}/reward.py:f"))


def test_options_do_not_hide_the_signature(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def f(data_source, solution_str, ground_truth, strict=True):\n    return 1.0\n"
    )
    with pytest.raises(ValueError, match=re.escape("def megarl_f(prompt, response, answer, data_source):")):
        resolve(f"{tmp_path}/reward.py:f", {"strict": False})


def test_verifier_of_another_trainer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def f(solution_str, ground_truth, method=1):\n    return 1.0\n")
    with pytest.raises(ValueError, match="another trainer's signature"):
        resolve("cosine_length", {"max_tokens": 8, "verifier": f"{tmp_path}/reward.py:f"})
