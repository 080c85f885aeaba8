"""The driver's part of a step: joining samples with scores, and sharing them out."""

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.algorithms.baselines import MovingAverage
from megarl.cluster.failure import RunFailure
from megarl.cluster.groups.engines import RemoteSample
from megarl.cluster.pending import Pending, ready
from megarl.cluster.rank_batch import RankBatch, SampleRef
from megarl.cluster.trained_models import TrainedModels
from megarl.cluster.workers import Workers
from megarl.config.load import load
from megarl.core.metrics import Metric, merge_updates, values
from megarl.core.types import Baseline, Prompt, SampleInfo, Score, TokenTotals
from megarl.step.baselines import attach_baselines
from megarl.step.dispatch import dispatch, epochs_of
from megarl.step.requests import requests
from megarl.step.rollouts import Rollouts
from megarl.step.scoring import ScoredSample, select
from megarl.train import train
from tests.packing import packing
from tests.paths import BASE


def config(*overrides: str):
    required = ["model.path=m", "data.source=arithmetic", "actor.tokens_per_microbatch=64", "rollout.context_length=64"]
    return load(BASE, [*required, "rollout.max_new_tokens=16", *overrides])


def sample(prompt: int, k: int, num_response_tokens: int = 4) -> RemoteSample:
    n = num_response_tokens
    return RemoteSample(SampleInfo(f"1.{prompt}.{k}", f"p{prompt}", 10, n, n, "stop", 0, 0), ref=f"{prompt}.{k}")


def score(value: float | None) -> Score:
    return Score(value, {} if value is None else {"f": value}, None if value is not None else "f raised KeyError: 1")


GROUPS = [[sample(0, 0), sample(0, 1)], [sample(1, 0), sample(1, 1)]]


def test_a_failed_reward_is_left_out_and_not_a_zero():
    groups, metrics = select(config("rewards.failure_limit=0.25"), GROUPS, [*map(score, [1.0, None, 1.0, 0.0])])
    assert [[item.reward for item in group] for group in groups] == [[1.0], [1.0, 0.0]]
    assert values(metrics)["reward/mean"] == pytest.approx(2 / 3)
    assert values(metrics)["reward/failed_frac"] == 0.25
    assert values(metrics)["reward/zero_std_groups"] == 0.5


def test_failures_above_the_limit_stop_the_run():
    with pytest.raises(ValueError, match=r"f raised KeyError: 1 \(1 of 4 samples failed; rewards.failure_limit=0 .*"):
        select(config(), GROUPS, [*map(score, [1.0, None, 1.0, 0.0])])


def test_what_tokens_are_rewarded_with_is_not_given_to_the_sample_again():
    settings = config()
    scores = [
        Score(3.0, {}, token_reward_totals=TokenTotals(2, 2.5, 4.0)),
        Score(1.0, {}, token_reward_totals=TokenTotals(1, -1.0, 1.0)),
        score(0.0),
        score(0.5),
    ]
    groups, _ = select(settings, GROUPS, scores)
    samples = [item for group in groups for item in group]
    process = {"process_reward": {item.sample.info.id: f"of {item.sample.info.id}" for item in samples}}
    [handed_out] = dispatch(settings, samples, packing(), scores=process)
    assert [item.reward for item in handed_out.samples] == [0.5, 2.0, 0.0, 0.5]
    assert [item.scores["process_reward"] for item in handed_out.samples][:2] == ["of 1.0.0", "of 1.0.1"]
    [whole] = dispatch(settings, samples, packing())
    assert [item.reward for item in whole.samples] == [3.0, 1.0, 0.0, 0.5]


def test_shares_cover_the_update_once_and_weights_sum_to_one():
    settings = config("actor.layout.dp=2")
    lengths = [1, 16, 3, 9, 2, 7, 5, 11]
    groups = [[sample(i, k, lengths[4 * i + k]) for k in range(4)] for i in range(2)]
    scored, _ = select(settings, groups, [score(float(i % 3)) for i in range(8)])
    rank_batches = dispatch(settings, [item for group in scored for item in group], packing(num_ranks=2))
    assert len(rank_batches) == 2
    assert len({len(share.microbatches) for share in rank_batches}) == 1
    given = [(item.sample, item.weight) for share in rank_batches for item in share.samples]
    assert sorted(name for name, _ in given) == sorted(f"{i}.{k}" for i in range(2) for k in range(4))
    tokens = {f"{i}.{k}": lengths[4 * i + k] for i in range(2) for k in range(4)}
    assert sum(weight * tokens[name] for name, weight in given) == pytest.approx(1.0)
    for share in rank_batches:
        assert sorted(i for members in share.microbatches for i in members) == list(range(len(share.samples)))


