"""The guide and other pages: YAML blocks load in a recipe, and metrics, keys and options have the documented names."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config.load import load
from megarl.config.names import keys
from megarl.core.metric_names import METRICS, is_declared
from megarl.rewards.options import NUM_ARGUMENTS
from megarl.rewards.registry import FUNCTIONS
from tests.readme import PAGES, text_of

GUIDE = [page for page in PAGES if page.startswith("docs/guide/")]

NEEDED: dict[str, Any] = {
    "docs/guide/distillation.md": {"teachers": {"models": [{"name": "large", "path": "large"}]}},
    "docs/guide/image-models.md": {"rollout": {"engine": "diffusers"}},
}
"""Page -> keys that its blocks need in addition to their own, because an earlier block or the text sets them."""

OF_VERL = ("configs/coming-from-verl.md", "docs/tutorials/porting-from-verl.md")
"""Pages that name verl's keys."""

TRACKER_IMAGES = {"evaluation/NAME/images"}
"""Names in trackers that are not metrics."""

BLOCKS = [
    pytest.param(page, block, id=f"{Path(page).stem}-{number}")
    for page in GUIDE
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_block_of_the_guide_loads_in_a_recipe(page, block, tmp_path):
    """Each block is added to a recipe that sets only the required keys."""
    required = {"base": "base.yaml", "model": {"path": "model"}, "data": {"source": "arithmetic"}}
    (tmp_path / "required.yaml").write_text(yaml.safe_dump(required | NEEDED.get(page, {})))
    (tmp_path / "recipe.yaml").write_text(f"base: required.yaml\n{block.removeprefix('base: base.yaml')}")
    load(tmp_path / "recipe.yaml")


@pytest.mark.parametrize("page", PAGES)
def test_named_metrics_are_declared(page):
    first_parts = {metric.name.split("/")[0] for metric in METRICS} | {"actor", "critic"}
    known = {metric.name for metric in METRICS} | TRACKER_IMAGES
    named = {name for name in re.findall(r"`([a-z_]+/[\w@^/…-]+)`", text_of(page)) if name.split("/")[0] in first_parts}
    for name in named - known:
        prefix = re.split("…|NAME/$", name)[0]
        assert is_declared(name) or (prefix != name and any(other.startswith(prefix) for other in known)), name


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_VERL])
def test_named_keys_exist(page):
    known = set(keys())
    sections = {name.split(".")[0] for name in known}
    named = re.findall(r"`([a-z_]+(?:\.\w+)+)(?:[=:][^`]*)?`", text_of(page))
    named = {name for name in named if name.split(".")[0] in sections and ".megatron_overrides." not in name}
    assert named <= known


def test_reward_functions_have_the_documented_options():
    """The table shows `option: default`, or only the option if it is required or its default is long or null."""
    rows = [line.split(" | ") for line in text_of("docs/guide/rewards.md").splitlines() if line.startswith("| `")]
    shown = {name: options for names, _, options in rows for name in re.findall(r"`(\w+)`", names)}
    assert shown.keys() == FUNCTIONS.keys()
    for name, text in shown.items():
        options = options_of(name)
        documented = {k: yaml.safe_load(v or "null") for k, v in re.findall(r"`([a-z_]+)(?:: ([^`]+))?`", text)}
        documented = {option: value for option, value in documented.items() if option in options or value is not None}
        assert documented.keys() == options.keys(), name
        stated = {option: value for option, value in documented.items() if value is not None}
        assert stated == {option: options[option] for option in stated}, name


def options_of(name: str) -> dict[str, Any]:
    """Return the options of a built-in function and their defaults as a recipe would contain them."""
    function = FUNCTIONS[name]
    parameters = list(inspect.signature(function).parameters.values())
    if not inspect.isclass(function):
        parameters = [
            p for p in parameters[NUM_ARGUMENTS:] if p.default is not p.empty and p.kind is not p.KEYWORD_ONLY
        ]
    defaults = {p.name: None if p.default is p.empty else p.default for p in parameters}
    return {
        option: value.__name__ if callable(value) else list(value) if isinstance(value, tuple) else value
        for option, value in defaults.items()
    }
