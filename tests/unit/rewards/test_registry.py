import inspect
import re
from contextlib import nullcontext

import pytest

from megarl.config.schema import RewardFunction
from megarl.core.errors import UserError
from megarl.rewards.exact import exact_match
from megarl.rewards.options import BATCH, SINGLE
from megarl.rewards.registry import (
    FUNCTIONS,
    IMAGE_FUNCTIONS,
    column_parameters,
    require_response_kind,
    resolve,
    takes_batches,
)


def test_builtin_functions_are_resolved_by_name():
    assert resolve("exact_match") is exact_match
    required = {
        "regex_match": {"pattern": "a"},
        "cosine_length": {"max_tokens": 8},
        "soft_overlong": {"max_tokens": 8, "buffer": 2},
        "generative_judge": {"base_url": "http://localhost/v1", "model": "m"},
    }
    texts = FUNCTIONS.keys() - IMAGE_FUNCTIONS.keys()
    first = {n: tuple(inspect.signature(resolve(n, required.get(n, {}))).parameters)[:3] for n in texts}
    assert set(first.values()) == {SINGLE, BATCH} and [n for n in texts if first[n] == BATCH] == ["generative_judge"]


@pytest.mark.parametrize(
    ("entry", "engine", "message"),
    [
        ({"function": "exact_match"}, "vllm", None),
        ({"function": "jpeg_compressibility"}, "diffusers", None),
        ({"function": "own.py:f"}, "vllm", None),
        ({"function": "own.py:f"}, "diffusers", None),
        (
            {"function": "ocr_exact", "name": "reading"},
            "vllm",
            "ocr_exact scores images, but rollout.engine=vllm samples text. Fix: use one of exact_match, numeric",
        ),
        (
            {"function": "exact_match"},
            "diffusers",
            "exact_match scores text, but rollout.engine=diffusers samples images. Fix: use one of jpeg_compressib",
        ),
        (
            {"function": "own.py:f", "per_turn": True},
            "diffusers",
            "f: per_turn=true, but an image has no turns. Fix: set per_turn=false",
        ),
    ],
)
def test_function_for_the_other_kind_of_response_is_refused(entry, engine, message):
    functions = [RewardFunction(function="own.py:g"), RewardFunction(**entry)]
    with nullcontext() if message is None else pytest.raises(UserError, match=re.escape(message)):
        require_response_kind(functions, engine)


def test_function_in_a_user_file_is_resolved(tmp_path):
    file = tmp_path / "my rewards.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Length:\n"
        "    characters: int\n"
        "def short(prompt, response, answer):\n"
        "    return 1 / Length(len(response)).characters\n"
    )
    assert resolve(f"{file}:short")("", "four", None) == 0.25


def test_files_with_the_same_name_are_kept_apart(tmp_path):
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(f"def f(prompt, response, answer):\n    return {value}\n")
    first, second = (resolve(f"{tmp_path / folder / 'reward.py'}:f") for folder in "ab")
    assert (first("", "", None), second("", "", None)) == (1, 2)


def test_further_parameters_request_columns(tmp_path):
    file = tmp_path / "columns.py"
    file.write_text("def f(prompt, response, answer, level, *others, row=None, **named):\n    return level\n")
    assert column_parameters(resolve(f"{file}:f"), 3) == {"level": True, "row": False}
    assert column_parameters(max, 3) == column_parameters(exact_match, 3) == {}


def test_any_callable_with_three_arguments_is_accepted(tmp_path):
    file = tmp_path / "callables.py"
    file.write_text(
        "import functools\n"
        "def any(*arguments, scale=2, **others):\n    return scale\n"
        "part = functools.partial(any, scale=3)\n"
        "class Object:\n    def __call__(self, prompt, response, answer=None):\n        return 4\n"
        "object = Object()\n"
        "compiled = max\n"
    )
    functions = [resolve(f"{file}:{name}") for name in ("any", "part", "object", "compiled")]
    assert [function(5, 5, 5) for function in functions] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_mach", r"'exact_mach'\. Fix: use exact_match$"),
        ("zzz", r"'zzz'\. Fix: use one of exact_match, numeric_match"),
        ("{folder}/missing.py:f", r"missing\.py is not a Python file\. Fix: use the path of an existing \.py file$"),
        ("{folder}/good.py", r"names a file but no function\. Fix: use .*good\.py:FUNCTION"),
        ("{folder}/good.py:g", r"good\.py has no function 'g'\. Fix: define it as g\(prompt, response, answer\)"),
        ("{folder}/good.py:constant", r"good\.py has no function 'constant'"),
        (
            "{folder}/good.py:two",
            r"good\.py:two has the signature \(prompt, response\): too many positional arguments\. "
            r"Fix: define it as two\(prompt",
        ),
        ("{folder}/broken.py:f", r"importing .*broken\.py raised SyntaxError"),
        ("{folder}/failing.py:f", r"importing .*failing\.py raised ZeroDivisionError: division by zero"),
        (
            "{folder}/imports.py:f",
            r"No module named 'absent'\. Fix: install the module, or add its directory to PYTHON",
        ),
    ],
)
def test_unresolvable_function_is_named(tmp_path, name, message):
    (tmp_path / "good.py").write_text(
        "constant = 1\ndef f(prompt, response, answer):\n    return 1\ndef two(prompt, response):\n    return 1\n"
    )
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "failing.py").write_text("1 / 0\n")
    (tmp_path / "imports.py").write_text("import absent\n")
    with pytest.raises(ValueError, match=rf"^rewards\.functions: .*{message}"):
        resolve(name.format(folder=tmp_path))


def test_batch_function_is_recognized_by_parameter_names(tmp_path):
    file = tmp_path / "batches.py"
    file.write_text(
        "def f(prompts, responses, answers, level):\n    return level\n"
        "class Object:\n    async def __call__(self, prompts, responses, answers=None, **columns):\n        return []\n"
        "object = Object()\n"
        "def g(prompt, responses, answers):\n    return 1\n"
        "def h(prompts, texts, answers):\n    return 1\n"
    )
    assert [takes_batches(resolve(f"{file}:{name}")) for name in ("f", "object", "g")] == [True, True, False]
    assert not takes_batches(max) and column_parameters(resolve(f"{file}:f"), 3) == {"level": True}
    message = (
        r"^rewards.functions: .*batches.py:h has the signature \(prompts, texts, answers\)\. Fix: name its "
        r"first parameters \(prompts, responses, answers\) to score whole batches, or "
        r"\(prompt, response, answer\) to score single"
    )
    with pytest.raises(ValueError, match=message):
        resolve(f"{file}:h")