def test_a_long_response_loses_reward_before_it_is_compared():
    groups = [[sample(0, 0, 16), sample(0, 1, 14), sample(0, 2, 12)]]
    scored, metrics = select(config("rewards.overlong_buffer=4"), groups, [score(1.0)] * 3)
    assert [item.reward for item in scored[0]] == [0.0, 0.5, 1.0]
    assert values(metrics)["reward/mean"] == 0.5 and values(metrics)["reward/f"] == 1.0


OVERLONG = "rewards.overlong_buffer=4"


def test_a_length_makes_no_outcome():
    """A wrong answer that is cut off tells nothing, and a right one that is long is no failure."""
    settings = config(OVERLONG, "algorithm.objective={imitation_coefficient: 0.1, imitation_above: 0.5}")
    groups = [[sample(0, 0, 16), sample(0, 1)], [sample(1, 0, 15), sample(1, 1)]]
    scored, metrics = select(settings, groups, [*map(score, [0.0, 0.0, 1.0, 0.0])])
    assert [[item.reward for item in group] for group in scored] == [[-1.0, 0.0], [0.25, 0.0]]
    assert values(metrics)["reward/zero_std_groups"] == 0.5
    members = [item for group in scored for item in group]
    [share] = dispatch(settings, members, packing())
    assert [item.reward for item in share.samples] == [-1.0, 0.0, 0.25, 0.0]
    assert [item.imitation_weight for item in share.samples] == [0.0, 0.0, 1 / 15, 0.0]
    [of_scorer] = dispatch(settings, members, packing(), "implicit_reward")
    assert [item.reward for item in of_scorer.samples] == [0.0, 0.0, 1.0, 0.0]


def test_truncated_responses_may_have_no_weight_for_the_policy():
    cut = replace(sample(0, 1).info, finish_reason="length")
    scored, _ = select(config(), [[sample(0, 0), RemoteSample(cut, "0.1")]], [score(1.0), score(0.0)])
    settings = config("algorithm.objective.skip_truncated=true")
    [share] = dispatch(settings, scored[0], packing())
    assert [item.weight for item in share.samples] == [1 / 8, 0.0]
    [of_critic] = dispatch(settings, scored[0], packing(), role="critic")
    assert [item.weight for item in of_critic.samples] == [1 / 8, 1 / 8]
    settings = config("algorithm.objective={skip_truncated: true, empty_samples: exclude}")
    [share] = dispatch(settings, scored[0], packing())
    assert [item.weight for item in share.samples] == [1 / 4, 0.0]
    [of_critic] = dispatch(settings, scored[0], packing(), role="critic")
    assert [item.weight for item in of_critic.samples] == [1 / 8, 1 / 8]


@pytest.mark.parametrize(
    ("mode", "expected"),
    # Prompts of 4 and 1, and of 3 tokens; 16 new ones at most.
    [
        ("token_mean", [1 / 8] * 3),
        ("sequence_mean_of_token_means", [1 / 12, 1 / 3, 1 / 9]),
        ("sequence_mean_of_token_sums", [1 / 3] * 3),
        ("sequence_mean_over_max_tokens", [1 / 48] * 3),
        ("prompt_mean_of_token_means", [1 / 10, 1 / 10, 1 / 6]),
    ],
)
def test_the_losses_of_actor_and_critic_are_normalised_apart(mode, expected):
    groups = [[sample(0, 0, 4), sample(0, 1, 1)], [sample(1, 0, 3)]]
    scored, _ = select(config(), groups, [score(1.0)] * 3)
    members = [item for group in scored for item in group]
    settings = config(
        *("algorithm.advantage.estimator=gae", "critic.tokens_per_microbatch=64"),
        *(f"algorithm.value.aggregation={mode}", "algorithm.objective.aggregation=token_mean"),
    )
    of_roles = {role: dispatch(settings, members, packing(), role)[0] for role in ("actor", "critic")}
    assert [item.weight for item in of_roles["critic"].samples] == pytest.approx(expected)
    assert [item.weight for item in of_roles["actor"].samples] == pytest.approx([1 / 8] * 3)


