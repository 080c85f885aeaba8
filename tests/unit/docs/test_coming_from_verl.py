"""Every claim of configs/coming-from-verl.md beyond the mere name of a key is true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from megarl import pack_samples
from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.config.learning_rate import learning_rate
from megarl.config.load import load
from megarl.config.logprob_check_schema import LogprobCheck
from megarl.config.names import VERL, WITHOUT_KEY
from megarl.config.rollout_schema import Rollout
from megarl.config.run_schema import TrackerName
from megarl.config.schema import Config
from megarl.config.vllm_arguments import MANAGED
from megarl.core.completion import Completion, VersionRun
from megarl.core.prompt import Prompt
from megarl.data.cursor import PromptCursor
from megarl.data.files import file_rows
from megarl.data.images import ImageProcessor
from megarl.data.packing import Bundle, pack
from megarl.data.prompts import too_long
from megarl.environments.observation import limit_observation
from megarl.environments.registry import SHIPPED, check_environment
from megarl.environments.tools import tool, tools_of
from megarl.environments.transcript import Context, Transcript
from megarl.rewards.registry import column_parameters, resolve, takes_batches
from tests.paths import QUICKSTART
from tests.readme import text_of
from tests.tiny_model import tiny_tokenizer
from tests.unit.data.image_data import png


def config(*overrides: str) -> Config:
    return load(QUICKSTART, overrides)


def rates(*overrides: str) -> list[float]:
    """Return the learning rates of ten updates."""
    settings = config("actor.optimizer.lr=0.001", *(f"actor.optimizer.schedule.{each}" for each in overrides))
    return [learning_rate(settings.actor.optimizer, done, 10) for done in range(10)]


def minimum_is_absolute(_: Path) -> None:
    assert rates("name=linear", "min_lr=0.0005")[-1] >= 0.0005
    assert rates("name=linear", "min_lr=0.0")[-1] < 0.0005


def warmup_below_one_is_a_fraction(_: Path) -> None:
    assert rates("warmup=0.5") == rates("warmup=5")


def budget_is_in_tokens(_: Path) -> None:
    """Microbatches contain as many whole samples as fit, without padding."""
    packed = pack([Bundle((i,), length, length) for i, length in enumerate((6, 3, 2, 1))], token_budget=6)
    assert sorted(sorted(batch) for batch in map(list, packed)) == [[0], [1, 2, 3]]


def zero_means_no_kl(_: Path) -> None:
    assert not config("algorithm.kl.coefficient=0").has_reference
    assert config("algorithm.kl.coefficient=0.1").has_reference


def kl_estimators_are_verls(_: Path) -> None:
    """verl computes kl: d, abs: |d|, mse: d²/2 and low_var_kl: clamp(exp(−d) + d − 1, −10, 10)."""
    d = torch.tensor([-2.0, -0.5, 0.0, 0.3, 1.5])
    for name, expected in (("k1", d), ("k2", 0.5 * d**2), ("abs", d.abs()), ("k3", torch.exp(-d) + d - 1)):
        torch.testing.assert_close(KL_ESTIMATORS[name].function(d), expected)
    kl = config("algorithm.kl={coefficient: 0.1, estimator: k3, limit: 10, straight_through: true}").algorithm.kl
    assert (kl.limit, kl.straight_through) == (10, True)


def kl_may_be_in_the_reward(_: Path) -> None:
    assert config("algorithm.kl={placement: reward, coefficient: 0.1}").kl_in_reward


def constant_without_a_target(_: Path) -> None:
    assert config().algorithm.kl.adaptive_target is None


def oversampling_drops_rollouts(_: Path) -> None:
    assert config("batch.oversampling=1.5", "rollout.on_stale=drop").drops_rollouts
    with pytest.raises(ValueError, match=r"rollout\.on_stale=drop"):
        config("batch.oversampling=1.5")


def staleness_is_in_steps(_: Path) -> None:
    settings = config("rollout.max_staleness=2")
    assert settings.prompts_ahead == 2 * settings.batch.prompts_per_step


def data_repeats(_: Path) -> None:
    rows = PromptCursor(4, 0, True).take(12)
    assert sorted(rows) == sorted([*range(4)] * 3)


def trackers_exist(_: Path) -> None:
    assert set(get_args(TrackerName)) == {"tensorboard", "wandb", "mlflow", "trackio"}


def resume_takes_a_checkpoint(tmp_path: Path) -> None:
    values = [config(f"resume={value}").resume for value in ("never", "auto", str(tmp_path))]
    assert values == ["never", "auto", str(tmp_path)]


def reward_model_reads_these_inputs(_: Path) -> None:
    given = ("reward_model.path=m", "reward_model.engine=vllm")
    read = [config(*given, f"reward_model.input_format={name}") for name in ("ids", "text", "chat")]
    judge = ("reward_model.input_format=question", "reward_model.judge.max_new_tokens=16")
    read.append(config(*given, *judge))
    assert [settings.reward_model.input_format for settings in read] == ["ids", "text", "chat", "question"]


def functions_take_batches_columns_and_options(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "def one(prompt, response, answer, extra_info, row, scale=1):\n    return scale\n"
        "def batch(prompts, responses, answers):\n    return [0.0] * len(prompts)\n"
    )
    assert column_parameters(resolve(f"{tmp_path}/f.py:one"), 3) == {"extra_info": True, "row": True, "scale": False}
    assert resolve(f"{tmp_path}/f.py:one", {"scale": 7})("", "", "", {}, {}) == 7
    assert takes_batches(resolve(f"{tmp_path}/f.py:batch"))


def context_includes_the_response(_: Path) -> None:
    settings = config("rollout.max_new_tokens=10", "rollout.context_length=30", "data.overlong=drop")
    assert [too_long(length, "", settings, "") for length in (20, 21)] == [False, True]


def cache_is_in_gib(_: Path) -> None:
    assert MANAGED["rollout"]["kv_cache_memory_bytes"] == "rollout.kv_cache_gib"


def search_has_these_options(_: Path) -> None:
    assert "search" in SHIPPED
    check_environment("search", {"url": "http://host/retrieve", "topk": 3})


def tools_are_methods(_: Path) -> None:
    class Own:
        @tool
        def add(self, number: int) -> int:
            """Adds one."""
            return number + 1

    assert list(tools_of(Own)) == ["add"]


def observations_are_cut_in_tokens(_: Path) -> None:
    settings = config("environment.class=search", "environment.options={url: u}", "environment.observation_tokens=3")
    [message] = limit_observation([{"role": "user", "content": "abcdef"}], tiny_tokenizer(), settings.environment)
    assert message["content"] == "abc"


def logprobs_are_always_compared(_: Path) -> None:
    assert set(get_args(LogprobCheck.model_fields["action"].annotation)) == {"warn", "stop", "mask"}


def only_sampled_tokens_are_trained(_: Path) -> None:
    transcript = Transcript([1, 2])
    for turn in ([3, 4], [7]):
        transcript.add_turn(Completion(turn, [-1.0] * len(turn), (VersionRun(0, len(turn)),), "stop"))
        transcript.add_context(Context([5, 6]))
    sample = transcript.sample("a", Prompt("p", "", np.array([1, 2], np.int32)), "", "a", None)
    assert sample.response_ids.tolist() == [3, 4, 5, 6, 7]
    assert sample.response_mask.tolist() == [True, True, False, False, True]


def long_prompts_are_not_truncated(_: Path) -> None:
    assert set(get_args(Config.model_fields["data"].annotation.model_fields["overlong"].annotation)) == {
        "refuse",
        "drop",
    }


def ranks_are_balanced(_: Path) -> None:
    ranks = pack_samples([(0, 6), (0, 6), (0, 1), (0, 1)], token_budget=12, num_ranks=2)
    assert [sum(len(batch) for batch in rank) for rank in ranks] == [2, 2]


def zero_temperature_is_allowed(_: Path) -> None:
    [given] = config("evaluation.sets=[{name: a, temperature: 0}]").evaluation.sets
    assert given.temperature == 0


def chunked_prefill_is_managed(_: Path) -> None:
    assert "enable_chunked_prefill" in MANAGED["rollout"]


def layouts_determine_the_number_of_gpus(_: Path) -> None:
    assert (
        config("actor.layout.dp=2", "actor.layout.pp=1", "actor.layout.last_stage_layers=null").actor.layout.world_size
        == 2
    )


def vllm_is_the_only_engine_of_texts(_: Path) -> None:
    assert get_args(Rollout.model_fields["engine"].annotation) == ("vllm", "diffusers")


def megatron_is_the_only_trainer(_: Path) -> None:
    for role in ("actor", "critic"):
        assert "strategy" not in type(getattr(config(), role)).model_fields


def groups_of_equal_rewards_are_replaced(_: Path) -> None:
    assert config("batch.sampling_rounds=3").batch.sampling_rounds == 3


def there_is_no_overlong_buffer_by_default(_: Path) -> None:
    assert config().rewards.overlong_buffer is None


def reference_has_no_offload_key(_: Path) -> None:
    assert not any(
        "reference" in part for part in get_args(get_args(type(config().actor).model_fields["offload"].annotation)[0])
    )


def engines_have_no_load_format(_: Path) -> None:
    assert "load_format" not in type(config().rollout).model_fields


def prompts_keep_their_messages(_: Path) -> None:
    messages = ({"role": "user", "content": "1 + 1"},)
    assert Prompt("p", "", np.array([1], np.int32), messages=messages).messages == messages


def patches_come_from_the_encoded_image(folder: Path) -> None:
    settings = '{"patch_size": 16, "size": {"shortest_edge": 1, "longest_edge": 4096}}'
    (folder / "preprocessor_config.json").write_text(settings)
    assert ImageProcessor.of(folder).patches([png(64, 64)]).shape == (16, 3 * 2 * 16**2)


CLAIMS: dict[str, Callable[[Path], None]] = {
    "actor.strategy": megatron_is_the_only_trainer,
    "balance_batch": ranks_are_balanced,
    "calculate_log_probs": logprobs_are_always_compared,
    "critic.strategy": megatron_is_the_only_trainer,
    "custom_reward_function.name": functions_take_batches_columns_and_options,
    "custom_reward_function.path": functions_take_batches_columns_and_options,
    "custom_reward_function.reward_kwargs": functions_take_batches_columns_and_options,
    "do_sample": zero_temperature_is_allowed,
    "do_search": search_has_these_options,
    "enable_chunked_prefill": chunked_prefill_is_managed,
    "end_state_marker": only_sampled_tokens_are_trained,
    "extra_info": functions_take_batches_columns_and_options,
    "filter_groups.metric": groups_of_equal_rewards_are_replaced,
    "filter_overlong_prompts": long_prompts_are_not_truncated,
    "gpu_memory_utilization": cache_is_in_gib,
    "image_patch_size": patches_come_from_the_encoded_image,
    "input_tokenizer": reward_model_reads_these_inputs,
    "kl_ctrl.type": constant_without_a_target,
    "kl_loss_type": kl_estimators_are_verls,
    "log_prob_micro_batch_size": budget_is_in_tokens,
    "log_prob_micro_batch_size_per_gpu": budget_is_in_tokens,
    "logger": trackers_exist,
    "lr_warmup_steps_ratio": warmup_below_one_is_a_fraction,
    "max_prompt_length": context_includes_the_response,
    "max_start_length": context_includes_the_response,
    "min_lr_ratio": minimum_is_absolute,
    "multi_turn.max_tool_response_length": observations_are_cut_in_tokens,
    "multi_turn.tool_config_path": tools_are_methods,
    "n_gpus_per_node": layouts_determine_the_number_of_gpus,
    "no_think_rl": only_sampled_tokens_are_trained,
    "overlong_buffer.enable": there_is_no_overlong_buffer_by_default,
    "overlong_buffer_cfg.enable": there_is_no_overlong_buffer_by_default,
    "over_sample_rate": oversampling_drops_rollouts,
    "ppo_micro_batch_size": budget_is_in_tokens,
    "ppo_micro_batch_size_per_gpu": budget_is_in_tokens,
    "ref.fsdp_config.param_offload": reference_has_no_offload_key,
    "ref.megatron.param_offload": reference_has_no_offload_key,
    "resume_from_path": resume_takes_a_checkpoint,
    "resume_mode": resume_takes_a_checkpoint,
    "retriever": search_has_these_options,
    "return_multi_modal_inputs": patches_come_from_the_encoded_image,
    "return_raw_chat": prompts_keep_their_messages,
    "reward_manager": functions_take_batches_columns_and_options,
    "rollout.load_format": engines_have_no_load_format,
    "rollout.mode": vllm_is_the_only_engine_of_texts,
    "rollout.name": vllm_is_the_only_engine_of_texts,
    "staleness_threshold": staleness_is_in_steps,
    "start_state_marker": only_sampled_tokens_are_trained,
    "state_masking": only_sampled_tokens_are_trained,
    "total_epochs": data_repeats,
    "truncation": long_prompts_are_not_truncated,
    "use_dynamic_bsz": budget_is_in_tokens,
    "use_kl_in_reward": kl_may_be_in_the_reward,
    "use_kl_loss": zero_means_no_kl,
    "use_remove_padding": budget_is_in_tokens,
}
"""verl's key -> check of the note next to its equivalent, or of the reason for having none."""


