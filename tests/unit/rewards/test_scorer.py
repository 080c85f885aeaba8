import math
import subprocess
import sys
from dataclasses import replace

import pytest

from megarl.config.schema import RewardFunction
from megarl.core.completion import VersionRun
from megarl.core.episode import Episode, RolloutInfo
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.core.score import RewardPart, Score, TokenTotals
from megarl.rewards.classifier import ModelReward
from megarl.rewards.result import Result
from megarl.rewards.scorer import Scorer, require_ratings

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


EXACT = RewardFunction(function="exact_match")
RIGHT, WRONG = Result(1.0, "1.0"), Result(0.0, "0.0")


def test_value_is_the_weighted_sum_of_the_parts():
    scorer = Scorer([EXACT, RewardFunction(function="f", weight=-0.5)])
    score, _ = scorer.score(sample_of("12"), {"exact_match": RIGHT, "f": Result(14.0, "14.0")})
    weighted = {"exact_match": RewardPart(1.0), "f": RewardPart(14.0, -0.5)}
    assert score == Score(1.0 - 0.5 * 14, {"exact_match": 1.0, "f": 14.0}, reward_parts=weighted)


def test_wrong_response_scores_zero_without_failure():
    score, _ = Scorer([EXACT]).score(sample_of("13"), {"exact_match": WRONG})
    assert score == Score(0.0, {"exact_match": 0.0}, reward_parts={"exact_match": RewardPart(0.0)})


def test_failed_function_fails_the_sample_but_keeps_other_parts():
    results = {"exact_match": RIGHT, "f": Result(None, failure="raised ValueError: first second")}
    score, _ = Scorer([EXACT, RewardFunction(function="f")]).score(sample_of("12"), results)
    failure = "rewards.functions: f raised ValueError: first second on sample s7"
    assert score == Score(value=None, parts={"exact_match": 1.0}, failure=failure)


@pytest.mark.parametrize(
    "result",
    [Result(None, "NoneType"), Result([1.0], "a list of 1"), Result(NAN, "nan"), Result(-math.inf, "-inf")],
    ids=lambda result: result.returned,
)
def test_result_that_is_not_a_finite_number_is_a_failure(result):
    score, _ = Scorer([EXACT]).score(sample_of("12"), {"exact_match": result})
    assert score.value is None
    assert score.failure == (
        f"rewards.functions: exact_match returned {result.returned} instead of a finite number or a bool on sample s7"
    )


def test_parts_of_own_functions_have_the_functions_names():
    functions = [RewardFunction(function=name, weight=2.0) for name in ("own.py:length", "exact_match")]
    score, _ = Scorer(functions).score(sample_of("12"), {f.label: Result(1.0, "1.0") for f in functions})
    assert score.value == 4 and list(score.parts) == ["length", "exact_match"]
    with pytest.raises(ValueError, match=r"style is listed twice\. Fix: set a different `name` in each entry"):
        Scorer([RewardFunction(function=f"{folder}/own.py:style") for folder in "ab"])


def test_function_listed_twice_is_refused():
    with pytest.raises(ValueError, match="exact_match is listed twice"):
        Scorer([RewardFunction(function="exact_match")] * 2)


def test_scorer_does_not_import_torch():
    code = "import sys, megarl.rewards.scorer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_reward_model_score_is_a_part_like_others():
    scorer = Scorer([RewardFunction(function="exact_match")], model_weight=0.5)
    parts, results = {"reward_model": 3.0, "exact_match": 1.0}, {"exact_match": RIGHT}
    answer = {"exact_match": RewardPart(1.0)}
    whole = Score(2.5, parts, reward_parts=answer | {"reward_model": RewardPart(3.0, 0.5)})
    assert scorer.score(sample_of("12"), results, ModelReward(3.0)) == (whole, None)
    score, token_reward_totals = scorer.score(sample_of("12"), results, ModelReward(3.0, [1.0, float("nan"), 2.0]))
    assert score == Score(2.5, parts, token_reward_totals=TokenTotals(2, 1.5, 1.25), reward_parts=answer)
    assert token_reward_totals == pytest.approx([0.5, float("nan"), 1.0], nan_ok=True)
    assert scorer.score(sample_of("12"), results) == (Score(1.0, {"exact_match": 1.0}, reward_parts=answer), None)
    failed, _ = scorer.score(sample_of("12"), results, ModelReward(float("nan")))
    assert failed.value is None and failed.parts == {"exact_match": 1.0}
    assert "reward_model returned nan instead of a finite number" in failed.failure