def test_the_kls_coefficient_follows_the_steps_divergence():
    settings = config("algorithm.kl={coefficient: 0.1, adaptive_target: 0.2, adaptive_horizon: 512}")
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 0.0, 1.0])])
    actor, given = Group({"kl/loss_token_k3": Metric(0.3)}), []
    actor.adapt_kl = lambda *arguments: ready(given.append(arguments))
    train(settings, workers_of(actor), rollouts_of(groups), 1, MovingAverage())
    assert given == [(0.3, 4)]
    train(settings, workers_of(actor), rollouts_of(groups), 2, MovingAverage())
    assert len(given) == 1, "nothing was trained"


def test_the_penalty_follows_the_steps_divergence_from_the_old_policy():
    batch = "batch={prompts_per_step: 2, prompts_per_update: 1}"
    settings = config("algorithm.objective={name: kl_penalty, penalty_target: 0.1}", batch)
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 0.0, 1.0])])
    actor, given = Group({"policy/kl_old": Metric(0.3)}), []
    actor.adapt_penalty = lambda *arguments: ready(given.append(arguments))
    train(settings, workers_of(actor), rollouts_of(groups), 1, MovingAverage())
    assert given == [(0.3,)]
    train(config("algorithm.objective.name=kl_penalty"), workers_of(actor), rollouts_of(groups), 1, MovingAverage())
    assert len(given) == 1, "the penalty stays"


def test_positive_examples_have_a_weight_of_their_own():
    scored, _ = select(config(), GROUPS, [*map(score, [1.0, 0.0, 0.4, 0.9])])
    settings = config("algorithm.objective={imitation_coefficient: 0.1, imitation_above: 0.4}")
    [share] = dispatch(settings, [item for group in scored for item in group], packing())
    assert [item.imitation_weight for item in share.samples] == [1 / 8, 0.0, 0.0, 1 / 8]
    training = share.samples[0].training_sample("the sample", {})
    assert training.imitation_weight == 1 / 8


class Group:
    """Stands in for a TrainerGroup: notes the samples of its updates, whose metrics it is given."""

    packing = packing()
    offloads: frozenset[str] = frozenset()

    def __init__(self, *metrics: dict[str, Metric]) -> None:
        self.calls: list[str] = []
        self.updates: list[list[SampleRef]] = []
        self.metrics = iter(metrics)

    def keep_log_probs(self, policy: str, updates: list[list[RankBatch]]) -> Pending[dict]:
        self.calls.append(policy)
        names = [item.sample_id for update in updates for batch in update for item in batch.samples]
        return ready({policy: {name: f"{policy} of {name}" for name in names}})

    def score_tokens(self, updates: list[list[RankBatch]]) -> Pending[tuple[dict, dict]]:
        self.calls.append("score_tokens")
        names = [item.sample_id for update in updates for batch in update for item in batch.samples]
        return ready(
            ({name: f"score of {name}" for name in names}, {name: TokenTotals(1, -1.0, 1.0) for name in names})
        )

    def train(self, epochs: list[list[list[RankBatch]]], begins_step: bool = True) -> Pending[dict[str, Metric]]:
        self.calls.append("train" if begins_step else "go on")
        updates = [[item for batch in update for item in batch.samples] for updates in epochs for update in updates]
        self.updates += updates
        return ready(merge_updates([next(self.metrics, {}) for _ in updates]))

    def end_step(self) -> Pending[None]:
        return ready(None)

    @property
    def trained_on(self) -> list[list[str]]:
        return [sorted(item.sample_id for item in update) for update in self.updates]


def loss(name: str, value: float) -> dict[str, Metric]:
    return {f"{name}/loss": Metric(value, reduction="sum")}


def workers_of(actor: Group, critic: Group | None = None) -> Workers:
    groups = {"actor": actor} | ({} if critic is None else {"critic": critic})
    return Workers(TrainedModels(groups, dict.fromkeys(groups, ())), None, None, None, None, None, False, Path())


def rollouts_of(groups) -> Rollouts:
    return Rollouts(sampled=(), chosen=groups, process_rewards={}, metrics={})


