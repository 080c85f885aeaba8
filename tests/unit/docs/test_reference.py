"""The generated reference pages are complete, and the files of a run are documented."""

from __future__ import annotations

import re

import yaml

import megarl
from megarl import cli
from megarl.run import folder
from tests.paths import BASE
from tests.readme import text_of
from tools.docs import reference


def leaves(tree: dict, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found


def rows(page: str) -> dict[str, list[str]]:
    """Return the cells of the page's table rows by the first cell."""
    is_cell_end = re.compile(r"(?<!\\)\|(?=(?:[^`]*`[^`]*`)*[^`]*$)")  # a bar that is neither escaped nor in code
    cells = [is_cell_end.split(line)[1:-1] for line in page.splitlines() if line.startswith("| `")]
    return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in cells}


def test_configuration_page_has_every_key_with_default_and_comment():
    table = rows(reference.config_page().partition("## Options of estimators")[0])
    # The page omits the keys of sections that are YAML aliases of other sections.
    aliases = re.compile(
        r"^(critic|implicit_reward)\.(layout|optimizer|megatron_overrides)\.|^(reward_model|teachers)\.layout\."
    )
    for key, value in leaves(yaml.safe_load(BASE.read_text())).items():
        if aliases.match(key):
            continue
        _, default, meaning = table[key]
        assert yaml.safe_load(default.strip("`")) == value, key
        assert meaning, key


def test_configuration_page_has_types_of_the_schema():
    table = rows(reference.config_page().partition("## Options of estimators")[0])
    assert table["rollout.tp"][0] == "`integer`"
    assert table["rollout.top_k"][0] == "`integer | null`"
    assert table["rollout.on_stale"][0] == "`wait | drop`"
    assert table["run.trackers"][0] == "`list of (tensorboard | wandb | mlflow | trackio)`"


def test_command_line_page_has_every_command_with_its_options():
    page = reference.cli_page()
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    names |= {group.name for group in cli.app.registered_groups}
    headings = re.findall(r"^## megarl (.+)$", page, re.MULTILINE)
    assert {heading.split()[0] for heading in headings} == names
    plan = page.split("## megarl plan\n")[1].split("\n## ")[0]
    assert "| `--gpus GPUS` | GPU count and type, such as 64xH100-80GB. [required] |" in plan


def test_api_page_has_every_public_name_with_its_signature():
    page = reference.api_page()
    headings = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    assert headings == [name for name in megarl.__all__ if not name.startswith("__")]
    assert "read_metrics(\n    folder: str | Path,\n) -> pyarrow.Table\n" in page


def test_run_folder_page_lists_every_file():
    files = {entry._name for entry in vars(folder.RunFolder).values() if isinstance(entry, folder._Inside)}
    page = text_of("docs/reference/run-folder.md")
    assert [name for name in files if f"`{name}" not in page] == []
