"""Every recipe is one that could start."""

import pytest

from megarl.config.load import load
from tests.paths import CONFIGS

RECIPES = sorted(CONFIGS.glob("*-*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_keeps_all_rules_and_says_what_it_is(recipe):
    assert recipe.read_text().startswith("# ")
    assert recipe.stem.endswith(f"-{load(recipe).run.name}")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_what_a_recipe_clips_can_move(recipe):
    """Every ratio is 1 in a step's only update, and every value the one before the step."""
    config = load(recipe)
    objective, critic_clip = config.algorithm.objective, config.algorithm.value.clip
    defaults = objective.spec.options
    clips = [
        name
        for name in ("clip_low", "clip_high", "dual_clip")
        if name in defaults and objective.option(name) != defaults[name]
    ]
    if clips or critic_clip is not None:
        assert config.batch.prompts_per_update < config.batch.prompts_per_step