def test_an_update_without_samples_is_left_out():
    """The step has three updates of one prompt each, and all rewards of the second's samples failed."""
    settings = config("rewards.failure_limit=0.5", "batch.prompts_per_step=3", "batch.prompts_per_update=1")
    samples = [[sample(prompt, k) for k in range(2)] for prompt in range(3)]
    groups, _ = select(settings, samples, [*map(score, [1.0, 0.0, None, None, 0.0, 1.0])])
    actor = Group(loss("policy", 1.0), loss("policy", 1.0))
    metrics = train(settings, workers_of(actor), rollouts_of(groups), 1, MovingAverage())
    assert actor.trained_on == [["1.0.0", "1.0.1"], ["1.2.0", "1.2.1"]]
    assert values(metrics) == {"policy/loss": 1.0}


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_the_loss_of_a_step_is_the_mean_of_its_updates(estimator):
    settings = config(
        "batch.prompts_per_step=2", "batch.prompts_per_update=1", f"algorithm.advantage.estimator={estimator}"
    )
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 0.0, 1.0])])
    actor, critic = Group(loss("policy", 4.0), loss("policy", 2.0)), Group(loss("value", 1.0), loss("value", 7.0))
    workers = workers_of(actor, critic if estimator == "gae" else None)
    metrics = values(train(settings, workers, rollouts_of(groups), 1, MovingAverage()))
    assert metrics == {"policy/loss": 3.0} | ({"value/loss": 4.0} if estimator == "gae" else {})


EPOCHS = (
    *("batch.prompts_per_step=4", "batch.prompts_per_update=2", "batch.epochs=3", "actor.layout.dp=2"),
    *("algorithm.advantage.estimator=gae", "critic.tokens_per_microbatch=64"),
)


def test_each_epoch_has_the_steps_prompts_in_other_updates():
    """The first has them in their order, and what others have follows from seed, step and epoch."""
    groups, _ = select(config(), [[sample(p, k) for k in range(2)] for p in range(8)], [score(1.0)] * 16)

    def epochs(step: int, *overrides: str) -> list[list[list[str]]]:
        batch = "batch={prompts_per_step: 8, prompts_per_update: 2, epochs: 4}"
        found = epochs_of(config(batch, *overrides), groups, step)
        assert all(len(group) == 2 for updates in found for update in updates for group in update)
        return [[[group[0].sample.info.prompt_id for group in update] for update in updates] for updates in found]

    found = epochs(1)
    assert found[0] == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"], ["p6", "p7"]]
    for updates in found:
        assert [len(update) for update in updates] == [2] * 4
        assert sorted(name for update in updates for name in update) == [f"p{i}" for i in range(8)]
    other = [*found[1:], *epochs(2)[1:], *epochs(1, "run.seed=7")[1:]]
    assert len({str(updates) for updates in other}) == 9 and found[0] not in other
    assert epochs(1) == found
    assert epochs(1, "batch.prompts_per_update=8")[1:] == [[[f"p{i}" for i in range(8)]]] * 3


def test_actor_and_critic_go_through_the_same_epochs():
    """Passes are made before the first, and other epochs have their results with the samples, which other ranks may
    have."""
    samples = [[sample(prompt, k) for k in range(2)] for prompt in range(4)]
    groups, _ = select(config(), samples, [*map(score, [1.0, 0.0] * 4)])
    log: list[str] = []
    actor, critic = Group(*[loss("policy", i) for i in (1.0, 2.0, 3.0, 4.0, 5.0, 9.0)]), Group()
    actor.calls = critic.calls = log
    metrics = values(train(config(*EPOCHS), workers_of(actor, critic), rollouts_of(groups), 1, MovingAverage()))
    assert log == ["old", "score_tokens", "train", "train"]
    assert actor.trained_on == critic.trained_on and len(actor.trained_on) == 6
    assert [item.scores.keys() for item in actor.updates[0]] == [{"values"}] * 4
    for item in actor.updates[-1]:
        assert item.scores == {"values": f"score of {item.sample_id}", "old": f"old of {item.sample_id}"}
    assert metrics == {"policy/loss": 4.0, "update/epochs": 3}


@pytest.mark.parametrize(("divergences", "done"), [((0.0, 0.2, 0.1, 0.3), 2), ((0.4, 0.2), 1), ((0.1,) * 6, 3)])
def test_no_epoch_begins_after_one_that_diverged_too_far(divergences, done):
    """Two updates in each, whose mean is compared with the limit; the critic stops with the actor."""
    samples = [[sample(prompt, k) for k in range(2)] for prompt in range(4)]
    groups, _ = select(config(), samples, [*map(score, [1.0, 0.0] * 4)])
    actor, critic = Group(*({"policy/kl_old": Metric(value, weight=8.0)} for value in divergences)), Group()
    settings = config(*EPOCHS, "batch.epochs_kl_limit=0.1999")
    metrics = values(train(settings, workers_of(actor, critic), rollouts_of(groups), 1, MovingAverage()))
    assert actor.calls == ["old", *["train", "go on", "go on"][:done]]
    assert critic.calls == ["score_tokens", *["train", "go on", "go on"][:done]]
    assert metrics["update/epochs"] == done
    assert metrics["policy/kl_old"] == pytest.approx(sum(divergences) / len(divergences))


