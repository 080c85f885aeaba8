from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.rules.recipes import errors, recipe

TEACHERS = "teachers.models=[{name: math, path: large}, {name: code, path: larger, weight: 0.5}]"
SHOWN = "teachers.models=[{engine: megatron, feedback: null, layout: null, name: m...: has no effect unless "
IN_VLLM = "teachers.models=[{name: a, path: x, engine: vllm}]"
ALONE = "rewards.functions=[]"
OFFLINE = (
    *("algorithm.objective.name=sft", "data={source: rows.jsonl, format: messages}"),
    "algorithm.distillation={divergence: forward_kl, placement: loss}",
)


def test_teachers_have_defaults_and_their_own_devices() -> None:
    config = recipe(TEACHERS, ALONE, "teachers.layout.tp=4")
    assert [(teacher.name, teacher.weight) for teacher in config.teachers.models] == [("math", 1.0), ("code", 0.5)]
    assert config.num_ranks == {"actor": 2, "teachers": 4, "rollout": 1}
    assert config.has_teachers and not config.has_rewards and config.distills_by_advantage
    assert config.algorithm.distillation.estimator == "k1"
    in_loss = recipe(TEACHERS, "algorithm.distillation.placement=loss")
    assert in_loss.has_rewards and not in_loss.distills_by_advantage
    assert in_loss.algorithm.distillation.estimator == "k2"


def test_exact_divergence_has_no_estimator() -> None:
    config = recipe(TEACHERS, "algorithm.distillation={divergence: jsd, beta: 0.1, placement: loss}")
    assert config.distills_exactly and not config.distills_by_advantage
    assert config.algorithm.distillation.estimator is None
    assert not recipe(TEACHERS).distills_exactly


def test_largest_layout_sets_the_number_of_devices() -> None:
    config = recipe("teachers.models=[{name: a, path: x}, {name: b, path: y, layout: {tp: 4, dp: 2}}]")
    assert config.num_ranks["teachers"] == 8
    assert [config.teacher_section(name).layout.tp for name in "ab"] == [1, 4]
    ranks = config.teachers.for_ranks_of(config.teachers.models[0])
    assert ranks.layout.world_size == 1 and [teacher.layout.world_size for teacher in ranks.models] == [1, 8]


def test_divergence_over_top_tokens_needs_no_hidden_states() -> None:
    config = recipe(SELF, ROWS, "algorithm.distillation={divergence: reverse_kl, top_k: 64, placement: loss}")
    assert config.compares_distributions and not config.distills_exactly
    assert config.algorithm.distillation.estimator is None


def test_exact_divergences_work_with_fine_tuning() -> None:
    config = recipe(TEACHERS, *OFFLINE)
    assert config.distills_exactly and config.num_ranks == {"actor": 2, "teachers": 1}
    [line] = errors(TEACHERS, *OFFLINE, "algorithm.objective.name=dpo", "data.format=preferences")
    assert line.startswith(f"{SHOWN}data.format=prompts (or, with algorithm.objective.name=sft")


def test_fine_tuning_may_learn_from_teachers_alone() -> None:
    config = recipe(TEACHERS, *OFFLINE, "algorithm.objective.nll_coefficient=0")
    assert config.algorithm.objective.is_without_nll and "rollout" not in config.num_ranks
    assert not recipe(TEACHERS, *OFFLINE).algorithm.objective.is_without_nll


def test_actor_reads_teachers_from_their_folders() -> None:
    models = "{name: math, path: large}, {name: hinted, prompt_column: hint}, {name: code, path: larger, weight: 0.5}"
    folders = {"math": Path("/models/a"), "code": Path("/models/b")}
    teachers = recipe(f"teachers.models=[{models}]", ROWS).teachers.in_folders(folders)
    assert [(item.path, item.revision, item.weight) for item in teachers.models] == [
        ("/models/a", None, 1.0),
        (None, None, 1.0),
        ("/models/b", None, 0.5),
    ]


GIVEN = "algorithm.distillation={divergence: jsd, placement: loss, on_policy_share: 0.5}"
TRUST_REGION = ("model.dtype=float32", "algorithm.objective.name=unclipped", "algorithm.trust_region.kl_limit=0.01")
GRADIENT, RESPONSES = "algorithm.advantage.estimator=policy_gradient", "data.response_column=solution"


def test_prompts_may_be_trained_on_given_responses() -> None:
    config = recipe(TEACHERS, GIVEN, ALONE, GRADIENT, RESPONSES, ROWS)
    assert config.trains_given_responses and not recipe(TEACHERS).trains_given_responses


SELF = "teachers.models=[{name: hinted, prompt_column: hint}]"
ROWS = "data.source=rows.jsonl"


