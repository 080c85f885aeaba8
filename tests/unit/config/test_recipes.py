"""Every recipe is one that could start."""

from pathlib import Path

import pytest

from megarl.config.load import load

RECIPES = sorted((Path(__file__).parents[3] / "configs").glob("*-*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_keeps_all_rules_and_says_what_it_is(recipe):
    assert recipe.read_text().startswith("# ")
    assert recipe.stem.endswith(f"-{load(recipe).run.name}")
