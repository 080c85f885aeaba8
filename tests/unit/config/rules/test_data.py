from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import errors, recipe

FILE = "data.source=rows.jsonl"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.sort_column=level", "data.shuffle=false"],
            "data.sort_column=level: has no effect unless data.source=FILE",
        ),
        (
            ["data.weight_column=level"],
            "data.weight_column=level: has no effect unless data.source=FILE",
        ),
        (
            [FILE, "data.sort_column=level"],
            "data.sort_column=level: data.shuffle=true would change the order. Fix: set",
        ),
        (
            [FILE, "data.sort_column=level", "data.solved_weight=0.1"],
            (
                "data.sort_column=level: data.weight_column, data.solved_weight and data.source_weights draw rows in "
                "random"
            ),
        ),
        (
            ["data.more_sources=[b.jsonl]"],
            "data.source=arithmetic: only files can be combined, but arithmetic generates its rows. Fix:",
        ),
        (
            [FILE, "data.more_sources=[rows.jsonl]"],
            "data.more_sources: rows.jsonl is listed twice. Fix: list it once",
        ),
        (
            [FILE, "data.more_sources=[arithmetic]"],
            "data.more_sources=arithmetic: only files can be combined, but arithmetic generates its rows.",
        ),
        (
            [FILE, "data.more_sources=[b.jsonl]", "data.source_weights={rows.jsonl: 1}"],
            "with data.source_column=null, the keys must be rows.jsonl, b.jsonl. Fix: use these keys",
        ),
        (["data.solved_above=1"], "data.solved_above=1.0: has no effect unless data.solved_weight=0.05. Fix"),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