def test_unreadable_sample_is_a_failure_and_not_zero():
    scorer = Scorer([RewardFunction(function="exact_match")])
    score, _ = scorer.score(
        sample_of("12"), {"exact_match": RIGHT}, ModelReward(None, failure="the input has 14 tokens")
    )
    assert score.value is None and score.parts == {"exact_match": 1.0}
    assert score.failure == "rewards.functions: reward_model on sample s7: the input has 14 tokens"


def rated(*problems: str | None, failed: int = 0) -> list[Score]:
    """Return one score per response. `problems` are the reasons why a judge did not rate it (None: rated), and `failed`
    is the number of further responses whose reward function raised an exception."""
    scorer = Scorer([RewardFunction(function="exact_match", name="f")])
    judgements = [ModelReward(float(problem is None), issues={"unrated": problem}) for problem in problems]
    results = [{"f": RIGHT}] * len(problems) + [{"f": Result(None, failure="raised E: x")}] * failed
    judgements += [ModelReward(1.0, issues={"unrated": None})] * failed
    return [
        scorer.score(sample_of("12"), result, judged)[0] for result, judged in zip(results, judgements, strict=True)
    ]


@pytest.mark.parametrize(
    ("scores", "num_failures"),
    [
        (rated("no rating"), 0),  # a single response never ends a run
        (rated("no rating", None), 0),
        (rated("no rating", "no rating", None, None), 0),
        (rated("no rating", "no rating", None), 2),
        (rated("no rating", "no rating"), 2),
        (rated(None, None, None), 0),
        (rated("no rating", "no rating", failed=2), 0),  # in this count, other failures count as rated
    ],
)
def test_judge_that_rates_few_responses_is_a_failure(scores, num_failures):
    required = require_ratings(scores)
    changed = [(old, new) for old, new in zip(scores, required, strict=True) if old != new]
    assert len(changed) == num_failures
    for old, new in changed:
        assert (old.value, new.value) == (1.0, None) and "reward_model" not in new.parts
        described = f"rewards.functions: reward_model: no rating (2 of {len(scores)} responses have no rating"
        assert new.failure.startswith(described)


def test_issues_are_named_by_function():
    scorer = Scorer([RewardFunction(function="exact_match", weight=-1.0)], model_weight=0.5)
    issues = {"truncated": "too long", "verbatim": None}
    score, _ = scorer.score(
        sample_of("12"), {"exact_match": Result(1.0, issues=issues)}, ModelReward(3.0, issues=issues)
    )
    named = {f"{name}_{issue}": text for name in ("reward_model", "exact_match") for issue, text in issues.items()}
    assert score.value == 0.5 and score.parts == {"reward_model": 3.0, "exact_match": 1.0} and score.issues == named
    unrated = Result(0.0, issues={"unrated": "no rating"})
    score, _ = scorer.score(sample_of("12"), {"exact_match": unrated})
    assert score.value == -1.0  # with a negative weight, the highest rating is the worst


@pytest.mark.parametrize(
    ("reward", "shown"), [(1e300, "inf"), (-1e30, "-1e+40, more than float32 can represent"), (1e28, None)]
)
def test_sum_of_rewards_beyond_float32_is_a_failure(reward, shown):
    scorer = Scorer([RewardFunction(function="exact_match", weight=1e10)])
    score, _ = scorer.score(sample_of("12"), {"exact_match": Result(reward)})
    failure = f"rewards.functions: the weighted sum of the rewards of sample s7 is {shown}"
    assert (score.value, score.failure) == ((1e38, None) if shown is None else (None, failure))


