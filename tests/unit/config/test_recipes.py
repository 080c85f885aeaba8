"""Every recipe is valid."""

import pytest

from megarl.config.load import load
from tests.paths import CONFIGS

RECIPES = sorted(CONFIGS.glob("*-*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_is_valid_and_named_after_its_run(recipe):
    assert recipe.read_text().startswith("# ")
    assert recipe.stem.endswith(f"-{load(recipe).run.name}")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_clipping_recipes_make_several_updates(recipe):
    """With one update per step, every ratio is 1 and every value equals the old value, so clipping has no effect."""
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
