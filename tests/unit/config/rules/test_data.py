from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import errors, recipe


def test_a_system_prompt_stands_before_prompts_of_rows() -> None:
    assert recipe("data.system_prompt=Be brief.").data.system_prompt == "Be brief."


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.chat_template=false"], "with data.chat_template=false nothing says how a system message is written"),
        (["data.source=environment", "environment.class=calculator"], "with data.source=environment there are none"),
        (["algorithm.objective.name=sft", "data.rows=messages"], "with data.rows=messages there are none; remove it"),
    ],
)
def test_elsewhere_it_is_refused(overrides: list[str], message: str) -> None:
    (line,) = [line for line in errors("data.system_prompt=Be brief.", *overrides) if "system_prompt" in line]
    assert line.startswith("data.system_prompt: ") and message in line