TURNS = (False, True, True, False, True, False, False, True)
"""Response mask of three turns, which end at tokens 2, 4 and 7."""


def scored(
    rewards: list[float] | float | None,
    mask: tuple[bool, ...] = TURNS,
    *,
    rewards_tokens: bool = True,
    returned: str = "",
    model: ModelReward | None = None,
) -> tuple[Score, list[float] | None]:
    """Return the score of a correct response whose turns have these rewards."""
    functions = [EXACT, RewardFunction(function="f", weight=0.5, per_turn=True)]
    scorer = Scorer(functions, model_weight=2.0, rewards_tokens=rewards_tokens)
    return scorer.score(sample_of_turns(mask), {"exact_match": RIGHT, "f": Result(rewards, returned)}, model)


def sample_of_turns(mask: tuple[bool, ...] = TURNS) -> Sample:
    n = len(mask)
    arrays = dict(response_ids=(5,) * n, response_logprobs=(-0.5,) * n, response_mask=mask)
    return replace(sample_of("12"), **arrays, versions=(VersionRun(0, n),))


@pytest.mark.parametrize("rewards", [(math.inf, -math.inf), (1e308, 1e308), (NAN, 1.0), (1e300, -1e300), (-1e39, 1e39)])
def test_turn_rewards_of_an_environment_must_fit_float32(rewards):
    info = RolloutInfo("done", 2, 1, {}, 0, 0)
    episode = Episode(info, rewards, {}, None, (), first_turn=0, is_last=True)
    sample = replace(sample_of_turns((True, False, True)), episode=episode)
    score, token_rewards = Scorer([], rewards_tokens=True).score(sample, {})
    assert score.value is None and token_rewards is None and "of sample s7 is" in score.failure


def test_turn_reward_goes_to_its_last_trained_token():
    score, token_reward_totals = scored([1.0, -3.0, 1.0])
    parts = {"exact_match": 1.0, "f": -1.0}
    totals, answer = TokenTotals(3, -0.5, 0.25 + 2.25 + 0.25), {"exact_match": RewardPart(1.0)}
    assert score == Score(0.5, parts, token_reward_totals=totals, reward_parts=answer)
    assert token_reward_totals == pytest.approx([NAN, NAN, 0.5, NAN, -1.5, NAN, NAN, 0.5], nan_ok=True)


def test_turn_rewards_and_model_token_rewards_add_up():
    model_reward = ModelReward(8.0, [NAN, 1.0, 3.0, NAN, NAN, NAN, NAN, 4.0])
    score, token_reward_totals = scored([1.0, -3.0, 1.0], model=model_reward)
    assert token_reward_totals == pytest.approx([NAN, 2.0, 6.5, NAN, -1.5, NAN, NAN, 8.5], nan_ok=True)
    assert score.token_reward_totals == TokenTotals.of([2.0, 6.5, -1.5, 8.5]) and score.value == 1.0 - 0.5 + 16.0


def test_turn_rewards_are_summed_if_token_rewards_are_unused():
    score, token_reward_totals = scored([1.0, -3.0, 1.0], rewards_tokens=False)
    assert token_reward_totals is None and score.value == 0.5 and score.token_reward_totals == TokenTotals()


def test_response_without_trained_tokens_has_no_turns():
    score, token_reward_totals = scored([], (False, False))
    assert score.value == 1.0 and score.token_reward_totals == TokenTotals()
    assert token_reward_totals == pytest.approx([NAN, NAN], nan_ok=True)


@pytest.mark.parametrize(
    ("rewards", "returned"),
    [
        (1.0, "1.0"),
        ([1.0, 2.0], "a list of 2"),
        (None, "a list of 3"),
        ([1.0, 2.0, NAN], "a list of 3"),
        ([1e308, 1e308, 1e308], "a list of 3"),
    ],
)
def test_every_turn_requires_a_finite_reward(rewards, returned):
    score, token_rewards = scored(rewards, returned=returned)
    expected = "a list of 3 finite numbers, one per turn"
    assert score.failure == f"rewards.functions: f returned {returned} instead of {expected} on sample s7"
    assert score.value is None and token_rewards is None