VISION = (FILE, "model.vision=true", "data.image_column=images")
SET = "{name: set, source: b.jsonl, functions: [{function: exact_match}]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([FILE, "data.image_column=images"], "data.image_column=images: has no effect unless model.vision=true. Fix"),
        (
            ["model.vision=true", "data.image_column=images"],
            "data.image_column=images: has no effect unless data.source=FILE",
        ),
        (["data.max_pixels=9000"], "data.max_pixels=9000: has no effect unless data.image_column=images (or an"),
        (
            [*VISION, "data.min_pixels=9000", "data.max_pixels=8000"],
            "data.min_pixels=9000: exceeds data.max_pixels=8000. Fix: set data.min_pixels=null",
        ),
        (
            [*VISION, "environment.class=calculator", "rewards.functions=[]", "data.chat_template=false"],
            "data.image_column=images: with environment.class=calculator, images require a chat",
        ),
        (
            [*VISION, "reward_model.path=m", "rewards.functions=[]"],
            "reward_model.path=m: the reward model does not see the images of prompts. Fix: set reward_model.path=null",
        ),
        (
            ["model.vision=true", "reward_model.path=m", f"evaluation.sets=[{SET}, image_column: images}}]"],
            "reward_model.path=m: the reward model does not see the images of prompts. Fix: set reward_model.path=null",
        ),
        (
            [*VISION, "data.format=labels", "algorithm.objective.name=process_reward_model"],
            "data.image_column=images: has no effect unless data.format=prompts (or messages or preferences). Fix: set",
        ),
        (["data.image_folders=[/photos]"], "data.image_folders=[/photos]: has no effect unless data.image_column=imag"),
        (
            [f"evaluation.sets=[{SET}, image_column: images}}]"],
            "evaluation.sets: set has image_column=images, but model.vision=false. Fix: set model.vision=true",
        ),
        (
            [*VISION, f"evaluation.sets=[{SET.replace('b.jsonl', 'arithmetic')}, image_column: images}}]"],
            "evaluation.sets: set has image_column=images, but source=arithmetic has no images. Fix: set source to a",
        ),
        (
            [
                *(*VISION, "data.chat_template=false"),
                "evaluation.sets=[{name: set, source: b.jsonl, environment: {class: calculator}}]",
            ],
            "evaluation.sets: set: with environment.class=calculator, images require a chat",
        ),
        (
            [
                *("model.vision=true", "environment.class=calculator", "rewards.functions=[]"),
                *("data.chat_template=false", "evaluation.sets=[{name: set, source: b.jsonl, image_column: images}]"),
            ],
            "evaluation.sets: set: with environment.class=calculator, images require a chat",
        ),
    ],
)
def test_unusable_image_options_are_rejected(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


def test_sets_may_have_their_own_images() -> None:
    config = recipe("model.vision=true", f"evaluation.sets=[{SET}, image_column: images}}]", "data.max_pixels=9000")
    assert config.may_have_images and config.data.image_column is None
    assert not recipe(*VISION, f"evaluation.sets=[{SET}, image_column: ''}}]").evaluation.sets[0].image_column
    environment = ("model.vision=true", "environment.class=calculator", "rewards.functions=[]", "data.max_pixels=9000")
    assert recipe(*environment, f"evaluation.sets=[{SET}, image_column: images, environment: {{class: null}}}}]")
    assert recipe(FILE, "data.image_column=images", *environment).trains_on_images


def test_environments_may_have_images() -> None:
    """Whether an environment sends images is known only at run time, and some models require model.vision=true even
    for text."""
    played = ("environment.class=calculator", "model.vision=true")
    assert recipe(*played, "rewards.functions=[]", "data.max_pixels=9000").trains_on_images
    assert not recipe(*played, "rewards.functions=[]", "data.chat_template=false").trains_on_images
    assert recipe(*played, "rewards.functions=[]", "teachers.models=[{name: a, path: x, feedback: environment}]")
    evaluated = f"evaluation.sets=[{SET}, environment: {{class: calculator}}}}]"
    config = recipe("model.vision=true", evaluated, "data.max_pixels=9000")
    assert config.may_have_images and not config.trains_on_images
    assert recipe("model.vision=true", evaluated, "reward_model.path=m").has_reward_model
    templated = "data.chat_template=false", f"evaluation.sets=[{SET}, chat_template: true}}]"
    assert recipe(*played, "rewards.functions=[]", *templated, "data.max_pixels=9000").may_have_images


@pytest.mark.parametrize(("rows", "objective"), [("messages", "sft"), ("preferences", "dpo")])
def test_offline_data_may_have_images(rows: str, objective: str) -> None:
    config = recipe(*VISION, f"data.format={rows}", f"algorithm.objective.name={objective}", "data.max_pixels=9000")
    assert config.is_offline and config.data.image_column == "images"


def test_data_order_keys_require_prompts() -> None:
    lines = errors(FILE, "data.format=preferences", "algorithm.objective.name=dpo", "data.solved_weight=0.1")
    assert "data.solved_weight=0.1: has no effect unless data.format=prompts. Fix" in lines[0]


def test_only_weighted_data_is_drawn_by_weight() -> None:
    assert not recipe(FILE, "data.sort_column=level", "data.shuffle=false").data.draws_by_weight
    assert recipe(FILE, "data.weight_column=level", "data.solved_weight=0.1").data.draws_by_weight


def test_system_prompt_is_accepted_for_prompt_rows() -> None:
    assert recipe("data.system_prompt=Be brief.").data.system_prompt == "Be brief."


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.chat_template=false"], "data.chat_template=false cannot format a system message. Fix"),
        (
            ["data.source=environment", "environment.class=calculator"],
            "data.source=environment provides no prompts. Fix: set",
        ),
        (
            ["algorithm.objective.name=sft", "data.format=messages"],
            "data.format=messages provides no prompts. Fix: set",
        ),
    ],
)
def test_system_prompt_is_rejected_for_other_data(overrides: list[str], message: str) -> None:
    (line,) = [line for line in errors("data.system_prompt=Be brief.", *overrides) if "system_prompt" in line]
    assert line.startswith("data.system_prompt: ") and message in line
