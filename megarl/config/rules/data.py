"""The rules of section `data`; those that an objective has for its data are in `objective`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config
from megarl.config.sources import OWN_TASKS


def messages_have_a_chat_template(config: Config) -> str | None:
    if config.data.rows != "messages" or config.data.chat_template:
        return None
    return (
        "data.chat_template=false: with data.rows=messages it is the chat template that says how turns are written; "
        "set data.chat_template=true"
    )


def system_prompts_are_of_prompts_in_a_chat_template(config: Config) -> str | None:
    data = config.data
    if data.system_prompt is None:
        return None
    if data.rows != "prompts" or data.source == OWN_TASKS:
        rows = f"rows={data.rows}" if data.rows != "prompts" else f"source={data.source}"
        return (
            f"data.system_prompt: it stands before prompts of rows, and with data.{rows} there are none; remove it, "
            "and write system messages where the conversations come from"
        )
    if not data.chat_template:
        return (
            "data.system_prompt: with data.chat_template=false nothing says how a system message is written; set "
            "data.chat_template=true, or put the text into the prompts"
        )
    return None


def options_are_of_a_reasoning_task(config: Config) -> str | None:
    data = config.data
    given = next((key for key in ("options", "stages") if getattr(data, key)), None)
    if given is None or data.reasoning_task is not None:
        return None
    return (
        f"data.{given}={getattr(data, given)}: it is of reasoning-gym's tasks, and data.source={data.source}; remove "
        "it, or set data.source=reasoning_gym:TASK"
    )


def reasoning_tasks_are_prompts(config: Config) -> str | None:
    data = config.data
    if data.reasoning_task is None or not config.is_offline:
        return None
    return f"data.rows={data.rows}: the rows of data.source={data.source} are prompts; set data.rows=prompts"


def stages_come_in_their_order(config: Config) -> str | None:
    data = config.data
    if not data.stages:
        return None
    if data.size is not None:
        return f"data.size={data.size}: with data.stages, each of them has its size; set data.size to null"
    if data.shuffle:
        return (
            "data.shuffle=true: the rows of data.stages would not come in their order; set data.shuffle=false (within "
            "a stage, they are drawn at random as it is)"
        )
    wrong = next((stage for stage in data.stages if type(stage.get("size")) is not int or stage["size"] < 1), None)
    if wrong is not None:
        return (
            f"data.stages: {wrong} has no size; give each the number of its rows, such as {{size: 1000, n_people: 3}}"
        )
    return None


def sources_have_a_column(config: Config) -> str | None:
    data = config.data
    if data.source_column is None or data.source != "arithmetic":
        return None
    return f"data.source_column={data.source_column}: data.source=arithmetic has no columns; set it to null"


RULES: tuple[Callable[[Config], str | None], ...] = (
    messages_have_a_chat_template,
    system_prompts_are_of_prompts_in_a_chat_template,
    options_are_of_a_reasoning_task,
    reasoning_tasks_are_prompts,
    stages_come_in_their_order,
    sources_have_a_column,
)
