"""Rules for section `data`; rules that relate the objective to the data are in `algorithm`."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.data_schema import OWN_TASKS, is_procedural
from megarl.config.document import show
from megarl.config.schema import Config


def messages_require_chat_template(config: Config) -> Iterator[str]:
    if config.data.format == "messages" and not config.data.chat_template:
        yield (
            "data.chat_template=false: data.format=messages requires a chat template to format turns. Fix: set "
            "data.chat_template=true"
        )


def system_prompt_requires_prompts_and_chat_template(config: Config) -> Iterator[str]:
    data = config.data
    if data.system_prompt is None:
        return
    if data.format != "prompts" or data.source == OWN_TASKS:
        rows = f"format={data.format}" if data.format != "prompts" else f"source={data.source}"
        yield (
            f"data.system_prompt: megarl adds it to prompts from rows, but data.{rows} provides no prompts. Fix: set "
            "data.system_prompt=null and put system messages into the conversations"
        )
    elif not data.chat_template:
        yield (
            "data.system_prompt: data.chat_template=false cannot format a system message. Fix: set "
            "data.chat_template=true, or put the text into the prompts"
        )


def reasoning_tasks_require_prompts(config: Config) -> Iterator[str]:
    data = config.data
    if data.reasoning_task is not None and config.is_offline:
        yield f"data.format={data.format}: data.source={data.source} provides prompts. Fix: set data.format=prompts"


def stages_have_sizes_and_keep_their_order(config: Config) -> Iterator[str]:
    data = config.data
    wrong = next((stage for stage in data.stages if type(stage.get("size")) is not int or stage["size"] < 1), None)
    if data.stages and data.size is not None:
        yield f"data.size={data.size}: each of data.stages has its own size. Fix: set data.size=null"
    elif data.stages and data.shuffle:
        yield (
            "data.shuffle=true: shuffling would mix the rows of different data.stages. Fix: set data.shuffle=false "
            "(rows within a stage are random in any case)"
        )
    elif wrong is not None:
        yield (
            f"data.stages: {wrong} has no valid size. Fix: set size to the number of rows, for example {{size: 1000, "
            "n_people: 3}"
        )


def sorted_rows_keep_their_order(config: Config) -> Iterator[str]:
    data = config.data
    if data.sort_column is not None and data.draws_by_weight:
        yield (
            f"data.sort_column={data.sort_column}: data.weight_column, data.solved_weight and data.source_weights draw "
            "rows in random order. Fix: set data.sort_column=null"
        )
    elif data.sort_column is not None and data.shuffle:
        yield (
            f"data.sort_column={data.sort_column}: data.shuffle=true would change the order. Fix: set "
            "data.shuffle=false"
        )


def combined_sources_are_distinct_files(config: Config) -> Iterator[str]:
    data = config.data
    twice = next((source for source in data.sources if data.sources.count(source) > 1), None)
    procedural = next((source for source in data.sources if is_procedural(source)), None)
    if twice is not None:
        yield f"data.more_sources: {twice} is listed twice. Fix: list it once"
    elif data.more_sources and procedural is not None:
        key = "source" if procedural == data.source else "more_sources"
        yield (
            f"data.{key}={procedural}: only files can be combined, but {procedural} generates its rows. Fix: set "
            "data.more_sources=[]"
        )


def source_weights_match_sources(config: Config) -> Iterator[str]:
    data = config.data
    if not data.source_weights or data.source_column is not None or config.is_offline:
        return
    if set(data.source_weights) != set(data.sources):
        yield (
            f"data.source_weights={show(data.source_weights)}: with data.source_column=null, the keys must be "
            f"{', '.join(data.sources)}. Fix: use these keys, or set data.source_column"
        )


def pixel_limits_are_ordered(config: Config) -> Iterator[str]:
    smallest, largest = config.data.min_pixels, config.data.max_pixels
    if smallest is not None and largest is not None and smallest > largest:
        yield f"data.min_pixels={smallest}: exceeds data.max_pixels={largest}. Fix: set data.min_pixels=null"


def images_in_environments_require_chat_template(config: Config) -> Iterator[str]:
    if config.data.image_column is not None and config.has_environment and not config.data.chat_template:
        yield (
            f"data.image_column={config.data.image_column}: with environment.class={config.environment.name}, images "
            "require a chat template. Fix: set data.chat_template=true"
        )


def images_exclude_text_only_models(config: Config) -> Iterator[str]:
    # Whether an environment sends images is known only when a sample is scored.
    has_column = config.data.image_column is not None or any(item.image_column for item in config.evaluation.sets)
    if has_column and config.has_reward_model:
        yield (
            f"reward_model.path={config.reward_model.path}: the reward model does not see the images of prompts. Fix: "
            "set reward_model.path=null and score responses with rewards.functions, such as generative_judge, which "
            "receives the images"
        )


RULES = (
    messages_require_chat_template,
    system_prompt_requires_prompts_and_chat_template,
    reasoning_tasks_require_prompts,
    stages_have_sizes_and_keep_their_order,
    sorted_rows_keep_their_order,
    combined_sources_are_distinct_files,
    source_weights_match_sources,
    pixel_limits_are_ordered,
    images_in_environments_require_chat_template,
    images_exclude_text_only_models,
)
