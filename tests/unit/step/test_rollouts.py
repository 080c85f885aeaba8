"""The samples that a step gathers when some prompts are uninformative."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster.pending import ready
from megarl.config.load import load
from megarl.core.metrics import Metric, values
from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
from megarl.core.score import Score
from megarl.core.timing import Stopwatch
from megarl.data.cursor import PromptCursor
from megarl.data.prompts import PromptSet
from megarl.step.finished import FinishedRollouts
from megarl.step.queue import RolloutQueue
from megarl.step.rollouts import collect_rollouts, solve_rates
from megarl.step.scoring import select
from megarl.step.state import RunState
from tests.paths import BASE


class Engines:
    """A fake EngineGroup that completes each request and records it."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.turns: list[str] = []

    def generate(self, groups, listener):
        assert listener == "the rewards"
        self.asked.append([group[0].prompt.id for group in groups])
        self.turns.append("generate")
        return ready([[self.ref(r) for r in group] for group in groups])

    @staticmethod
    def ref(request) -> SampleRef:
        n = 4 if request.sample_id.endswith(".1") else 2
        return SampleRef(request.sample_id, request.prompt.id, 10, n, n, "stop", 0, 0, sample=request.sample_id)


def run(outcomes: str, rounds: int, wanted: int = 3):
    """Run a step's rollout. `outcomes` contains one character per prompt: + for different rewards, - for equal rewards,
    0 for no reward. The second of two samples is truncated."""
    overrides = ["model.path=m", "data.source=arithmetic", f"batch.sampling_rounds={rounds}"]
    overrides += ["rewards.failure_limit=1", "rollout.max_new_tokens=4", "rewards.overlong_buffer=1"]
    batch = [f"batch.prompts_per_step={wanted}", f"batch.prompts_per_update={wanted}", "batch.samples_per_prompt=2"]
    engines = Engines()

    def score(samples, step, path):
        ends = [(int(sample.prompt_id), sample.id.endswith(".1")) for sample in samples]
        scores = [
            Score(None, {}, "none") if outcomes[i] == "0" else Score(float(outcomes[i] == "+" and second), {})
            for i, second in ends
        ]
        return ready((scores, {sample.id: f"of {sample.id}" for sample in samples}))

    def switch_to_scoring(is_last: bool):
        assert is_last == (len(engines.asked) == rounds), "a refit is certain only after the last possible round"
        engines.turns.append("score")

    workers = SimpleNamespace(
        engines=engines,
        rewards=SimpleNamespace(score=score, listener="the rewards"),
        switch_to_rollout=lambda: engines.turns.append("to engines") or {"memory/free_gb": Metric(3.0)},
        switch_to_scoring=switch_to_scoring,
        resume_sampling=lambda: engines.turns.append("back"),
        switch_to_training=lambda: engines.turns.append("to trainers"),
        rewards_share_devices=False,
        environments=None,
    )
    config = load(BASE, [*overrides, *batch])
    data = PromptSet(tuple(Prompt(str(i), "", (1,), "") for i in range(len(outcomes))), "hash")
    state = RunState(6, PromptCursor(len(data), seed=0, shuffle=False))
    rollouts = collect_rollouts(
        config,
        workers,
        7,
        RolloutQueue(config, workers, data, state, FinishedRollouts(config, workers.rewards, Path(), {})),
        Path(),
        Stopwatch(),
        lambda: None,
    )
    assert state.dump()["under_way"] == []
    chosen = [group[0].prompt_id if group else "none" for group in rollouts.chosen]
    rounds = ["generate", "score"] + ["back", "generate", "score"] * (len(engines.asked) - 1)
    assert engines.turns == ["to engines", *rounds, "to trainers"]
    assert rollouts.metrics["memory/free_gb"].value == 3.0
    return engines.asked, chosen, rollouts


@pytest.mark.parametrize("outcomes", ["+++", "---", "-+-"])
def test_single_round_keeps_all_prompts(outcomes):
    asked, chosen, _ = run(outcomes, rounds=1)
    assert asked == [["0", "1", "2"]] and chosen == ["0", "1", "2"]