def test_a_step_without_a_single_score_ends_the_run():
    with pytest.raises(RunFailure, match="no sample of this step could be scored"):
        select(config("rewards.failure_limit=1.0"), GROUPS, [score(None)] * 4)


REMAX = "algorithm.advantage.estimator=remax"


def test_a_greedy_response_is_what_its_group_is_compared_with():
    settings = config(REMAX, "rewards.failure_limit=0.5", "batch.samples_per_prompt=2")
    samples = [[sample(prompt, k) for k in range(3)] for prompt in range(2)]
    scores = [*map(score, [1.0, 0.0, 0.25, 1.0, 0.5, None])]
    groups, metrics = select(settings, samples, scores)
    assert [[item.reward for item in group] for group in groups] == [[1.0, 0.0], []]
    assert values(metrics)["reward/mean"] == 0.5 and values(metrics)["reward/greedy_mean"] == 0.25
    made = attach_baselines(settings, groups[:1], {}, {}, MovingAverage())
    assert [item.baseline for item in made] == [Baseline(0.25)] * 2


def test_a_long_greedy_response_loses_reward_too():
    settings = config(REMAX, OVERLONG, "batch.samples_per_prompt=2")
    groups, metrics = select(settings, [[sample(0, 0), sample(0, 1, 14), sample(0, 2, 15)]], [score(1.0)] * 3)
    assert [item.reward for item in groups[0]] == [1.0, 0.5]
    assert values(metrics)["reward/greedy_mean"] == 0.25
    assert [item.baseline for item in attach_baselines(settings, groups, {}, {}, MovingAverage())] == [
        Baseline(0.25)
    ] * 2


def test_each_prompt_is_asked_for_a_greedy_response_where_that_is_the_baseline():
    prompts = [Prompt(f"p{i}", "", (7,)) for i in range(2)]
    settings = config(REMAX, "batch.samples_per_prompt=3")
    asked = requests(settings, 4, prompts)
    assert [[request.sample_id for request in group] for group in asked] == [
        [f"4.{i}.{k}" for k in (0, 1, 2, "greedy")] for i in range(2)
    ]
    assert [[request.greedy for request in group] for group in asked] == [[False] * 3 + [True]] * 2
    assert not any(request.greedy for group in requests(config(), 4, prompts) for request in group)


def test_rewards_are_compared_with_those_of_earlier_steps():
    settings = config("algorithm.advantage={estimator: reinforce, baseline_decay: 0.5}")
    actor, average = Group(), MovingAverage()
    for number, rewards in enumerate(([1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0], [1.0] * 4), start=1):
        groups, _ = select(settings, GROUPS, [*map(score, rewards)])
        train(settings, workers_of(actor), rollouts_of(groups), number, average)
    assert [{item.baseline for item in update} for update in actor.updates] == [
        {Baseline(0.0)},
        {Baseline(0.75)},
        {Baseline((0.5 * 0.75 + 0.25) / 1.5)},
    ]


def test_rewards_of_tokens_are_part_of_the_samples_or_compared_by_themselves():
    scores = [
        Score(3.0, {}, token_reward_totals=TokenTotals(2, 2.0, 4.0)),
        Score(1.0, {}, token_reward_totals=TokenTotals(1, -1.0, 1.0)),
    ]
    learned = {"1.0.0": TokenTotals(4, 1.0, 1.0), "1.0.1": TokenTotals(4, 8.0, 16.0)}
    for credit, center, token_center in (("whole", 6.5, 0.0), ("reward_to_go", 1.5, 10 / 11)):
        settings = config(f"algorithm.advantage={{estimator: opo, credit: {credit}}}")
        groups, _ = select(settings, GROUPS[:1], scores)
        for item in attach_baselines(settings, groups, learned, {}, MovingAverage()):
            assert item.baseline == Baseline(center, 1.0, pytest.approx(token_center), 1.0)