def test_every_claim_has_a_test() -> None:
    assert set(CLAIMS) == {name for name, target in VERL.items() if " (" in target} | set(WITHOUT_KEY)


@pytest.mark.parametrize("name", CLAIMS)
def test_claim_is_true(name: str, tmp_path: Path) -> None:
    CLAIMS[name](tmp_path)


def test_parquet_files_of_verl_can_be_read(tmp_path: Path) -> None:
    row = {"data_source": "gsm8k", "prompt": [{"role": "user", "content": "1 + 1"}], "ability": "math"}
    row |= {"reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 0}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    [read] = file_rows(tmp_path / "train.parquet", "prompt", "reward_model.ground_truth", {"data_source": None})
    assert (read.prompt, read.answer, read.columns) == (row["prompt"], "2", {"data_source": "gsm8k"})
    assert "data.answer_column=reward_model.ground_truth" in text_of("configs/coming-from-verl.md")


def test_page_has_no_outdated_limits() -> None:
    page = text_of("configs/coming-from-verl.md")
    assert "not yet" not in page.lower() and "todo" not in page.lower()


def test_defaults_that_differ_are_megarls() -> None:
    """The third column of the table has megarl's defaults."""
    table = text_of("configs/coming-from-verl.md").split("## Defaults that differ")[1]
    settings = config("algorithm.advantage.estimator=gae", "critic.path=m")
    expected = {
        "gae_lambda": settings.algorithm.advantage.option("gae_lambda"),
        "dual_clip": settings.algorithm.objective.option("dual_clip"),
        "value.clip": settings.algorithm.value.clip,
        "objective.aggregation": settings.algorithm.objective.aggregation,
    }
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"]
    for name, value in expected.items():
        [default] = [row[2] for row in cells if row[0].endswith(name)]
        assert default == ("none" if value is None else str(value)), name