def test_self_teacher_has_no_devices_of_its_own() -> None:
    config = recipe(SELF, ROWS, ALONE)
    assert config.has_teachers and config.distills_by_advantage and "teachers" not in config.num_ranks
    assert config.placed_teachers == [] and [teacher.name for teacher in config.self_teachers] == ["hinted"]
    assert not config.keeps_reference
    both = "teachers.models=[{name: hinted, prompt_column: hint}, {name: large, path: x, prompt_column: hint}]"
    config = recipe(both, ROWS, "teachers.layout.tp=2")
    assert config.num_ranks["teachers"] == 2
    assert [(teacher.name, path) for teacher, path in config.placed_teachers] == [("large", "x")]


def test_self_teacher_may_be_a_moving_average() -> None:
    models = "teachers.models=[{name: hinted, prompt_column: hint, weights: reference}]"
    config = recipe(models, ROWS, "algorithm.kl={renew_steps: 1, renew_share: 0.05}")
    assert config.keeps_reference and not config.has_reference
    [line] = errors(SELF, ROWS, "algorithm.kl.renew_steps=1")
    assert line.startswith("algorithm.kl.renew_steps=1: has no effect unless algorithm.kl.coefficient=0.001.")


def test_coefficient_of_zero_leaves_the_teachers_out() -> None:
    config = recipe(TEACHERS, "algorithm.distillation.coefficient=0")
    assert not config.has_teachers and "teachers" not in config.num_ranks
    [line] = errors(TEACHERS, ALONE, "algorithm.distillation.coefficient=0")
    assert line.startswith("rewards.functions=[]: samples would have no reward.")


def test_coefficient_may_increase_from_zero() -> None:
    config = recipe(TEACHERS, "algorithm.distillation={coefficient: 0, anneal_steps: 10, final_coefficient: 0.5}")
    assert config.has_teachers
    coefficients = [config.algorithm.distillation.coefficient_in(step) for step in (1, 2, 11, 12)]
    assert coefficients == pytest.approx([0.0, 0.05, 0.5, 0.5])


def test_fine_tuning_goes_on_without_teachers() -> None:
    """The responses in the data are a signal in all steps."""
    annealed = ("algorithm.distillation.anneal_steps=9", "run.steps=10", ALONE)
    assert recipe(TEACHERS, *OFFLINE, *annealed).has_teachers


