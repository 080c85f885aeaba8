"""The command groups of the `megarl` command line."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

MAX_CHARACTERS = 1000
"""Maximum length of a command's first sentence in the list of commands. The default limit truncates sentences."""


class CommandGroup(TyperGroup):
    """A command group whose help lists the whole first sentence of each command's help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(MAX_CHARACTERS))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
