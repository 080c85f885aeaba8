import math
import subprocess
import sys
from dataclasses import replace

import pytest

from megarl.config.schema import RewardFunction
from megarl.core.types import Prompt, Sample, Score, TokenTotals, VersionRun
from megarl.rewards.classifier import ModelReward
from megarl.rewards.scorer import Scorer

NAN = math.nan


def sample_of(response: str, answer: object = "12") -> Sample:
    return Sample(
        id="s7",
        prompt=Prompt(id="p", text="<user>7+5?", token_ids=(1,), answer=answer),
        response_ids=(5,),
        response_logprobs=(-0.5,),
        response_mask=(True,),
        versions=(VersionRun(0, 1),),
        finish_reason="stop",
        text=response,
    )


def scorer_of(tmp_path, body: str, weight: float = 1.0) -> tuple[Scorer, str]:
    file = tmp_path / "reward.py"
    file.write_text(f"def f(prompt, response, answer):\n    {body}\n")
    name = f"{file}:f"
    return Scorer([RewardFunction(function="exact_match"), RewardFunction(function=name, weight=weight)]), name


def test_the_value_is_the_weighted_sum_of_the_parts(tmp_path):
    scorer, name = scorer_of(tmp_path, "return len(prompt) + len(response) + len(answer)", weight=-0.5)
    score, _ = scorer.score(sample_of("12"))
    assert score == Score(value=1.0 - 0.5 * 14, parts={"exact_match": 1.0, name: 14.0})
    assert type(score.parts["exact_match"]) is float


def test_wrong_is_zero_and_no_failure():
    score, _ = Scorer([RewardFunction(function="exact_match")]).score(sample_of("13"))
    assert score == Score(value=0.0, parts={"exact_match": 0.0})


def test_no_answer_is_a_failure():
    score, _ = Scorer([RewardFunction(function="exact_match")]).score(sample_of("12", answer=None))
    assert score.value is None and "exact_match raised ValueError: the prompt has no answer" in score.failure


def test_an_exception_is_a_failure_in_one_line_and_the_other_parts_stay(tmp_path):
    scorer, name = scorer_of(tmp_path, "raise ValueError('first\\n second')")
    score, _ = scorer.score(sample_of("12"))
    failure = f"rewards.functions: {name} raised ValueError: first second on sample s7"
    assert score == Score(value=None, parts={"exact_match": 1.0}, failure=failure)


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("None", "NoneType"),
        ("'1'", "str"),
        ("[1.0]", "a list of 1"),
        ("1j", "complex"),
        ("float('nan')", "nan"),
        ("float('-inf')", "-inf"),
        ("10 ** 400", "int"),
        ("__import__('numpy').float32('inf')", "float32"),
    ],
)
def test_what_is_no_finite_number_is_a_failure(tmp_path, expression, shown):
    scorer, name = scorer_of(tmp_path, f"return {expression}")
    score, _ = scorer.score(sample_of("12"))
    assert score.value is None
    assert score.failure == (f"rewards.functions: {name} returned {shown}, not a finite number or a bool, on sample s7")


@pytest.mark.parametrize(
    "expression", ["True", "1", "1.0", "__import__('fractions').Fraction(1)", "__import__('numpy').float32(1)"]
)
def test_every_kind_of_real_number_counts(tmp_path, expression):
    scorer, name = scorer_of(tmp_path, f"return {expression}")
    assert scorer.score(sample_of("12"))[0].parts[name] == 1.0


def test_a_function_listed_twice_is_refused():
    with pytest.raises(ValueError, match="exact_match is listed twice"):
        Scorer([RewardFunction(function="exact_match")] * 2)


def test_torch_is_not_needed():
    code = "import sys, megarl.rewards.scorer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_models_score_is_a_part_like_others():
    scorer = Scorer([RewardFunction(function="exact_match")], model_weight=0.5)
    parts = {"reward_model": 3.0, "exact_match": 1.0}
    assert scorer.score(sample_of("12"), ModelReward(3.0)) == (Score(value=2.5, parts=parts), None)
    score, token_reward_totals = scorer.score(sample_of("12"), ModelReward(3.0, [1.0, float("nan"), 2.0]))
    assert score == Score(value=2.5, parts=parts, token_reward_totals=TokenTotals(2, 1.5, 1.25))
    assert token_reward_totals == pytest.approx([0.5, float("nan"), 1.0], nan_ok=True)
    assert scorer.score(sample_of("12")) == (Score(value=1.0, parts={"exact_match": 1.0}), None)
    failed, _ = scorer.score(sample_of("12"), ModelReward(float("nan")))
    assert failed.value is None and failed.parts == {"exact_match": 1.0}
    assert "reward_model returned nan, not a finite number" in failed.failure