def test_null_removes_the_teachers() -> None:
    assert recipe(TEACHERS, "teachers=null") == recipe()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["teachers.models=[{name: a, path: x}, {name: b, path: y}, {name: a, path: z}]"],
            "teachers.models: two teachers have the name a. Fix: give each teacher a different name",
        ),
        (
            [TEACHERS, ALONE, "batch.sampling_rounds=2"],
            "batch.sampling_rounds=2: dynamic sampling replaces prompts whose samples have equal rewards, but with",
        ),
        (
            ["teachers.models=[{name: a, path: x, sources: [math]}]"],
            "teachers.models: a with sources=['math']: the source of a row is unknown, because data.source_column=",
        ),
        (
            [TEACHERS, ALONE, "algorithm.distillation.anneal_steps=9", "run.steps=10"],
            "algorithm.distillation.anneal_steps=9: with rewards.functions=[] and final_coefficient=0, the actor would",
        ),
        (
            [TEACHERS, "algorithm.distillation.final_coefficient=0.5"],
            "algorithm.distillation.final_coefficient=0.5: has no effect unless algorithm.distillation.anneal",
        ),
        (
            ["teachers.models=[{name: a}]"],
            "teachers.models: a with path=null, prompt_column=null and feedback=null: the teacher would see",
        ),
        (
            ["teachers.models=[{name: a, feedback: check}]"],
            "teachers.models: a with feedback=check: rewards.functions has no function with this name. Fix: add "
            "check to rewards.functions, or use one of ",
        ),
        (
            ["teachers.models=[{name: a, feedback: [exact_match], prompt_column: hint}]", ROWS],
            "teachers.models: a with feedback=exact_match and prompt_column=hint: feedback is",
        ),
        (
            ["teachers.models=[{name: a, feedback: [exact_match, exact_match]}]"],
            "teachers.models: a with feedback=[exact_match, exact_match]: exact_match is listed more than once. Fix:",
        ),
        (
            ["teachers.models=[{name: a, feedback: [exact_match, environment]}]"],
            "teachers.models: a with feedback=environment: environment.class=null. Fix: set environment.class, or use",
        ),
        (
            ["teachers.models=[{name: a, path: x, feedback: exact_match}]", *OFFLINE],
            "teachers.models: a with feedback=exact_match: responses are not sampled with data.format=messages, so "
            "there is no feedback on them. Fix: remove feedback from a",
        ),
        (
            ["teachers.models=[{name: a, feedback: exact_match}]", *OFFLINE],
            "teachers.models: a with feedback=exact_match: responses are not sampled with data.format=messages, so "
            "there is no feedback on them. Fix: remove the teacher a",
        ),
        (
            ["teachers.models=[{name: a, prompt_column: hint, revision: v1}]", ROWS],
            "teachers.models: a with revision=v1: has no effect with path=null. Fix: set path, or remove revision",
        ),
        (
            ["teachers.models=[{name: a, path: x, weights: reference}]"],
            "teachers.models: a with weights=reference: has no effect with path=x. Fix: remove weights, or set path",
        ),
        (
            [SELF],
            "teachers.models: hinted with prompt_column=hint: data.source=arithmetic has no such column. Fix: set",
        ),
        (
            [SELF, ROWS, "environment.class=game.py:Game", "actor.experts.replay_routes=true"],
            "teachers.models: hinted with prompt_column=hint: with actor.experts.replay_routes=true, megarl cannot",
        ),
        ([SELF, ROWS, "teachers.layout.tp=2"], "teachers.layout.tp=2: has no effect unless teachers.models=[{name:"),
        (
            ["algorithm.distillation.placement=loss"],
            "algorithm.distillation.placement=loss: has no effect unless teachers.models=[{name: NAME, path: PATH}].",
        ),
        (
            [TEACHERS, "algorithm.distillation.divergence=jsd"],
            "algorithm.distillation.divergence=jsd: a divergence between distributions must be part of the",
        ),
        (
            [TEACHERS, "algorithm.distillation={divergence: jsd, placement: loss}", "rollout.top_k=50"],
            "algorithm.distillation.divergence=jsd: this divergence needs the full vocabulary, but rollout.top_k=50",
        ),
        (
            [TEACHERS, "algorithm.distillation={divergence: jsd, placement: loss, estimator: k2}"],
            "algorithm.distillation.estimator=k2: has no effect unless algorithm.distillation.divergence=sampled.",
        ),
        (
            [TEACHERS, "algorithm.distillation={divergence: forward_kl, placement: loss, limit: 1.0}"],
            "algorithm.distillation.limit=1.0: has no effect unless algorithm.distillation.divergence=sampled.",
        ),
        (
            [TEACHERS, "algorithm.distillation={divergence: forward_kl, placement: loss, beta: 0.1}"],
            "algorithm.distillation.beta=0.1: has no effect unless algorithm.distillation.divergence=jsd.",
        ),
        (
            [TEACHERS, "algorithm.distillation.top_k=64"],
            "algorithm.distillation.top_k=64: has no effect unless algorithm.distillation.divergence=reverse_kl.",
        ),
        (
            [IN_VLLM, "algorithm.distillation={divergence: jsd, placement: loss}"],
            "teachers.models: a with engine=vllm: an exact divergence (algorithm.distillation.divergence=jsd) needs",
        ),
        (
            [IN_VLLM, "rollout.top_k=50"],
            "teachers.models: a with engine=vllm: vLLM normalizes log-probs over the full vocabulary, but",
        ),
        (
            [IN_VLLM, "teachers.layout.pp=2"],
            "teachers.models: a with engine=vllm: teachers in vLLM support only tp and dp, but teachers.layout sets",
        ),
        (
            [IN_VLLM, "teachers.offload=[parameters]"],
            "teachers.offload=[parameters]: has no effect unless teachers.models=[{name: NAME, path: PATH, engine: m",
        ),
        (
            [IN_VLLM, "teachers.vllm_overrides={max_logprobs: 3}"],
            "teachers.vllm_overrides.max_logprobs=3: megarl sets this argument from algorithm.distillation.top_k. Fix:",
        ),
        (
            [TEACHERS, "teachers.kv_cache_gib=2"],
            "teachers.kv_cache_gib=2.0: has no effect unless teachers.models=[{name: NAME, path: PATH, engine: vllm}].",
        ),
        (
            ["teachers.models=[{name: a, prompt_column: hint, engine: vllm}]", ROWS],
            "teachers.models: a with engine=vllm: has no effect with path=null",
        ),
        (
            ["teachers.models=[{name: a, path: x, layout: {sequence_parallel: true}}]"],
            "teachers.models: a: layout.sequence_parallel=true: sequence parallelism shards over tensor-parallel ranks",
        ),
        (
            ["teachers.models=[{name: a, path: x, layout: {dp: 129}}, {name: b, path: y}]"],
            "teachers.models: a: layout.dp=129: an update has only 128 samples",
        ),
        (["teachers.layout.tp=2"], "teachers.layout.tp=2: has no effect unless teachers.models=[{name: NAME"),
        (
            [TEACHERS, "teachers.tokens_per_microbatch=255"],
            "teachers.tokens_per_microbatch=255: a sample can have up to rollout.context_length=256 tokens and is",
        ),
        (
            [*OFFLINE, "teachers.models=[{name: a, path: x, prompt_column: hint}]"],
            "teachers.models: a with prompt_column=hint: with data.format=messages, teachers see the rows' own",
        ),
        ([TEACHERS, "teachers.layout.dp=129"], "teachers.layout.dp=129: an update has only 128 samples"),
        (
            [TEACHERS, "algorithm.objective.name=dpo"],
            f"{SHOWN}algorithm.objective.name=clip (or another objective that",
        ),
        (
            [TEACHERS, "algorithm.objective.name=sft", "data={source: rows.jsonl, format: messages}"],
            f"{SHOWN}data.format=prompts (or, with algorithm.objective.name=sft, algorithm.distillation.divergence=j",
        ),
        (
            [TEACHERS, GIVEN, ALONE, GRADIENT, ROWS],
            "algorithm.distillation.on_policy_share=0.5: the remaining prompts need responses, but data.",
        ),
        (
            [TEACHERS, GIVEN, "algorithm.distillation.divergence=sampled", ALONE, GRADIENT, ROWS, RESPONSES],
            "algorithm.distillation.on_policy_share=0.5: algorithm.distillation.divergence=sampled estimates the KL",
        ),
        (
            [TEACHERS, GIVEN, GRADIENT, ROWS, RESPONSES],
            "algorithm.distillation.on_policy_share=0.5: the only loss on given responses is the divergence from",
        ),
        (
            [TEACHERS, GIVEN, ALONE, ROWS, RESPONSES],
            "algorithm.distillation.on_policy_share=0.5: without rewards, algorithm.advantage.estimator=grpo has no",
        ),
        (
            [TEACHERS, GIVEN, ALONE, GRADIENT, ROWS, RESPONSES, *TRUST_REGION],
            "algorithm.distillation.on_policy_share=0.5: algorithm.trust_region.kl_limit=0.01 limits the change",
        ),
        (
            ["teachers.models=[{name: a, path: x, layout: {tp: 2}}]", "teachers.layout.tp=4"],
            "teachers.layout.tp=4: has no effect unless teachers.models=[{name: NAME, path: PATH}] (a teacher without",
        ),
        (
            [TEACHERS, "rewards.functions=[{function: f.py:f, weight: 0}]", "batch.sampling_rounds=3"],
            "batch.sampling_rounds=3: dynamic sampling replaces prompts whose samples have equal rewards, but all",
        ),
        (
            [TEACHERS, *OFFLINE, "algorithm.distillation.on_policy_share=0.5"],
            "algorithm.distillation.on_policy_share=0.5: with data.format=messages, no responses are sampled. Fix:",
        ),
        (
            [*OFFLINE[:2], "algorithm.objective.nll_coefficient=0"],
            "algorithm.objective.nll_coefficient=0: the loss would be 0, because teachers.models=[]. Fix: add a teac",
        ),
        (
            [TEACHERS, *OFFLINE, "algorithm.objective.nll_coefficient=0", "algorithm.distillation.coefficient=0"],
            "algorithm.objective.nll_coefficient=0: the loss would be 0, because algorithm.distillation.coefficient=0.",
        ),
        (
            [TEACHERS, *OFFLINE, "algorithm.objective.nll_coefficient=0", "algorithm.distillation.anneal_steps=9"],
            "algorithm.distillation.anneal_steps=9: with algorithm.objective.nll_coefficient=0 and final_coefficient=0",
        ),
        (
            [ROWS, RESPONSES],
            "data.response_column=solution: has no effect unless rollout.prefix_share=0.5 or algorithm.disti",
        ),
        (
            ["teachers.models=[{name: a, path: x, sources: [math]}]", *OFFLINE],
            "teachers.models: a with sources=['math']: with data.format=messages, every teacher scores all rows. Fix:",
        ),
    ],
)
def test_invalid_teachers_are_rejected(overrides: list[str], line: str) -> None:
    [found] = errors(*overrides)
    assert found.startswith(line)


def test_image_models_have_no_teachers() -> None:
    assert any(line.startswith(f"{SHOWN}rollout.engine=vllm") for line in errors(TEACHERS, "rollout.engine=diffusers"))


@pytest.mark.parametrize(
    ("teacher", "line"),
    [
        ("{name: a, path: x, layer: 3}", "command line: teachers.models.0.layer: unknown key; did you mean"),
        ("{name: a b, path: x}", "command line: teachers.models.0.name=a b: expected text that matches"),
        ("{path: x}", "command line: missing key teachers.models.0.name."),
        ("{name: a, path: x, weight: 0}", "command line: teachers.models.0.weight=0: "),
    ],
)
def test_invalid_key_of_a_teacher_is_named(teacher: str, line: str) -> None:
    [found] = errors(f"teachers.models=[{teacher}]")
    assert found.startswith(line)
