"""The rule of section `data`; those that an objective has for its data are in `objective`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def messages_have_a_chat_template(config: Config) -> str | None:
    if config.data.rows != "messages" or config.data.chat_template:
        return None
    return (
        "data.chat_template=false: with data.rows=messages it is the chat template that says how turns are written; "
        "set data.chat_template=true"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (messages_have_a_chat_template,)