def test_what_a_model_cannot_read_is_a_failure_and_no_zero():
    scorer = Scorer([RewardFunction(function="exact_match")])
    score, _ = scorer.score(sample_of("12"), ModelReward(None, failure="would read 14 tokens"))
    assert score.value is None and score.parts == {"exact_match": 1.0}
    assert score.failure == "rewards.functions: reward_model would read 14 tokens, on sample s7"


TURNS = (False, True, True, False, True, False, False, True)
"""Three turns, which end at 2, 4 and 7."""


def of_turns(tmp_path, expression: str, rewards_tokens: bool = True) -> Scorer:
    file = tmp_path / "turns.py"
    file.write_text(f"def f(prompt, response, answer):\n    return {expression}\n")
    per_turn = RewardFunction(function=f"{file}:f", weight=0.5, per_turn=True)
    functions = [RewardFunction(function="exact_match"), per_turn]
    return Scorer(functions, model_weight=2.0, rewards_tokens=rewards_tokens)


def sample_of_turns(mask: tuple[bool, ...] = TURNS) -> Sample:
    n = len(mask)
    given = dict(response_ids=(5,) * n, response_logprobs=(-0.5,) * n, response_mask=mask)
    return replace(sample_of("12"), **given, versions=(VersionRun(0, n),))


def test_a_turns_reward_is_that_of_its_last_trained_token(tmp_path):
    score, token_reward_totals = of_turns(tmp_path, "[1, -3.0, True]").score(sample_of_turns())
    name = f"{tmp_path}/turns.py:f"
    parts = {"exact_match": 1.0, name: -1.0}
    assert score == Score(value=0.5, parts=parts, token_reward_totals=TokenTotals(3, -0.5, 0.25 + 2.25 + 0.25))
    assert token_reward_totals == pytest.approx([NAN, NAN, 0.5, NAN, -1.5, NAN, NAN, 0.5], nan_ok=True)


def test_rewards_of_turns_and_of_a_models_tokens_add_up(tmp_path):
    of_model = ModelReward(8.0, [NAN, 1.0, 3.0, NAN, NAN, NAN, NAN, 4.0])
    score, token_reward_totals = of_turns(tmp_path, "[1, -3.0, True]").score(sample_of_turns(), of_model)
    assert token_reward_totals == pytest.approx([NAN, 2.0, 6.5, NAN, -1.5, NAN, NAN, 8.5], nan_ok=True)
    assert score.token_reward_totals == TokenTotals.of([2.0, 6.5, -1.5, 8.5]) and score.value == 1.0 - 0.5 + 16.0


def test_without_a_use_for_rewards_of_tokens_turns_are_summed_up(tmp_path):
    score, token_reward_totals = of_turns(tmp_path, "(1, -3.0, True)", rewards_tokens=False).score(sample_of_turns())
    assert token_reward_totals is None and score.value == 0.5 and score.token_reward_totals == TokenTotals()


def test_a_response_without_a_trained_token_has_no_turn(tmp_path):
    score, token_reward_totals = of_turns(tmp_path, "[]").score(sample_of_turns((False, False)))
    assert score.value == 1.0 and score.token_reward_totals == TokenTotals()
    assert token_reward_totals == pytest.approx([NAN, NAN], nan_ok=True)


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("1.0", "1.0"),
        ("[1.0, 2.0]", "a list of 2"),
        ("[1.0, 2.0, None]", "a list of 3"),
        ("[1.0, None, 2.0, 3.0]", "a list of 4"),
        ("[1.0, 2.0, float('nan')]", "a list of 3"),
        ("[1e308, 1e308, 1e308]", "a list of 3"),
    ],
)
def test_every_turn_has_a_finite_reward(tmp_path, expression, shown):
    score, token_reward_totals = of_turns(tmp_path, expression).score(sample_of_turns())
    name = f"{tmp_path}/turns.py:f"
    wanted = "3 finite numbers in a list, one a turn"
    assert score.failure == f"rewards.functions: {name} returned {shown}, not {wanted}, on sample s7"
    assert score.value is None and token_reward_totals is None