def test_uninformative_prompts_are_replaced():
    asked, chosen, rollouts = run("+-++--", rounds=3)
    assert asked == [["0", "1", "2"], ["3", "4"]]  # two thirds were informative, so one more needs 1.5 prompts
    assert chosen == ["0", "2", "3"]
    assert [len(group) for group in rollouts.sampled] == [2] * 5
    metrics = values(rollouts.metrics)
    assert metrics["rollout/rounds"] == 2 and metrics["rollout/prompts"] == 5
    assert metrics["reward/mean"] == pytest.approx((3 - 5) / 10)  # over all samples, half of which are truncated
    assert metrics["reward/zero_std_groups"] == pytest.approx(2 / 5)


def test_samples_of_all_rounds_have_unique_names_and_seeds():
    _, _, rollouts = run("-" * 9, rounds=3)
    names = [sample.id for group in rollouts.sampled for sample in group]
    assert names == [f"7.{i}.{k}" for i in range(9) for k in range(2)]
    assert rollouts.process_rewards == {name: f"of {name}" for name in names}


def test_uninformative_prompts_fill_up_after_the_last_round():
    asked, chosen, _ = run("---" + "-+-" + "--+", rounds=2)
    assert asked == [["0", "1", "2"], ["3", "4", "5"]]  # at most one step's prompts per round
    assert chosen == ["0", "1", "4"]


def test_prompts_without_scores_fill_up_last():
    _, chosen, _ = run("00-" + "-+0", rounds=2)
    assert chosen == ["2", "3", "4"]
    _, chosen, _ = run("00-" + "+00", rounds=2)
    assert chosen == ["none", "2", "3"]


def test_surplus_prompts_are_omitted():
    asked, chosen, _ = run("-+-" + "+++", rounds=2)
    assert asked == [["0", "1", "2"], ["3", "4", "5"]]
    assert chosen == ["1", "3", "4"]


@pytest.mark.parametrize(
    ("failed", "limit", "stops"), [("0110110", 3, False), ("0111011", 3, True), ("1111110", None, False)]
)
def test_consecutive_failed_samples_stop_the_run(failed, limit, stops):
    keys = ["model.path=m", "data.source=arithmetic", "rewards.failure_limit=1"]
    config = load(BASE, [*keys, f"rewards.max_consecutive_failures={'null' if limit is None else limit}"])
    scores = [Score(None, {}, "f raised ValueError: no") if flag == "1" else Score(1.0, {}) for flag in failed]
    group = [SampleRef(str(i), "p", 1, 1, 1, "stop", 0, 0) for i in range(len(failed))]
    if not stops:
        [scored], _ = select(config, [group], scores)
        assert len(scored) == failed.count("0")
        return
    message = r"^f raised ValueError: no \(rewards.max_consecutive_failures=3: 3 consecutive samples failed\)\. Fix: "
    with pytest.raises(ValueError, match=message):
        select(config, [group], scores)


def test_issues_of_rewards_are_counted():
    config = load(BASE, ["model.path=m", "data.source=arithmetic"])
    group = [SampleRef(str(i), "p", 1, 1, 1, "stop", 0, 0) for i in range(4)]
    issues = [{"f_unrated": None}, {"f_unrated": "no rating"}, {"f_unrated": None}, {}]
    _, metrics = select(config, [group], [Score(1.0, {"f": 1.0}, issues=found) for found in issues])
    assert metrics["reward/f_unrated_frac"].value == pytest.approx(1 / 3)


def test_solve_rate_covers_only_scored_samples():
    """One of two samples has a reward above 0.5. Prompts without a scored sample have no rate."""
    _, _, rollouts = run("+-0+", rounds=1, wanted=4)
    assert rollouts.solve_rates == {"0": 0.5, "1": 0.0, "3": 0.5}


def test_solve_rate_covers_all_groups_of_a_prompt():
    """A step draws prompt p twice: 3 of 4 samples are solved in the first group, 0 of 2 in the second."""
    config = load(BASE, ["model.path=m", "data.source=arithmetic"])

    def group(number: int, outcomes: list[float]) -> list[SampleRef]:
        names = [f"1.{number}.{k}" for k in range(len(outcomes))]
        pairs = zip(names, outcomes, strict=True)
        return [SampleRef(name, "p", 1, 1, 1, "stop", 0, 0, outcome=outcome) for name, outcome in pairs]

    groups = [group(0, [1.0, 1.0, 1.0, 0.0]), [], group(1, [0.0, 0.0])]
    assert solve_rates(config, groups) == {"p": 0.5}