def test_a_reward_that_holds_the_kl_is_known_before_anybody_is_trained():
    """Both passes first, then the critic, which gets it too, then the actor, whose samples are compared with it."""
    settings = config(
        "algorithm.kl={placement: reward, coefficient: 0.1}",
        "algorithm.advantage={estimator: gae}",
        "critic.tokens_per_microbatch=64",
    )
    log: list[str] = []
    actor, critic = Group(), Group()
    actor.calls = critic.calls = log
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 0.0, 1.0])])
    train(settings, workers_of(actor, critic), rollouts_of(groups), 1, MovingAverage())
    assert log == ["old", "reference", "score_tokens", "score_tokens", "train", "train"]
    [[of_critic, *_]], [[of_actor, *_]] = critic.updates, actor.updates
    assert of_critic.scores == {"kl_reward": "score of 1.0.0"}
    assert of_actor.scores == {"kl_reward": "score of 1.0.0", "values": "score of 1.0.0"}


@pytest.mark.parametrize("number", [1, 2])
def test_in_its_first_steps_the_critic_learns_alone(number):
    settings = config(
        "algorithm.advantage={estimator: gae}", "critic.tokens_per_microbatch=64", "critic.warmup_steps=1"
    )
    actor, critic = Group(), Group()
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 0.0, 1.0])])
    train(settings, workers_of(actor, critic), rollouts_of(groups), number, MovingAverage())
    assert critic.calls == ["score_tokens", "train"]
    assert actor.calls == (["train"] if number > 1 else [])


def test_groups_are_compared_by_rewards_with_their_kl():
    settings = config("algorithm.kl={placement: reward, coefficient: 0.1}", "algorithm.advantage.std=none")
    groups, _ = select(settings, GROUPS[:1], [*map(score, [1.0, 0.0])])
    kl_reward_totals = {"1.0.0": TokenTotals(4, -3.0, 9.0), "1.0.1": TokenTotals(4, -1.0, 1.0)}
    assert [
        item.baseline.center for item in attach_baselines(settings, groups, {}, kl_reward_totals, MovingAverage())
    ] == [-1.5, -1.5]


@pytest.mark.parametrize("credit", ["whole", "reward_to_go"])
def test_gpg_makes_up_for_groups_of_equal_rewards_whatever_their_kl(credit):
    settings = config(
        "algorithm.kl={placement: reward, coefficient: 0.1}",
        f"algorithm.advantage={{estimator: gpg, credit: {credit}}}",
    )
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 1.0, 1.0])])
    kl_reward_totals = {
        item.sample.info.id: TokenTotals(4, -float(i), 9.0) for i, item in enumerate(groups[0] + groups[1])
    }
    made = attach_baselines(settings, groups, {}, kl_reward_totals, MovingAverage())
    assert [item.baseline.scale for item in made] == [1 / 2] * 4
    assert [item.baseline.token_scale for item in made] == [1 / 2] * 4


ONLINE_DPO = ("algorithm.objective.name=dpo", "rollout.context_length=32")


def test_online_dpo_learns_from_the_best_and_the_worst_of_each_group():
    """The step has two updates of two prompts each; in the second all rewards are equal, and it is left out."""
    settings = config(*ONLINE_DPO, "batch.prompts_per_step=4", "batch.prompts_per_update=2")
    samples = [[sample(prompt, k) for k in range(3)] for prompt in range(4)]
    groups, _ = select(settings, samples, [*map(score, [0.5, 0.0, 1.0, 1.0, 1.0, 1.0, *[0.0] * 6])])
    actor = Group()
    metrics = train(settings, workers_of(actor), rollouts_of(groups), 1, MovingAverage())
    assert actor.calls == ["reference", "train"]
    assert [[item.sample_id for item in update] for update in actor.updates] == [["1.0.2", "1.0.1"]]
    assert values(metrics)["preference/tied_frac"] == 0.75


def test_pairs_are_handed_out_side_by_side_with_one_weight():
    settings = config(*ONLINE_DPO, "actor.layout.dp=2")
    pairs = [ScoredSample(sample(prompt, k, 3 + 5 * k), 1.0 - k) for prompt in range(3) for k in range(2)]
    rank_batches = dispatch(settings, pairs, packing(num_ranks=2, shares_prompts=False))
    handed = [share.samples[i] for share in rank_batches for members in share.microbatches for i in members]
    assert all(item.weight == pytest.approx(1 / 6) for item in handed)
    names = [item.sample for item in handed]
    better, worse = names[::2], names[1::2]
    assert sorted(better) == ["0.0", "1.0", "2.0"] and worse == [f"{name[0]}.1" for name in better]
