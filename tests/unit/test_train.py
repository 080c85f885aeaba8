"""Tests of the driver's part of a step: joining samples with scores and dispatching them to ranks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.algorithms.baselines import MovingAverage
from megarl.cluster.groups.teachers import SelfTeacher
from megarl.cluster.pending import Pending, ready
from megarl.cluster.rank_batch import RankBatch
from megarl.cluster.trained_models import TrainedModels
from megarl.cluster.workers import Workers
from megarl.config.load import load
from megarl.core.errors import RunFailure
from megarl.core.metrics import Metric, merge_updates, values
from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
from megarl.core.score import Baseline, Score, TokenTotals
from megarl.step.baselines import attach_baselines, step_normalization
from megarl.step.dispatch import dispatch, epochs_of
from megarl.step.requests import requests
from megarl.step.rollouts import Rollouts
from megarl.step.scoring import select
from megarl.train import train
from tests.packing import packing
from tests.paths import BASE


def config(*overrides: str):
    required = ["model.path=m", "data.source=arithmetic", "actor.tokens_per_microbatch=64", "rollout.context_length=64"]
    return load(BASE, [*required, "rollout.max_new_tokens=16", *overrides])


def sample(prompt: int, k: int, num_response_tokens: int = 4) -> SampleRef:
    n = num_response_tokens
    return SampleRef(f"1.{prompt}.{k}", f"p{prompt}", 10, n, n, "stop", 0, 0, sample=f"{prompt}.{k}")


def score(value: float | None) -> Score:
    return Score(value, {} if value is None else {"f": value}, None if value is not None else "f raised KeyError: 1")


GROUPS = [[sample(0, 0), sample(0, 1)], [sample(1, 0), sample(1, 1)]]


def test_failed_rewards_are_excluded():
    groups, metrics = select(config("rewards.failure_limit=0.25"), GROUPS, [*map(score, [1.0, None, 1.0, 0.0])])
    assert [[item.reward for item in group] for group in groups] == [[1.0], [1.0, 0.0]]
    assert values(metrics)["reward/mean"] == pytest.approx(2 / 3)
    assert values(metrics)["reward/failed_frac"] == 0.25
    assert values(metrics)["reward/zero_std_groups"] == 0.5


def test_failures_above_the_limit_raise():
    with pytest.raises(
        ValueError, match=r"f raised KeyError: 1 \(1 of 4 samples failed, but rewards.failure_limit=0 .*"
    ):
        select(config(), GROUPS, [*map(score, [1.0, None, 1.0, 0.0])])


def test_token_rewards_are_not_counted_twice():
    settings = config()
    scores = [
        Score(3.0, {}, token_reward_totals=TokenTotals(2, 2.5, 4.0)),
        Score(1.0, {}, token_reward_totals=TokenTotals(1, -1.0, 1.0)),
        score(0.0),
        score(0.5),
    ]
    groups, _ = select(settings, GROUPS, scores)
    samples = [item for group in groups for item in group]
    process = {"process_reward": {item.id: f"of {item.id}" for item in samples}}
    [with_token_rewards] = dispatch(settings, samples, packing(), scores=process)
    assert [item.scalar_reward for item in with_token_rewards.samples] == [0.5, 2.0, 0.0, 0.5]
    assert [item.scores["process_reward"] for item in with_token_rewards.samples][:2] == ["of 1.0.0", "of 1.0.1"]
    [without_token_rewards] = dispatch(settings, samples, packing())
    assert [item.scalar_reward for item in without_token_rewards.samples] == [3.0, 1.0, 0.0, 0.5]


def test_dispatch_covers_each_sample_once_with_weights_of_one():
    settings = config("actor.layout.dp=2")
    lengths = [1, 16, 3, 9, 2, 7, 5, 11]
    groups = [[sample(i, k, lengths[4 * i + k]) for k in range(4)] for i in range(2)]
    scored, _ = select(settings, groups, [score(float(i % 3)) for i in range(8)])
    rank_batches = dispatch(settings, [item for group in scored for item in group], packing(num_ranks=2))
    assert len(rank_batches) == 2
    assert len({len(batch.microbatches) for batch in rank_batches}) == 1
    weights = [(item.sample, item.weight) for batch in rank_batches for item in batch.samples]
    assert sorted(name for name, _ in weights) == sorted(f"{i}.{k}" for i in range(2) for k in range(4))
    tokens = {f"{i}.{k}": lengths[4 * i + k] for i in range(2) for k in range(4)}
    assert sum(weight * tokens[name] for name, weight in weights) == pytest.approx(1.0)
    for batch in rank_batches:
        assert sorted(i for members in batch.microbatches for i in members) == list(range(len(batch.samples)))


def test_overlong_penalty_applies_before_the_baseline():
    groups = [[sample(0, 0, 16), sample(0, 1, 14), sample(0, 2, 12)]]
    scored, metrics = select(config("rewards.overlong_buffer=4"), groups, [score(1.0)] * 3)
    assert [item.reward for item in scored[0]] == [0.0, 0.5, 1.0]
    assert values(metrics)["reward/mean"] == 0.5 and values(metrics)["reward/f"] == 1.0


def test_prompt_mean_weights_every_group_of_a_prompt():
    """An update draws a prompt twice. Its groups, with 6 and 3 tokens, have the same weight."""
    settings = config("algorithm.objective.aggregation=prompt_mean_of_token_means")
    samples = [sample(0, 0, 2), sample(0, 1, 4), replace(sample(1, 0, 3), prompt_id="p0")]
    [batch] = dispatch(settings, samples, packing())
    assert [item.weight for item in batch.samples] == pytest.approx([1 / 12, 1 / 12, 1 / 6])


OVERLONG = "rewards.overlong_buffer=4"


def test_overlong_penalty_does_not_change_the_outcome():
    """A truncated wrong answer is uninformative, and a long correct answer is still a success."""
    settings = config(OVERLONG, "algorithm.objective={imitation_coefficient: 0.1, imitation_above: 0.5}")
    groups = [[sample(0, 0, 16), sample(0, 1)], [sample(1, 0, 15), sample(1, 1)]]
    scored, metrics = select(settings, groups, [*map(score, [0.0, 0.0, 1.0, 0.0])])
    assert [[item.reward for item in group] for group in scored] == [[-1.0, 0.0], [0.25, 0.0]]
    assert values(metrics)["reward/zero_std_groups"] == 0.5
    members = [item for group in scored for item in group]
    [actor_batch] = dispatch(settings, members, packing())
    assert [item.scalar_reward for item in actor_batch.samples] == [-1.0, 0.0, 0.25, 0.0]
    assert [item.imitation_weight for item in actor_batch.samples] == [0.0, 0.0, 1 / 15, 0.0]
    [scorer_batch] = dispatch(settings, members, packing(), "implicit_reward")
    assert [item.scalar_reward for item in scorer_batch.samples] == [0.0, 0.0, 1.0, 0.0]


def test_skip_truncated_zeroes_the_policy_weight():
    cut = replace(sample(0, 1), finish_reason="length")
    scored, _ = select(config(), [[sample(0, 0), cut]], [score(1.0), score(0.0)])
    settings = config("algorithm.objective.skip_truncated=true")
    [actor_batch] = dispatch(settings, scored[0], packing())
    assert [item.weight for item in actor_batch.samples] == [1 / 8, 0.0]
    [critic_batch] = dispatch(settings, scored[0], packing(), role="critic")
    assert [item.weight for item in critic_batch.samples] == [1 / 8, 1 / 8]
    settings = config("algorithm.objective={skip_truncated: true, empty_samples: exclude}")
    [actor_batch] = dispatch(settings, scored[0], packing())
    assert [item.weight for item in actor_batch.samples] == [1 / 4, 0.0]
    [critic_batch] = dispatch(settings, scored[0], packing(), role="critic")
    assert [item.weight for item in critic_batch.samples] == [1 / 8, 1 / 8]


@pytest.mark.parametrize(
    ("mode", "expected"),
    # The first prompt has responses of 4 and 1 tokens, and the second prompt one of 3 tokens. max_new_tokens is 16.
    [
        ("token_mean", [1 / 8] * 3),
        ("sequence_mean_of_token_means", [1 / 12, 1 / 3, 1 / 9]),
        ("sequence_mean_of_token_sums", [1 / 3] * 3),
        ("sequence_mean_over_max_tokens", [1 / 48] * 3),
        ("prompt_mean_of_token_means", [1 / 10, 1 / 10, 1 / 6]),
    ],
)
def test_actor_and_critic_losses_are_normalized_separately(mode, expected):
    groups = [[sample(0, 0, 4), sample(0, 1, 1)], [sample(1, 0, 3)]]
    scored, _ = select(config(), groups, [score(1.0)] * 3)
    members = [item for group in scored for item in group]
    settings = config(
        *("algorithm.advantage.estimator=gae", "critic.tokens_per_microbatch=64"),
        *(f"algorithm.value.aggregation={mode}", "algorithm.objective.aggregation=token_mean"),
    )
    batches = {role: dispatch(settings, members, packing(), role)[0] for role in ("actor", "critic")}
    assert [item.weight for item in batches["critic"].samples] == pytest.approx(expected)
    assert [item.weight for item in batches["actor"].samples] == pytest.approx([1 / 8] * 3)


def test_kl_coefficient_adapts_to_the_steps_divergence():
    settings = config("algorithm.kl={coefficient: 0.1, adaptive_target: 0.2, adaptive_horizon: 512}")
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 0.0, 1.0])])
    actor, calls = Group({"kl/loss_token_k3": Metric(0.3)}), []
    actor.adapt_kl = lambda *arguments: ready(calls.append(arguments))
    train(settings, workers_of(actor), rollouts_of(groups), 1, MovingAverage())
    assert calls == [(0.3, 4)]
    train(settings, workers_of(actor), rollouts_of(groups), 2, MovingAverage())
    assert len(calls) == 1, "the second step has no metrics of an update"


def test_penalty_adapts_to_the_divergence_from_the_old_policy():
    batch = "batch={prompts_per_step: 2, prompts_per_update: 1}"
    settings = config("algorithm.objective={name: kl_penalty, penalty_target: 0.1}", batch)
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 0.0, 1.0])])
    actor, calls = Group({"policy/kl_old": Metric(0.3)}), []
    actor.adapt_penalty = lambda *arguments: ready(calls.append(arguments))
    train(settings, workers_of(actor), rollouts_of(groups), 1, MovingAverage())
    assert calls == [(0.3,)]
    train(config("algorithm.objective.name=kl_penalty"), workers_of(actor), rollouts_of(groups), 1, MovingAverage())
    assert len(calls) == 1, "the penalty is fixed without penalty_target"


def test_positive_examples_have_an_imitation_weight():
    scored, _ = select(config(), GROUPS, [*map(score, [1.0, 0.0, 0.4, 0.9])])
    settings = config("algorithm.objective={imitation_coefficient: 0.1, imitation_above: 0.4}")
    [batch] = dispatch(settings, [item for group in scored for item in group], packing())
    assert [item.imitation_weight for item in batch.samples] == [1 / 8, 0.0, 0.0, 1 / 8]


class Group:
    """Fakes a TrainerGroup. It records the samples of its updates and returns the given metrics."""

    packing = packing()
    offloads: frozenset[str] = frozenset()

    def __init__(self, *metrics: dict[str, Metric]) -> None:
        self.calls: list[str] = []
        self.updates: list[list[SampleRef]] = []
        self.metrics = iter(metrics)

    def keep_log_probs(self, policy: str, updates: list[list[RankBatch]]) -> Pending[dict]:
        self.calls.append(policy)
        names = [item.id for update in updates for batch in update for item in batch.samples]
        return ready({policy: {name: f"{policy} of {name}" for name in names}})

    def set_distillation_coefficient(self, coefficient: float) -> Pending[None]:
        self.calls.append(f"coefficient {coefficient}")
        return ready(None)

    def score_tokens(self, updates: list[list[RankBatch]]) -> Pending[tuple[dict, dict]]:
        self.calls.append("score_tokens")
        names = [item.id for update in updates for batch in update for item in batch.samples]
        return ready(
            ({name: f"score of {name}" for name in names}, {name: TokenTotals(1, -1.0, 1.0) for name in names})
        )

    def train(self, epochs: list[list[list[RankBatch]]], begins_step: bool = True) -> Pending[dict[str, Metric]]:
        self.calls.append("train" if begins_step else "resume")
        updates = [[item for batch in update for item in batch.samples] for updates in epochs for update in updates]
        self.updates += updates
        return ready(merge_updates([next(self.metrics, {}) for _ in updates]))

    def end_step(self) -> Pending[None]:
        return ready(None)

    @property
    def trained_on(self) -> list[list[str]]:
        return [sorted(item.id for item in update) for update in self.updates]


def loss(name: str, value: float) -> dict[str, Metric]:
    return {f"{name}/loss": Metric(value, reduction="sum")}


def workers_of(actor: Group, critic: Group | None = None) -> Workers:
    groups = {"actor": actor} | ({} if critic is None else {"critic": critic})
    return Workers(TrainedModels(groups, dict.fromkeys(groups, ())), None, None, None, None, None, False, Path())


def rollouts_of(groups) -> Rollouts:
    return Rollouts(sampled=(), chosen=groups, process_rewards={}, metrics={}, feedback={"check": "feedback"})


def test_update_without_samples_is_skipped():
    """The step has three updates of one prompt each. All rewards of the second update failed."""
    settings = config("rewards.failure_limit=0.5", "batch.prompts_per_step=3", "batch.prompts_per_update=1")
    samples = [[sample(prompt, k) for k in range(2)] for prompt in range(3)]
    groups, _ = select(settings, samples, [*map(score, [1.0, 0.0, None, None, 0.0, 1.0])])
    actor = Group(loss("policy", 1.0), loss("policy", 1.0))
    metrics = train(settings, workers_of(actor), rollouts_of(groups), 1, MovingAverage())
    assert actor.trained_on == [["1.0.0", "1.0.1"], ["1.2.0", "1.2.1"]]
    assert values(metrics) == {"policy/loss": 1.0}


@pytest.mark.parametrize("objective", ["clip", "dpo"])
def test_samples_of_earlier_weights_are_stale(objective):
    """Step 3 starts from version 2."""
    keys = "batch={prompts_per_step: 2, prompts_per_update: 2}", "actor.tokens_per_microbatch=128"
    settings = config(*keys, f"algorithm.objective.name={objective}")
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 0.0, 1.0])])
    versions = [[(2, 2), (1, 2)], [(1, 1), (2, 2)]]
    dated = [
        [replace(item, version_oldest=old, version_newest=new) for item, (old, new) in zip(group, pairs, strict=True)]
        for group, pairs in zip(groups, versions, strict=True)
    ]
    actor = Group(loss("policy", 1.0))
    train(settings, workers_of(actor), rollouts_of(dated), 3, MovingAverage())
    [update] = actor.updates
    stale = {item.id: item.is_stale for item in update}
    assert stale == {"1.0.0": False, "1.0.1": True, "1.1.0": True, "1.1.1": False}


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_loss_of_a_step_is_the_mean_over_its_updates(estimator):
    settings = config(
        "batch.prompts_per_step=2", "batch.prompts_per_update=1", f"algorithm.advantage.estimator={estimator}"
    )
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 0.0, 1.0])])
    actor, critic = Group(loss("policy", 4.0), loss("policy", 2.0)), Group(loss("value", 1.0), loss("value", 7.0))
    workers = workers_of(actor, critic if estimator == "gae" else None)
    metrics = values(train(settings, workers, rollouts_of(groups), 1, MovingAverage()))
    assert metrics == {"policy/loss": 3.0} | ({"value/loss": 4.0} if estimator == "gae" else {})


class Teacher:
    """Fakes a TeacherGroup that scores the samples of some prompts."""

    def __init__(self, name: str, log: list[str], *prompts: str) -> None:
        self.scores, self._log, self._prompts = f"teacher/{name}", log, prompts

    def score_tokens(self, samples: Sequence[SampleRef], feedback: dict) -> Pending[dict]:
        assert feedback == {"check": "feedback"}
        self._log.append(self.scores)
        return ready({item.id: f"{self.scores} of {item.id}" for item in samples if item.prompt_id in self._prompts})


def test_teachers_score_the_actors_samples_before_passes():
    """In all epochs, and not the critic's samples. The second teacher has no sample of the first prompt."""
    keys = ("algorithm.advantage.estimator=gae", "critic.tokens_per_microbatch=64", "batch.epochs=2")
    settings = config(
        *("batch.prompts_per_step=2", "batch.prompts_per_update=1", "teachers.tokens_per_microbatch=64", *keys),
        "teachers.models=[{name: a, path: x}, {name: b, path: y}]",
    )
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 0.0, 1.0])])
    log: list[str] = []
    actor, critic = Group(), Group()
    actor.calls = critic.calls = log
    teachers = [Teacher("a", log, "p0", "p1"), Teacher("b", log, "p1")]
    workers = replace(workers_of(actor, critic), teachers=teachers)
    metrics = train(settings, workers, rollouts_of(groups), 1, MovingAverage())
    assert log == ["teacher/a", "teacher/b", "old", "score_tokens", "train", "train"]
    assert metrics["teachers/seconds"].value >= 0
    assert len(actor.updates) == 4
    for item in (item for update in actor.updates for item in update):
        names = {"teacher/a"} | ({"teacher/b"} if item.prompt_id == "p1" else set())
        given = {name: value for name, value in item.scores.items() if name.startswith("teacher/")}
        assert given == {name: f"{name} of {item.id}" for name in names}
    assert not any(name.startswith("teacher/") for update in critic.updates for item in update for name in item.scores)


def test_self_teacher_computes_on_the_actors_devices(monkeypatch):
    """The self-teacher runs after other teachers, which need the trained models' states offloaded."""
    models = "teachers.models=[{name: hinted, prompt_column: hint}, {name: a, path: x}]"
    settings = config("data.source=rows.jsonl", models, "teachers.tokens_per_microbatch=64")
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 0.0, 1.0])])
    log: list[str] = []

    def note(method: str) -> None:
        inner = getattr(TrainedModels, method)
        logged = lambda *arguments, **options: [log.append(method), inner(*arguments, **options)][1]  # noqa: E731
        monkeypatch.setattr(TrainedModels, method, logged)

    note("run")
    note("offload_all")
    actor = Group()
    hinted = SelfTeacher(settings.self_teachers[0], actor)
    monkeypatch.setattr(hinted, "score_tokens", Teacher("hinted", log, "p0").score_tokens)
    workers = replace(workers_of(actor, None), teachers=[hinted, Teacher("a", log, "p0", "p1")])
    metrics = train(settings, workers, rollouts_of(groups), 1, MovingAverage())
    assert log[:4] == ["offload_all", "teacher/a", "run", "teacher/hinted"]
    assert metrics["teachers/seconds"].value >= 0
    for item in (item for update in actor.updates for item in update):
        assert ("teacher/hinted" in item.scores) == (item.prompt_id == "p0")


def test_teachers_do_not_run_at_coefficient_zero():
    keys = ("teachers={models: [{name: a, path: x}], tokens_per_microbatch: 64}", "run.steps=4")
    settings = config(*keys, "algorithm.distillation={coefficient: 0.5, anneal_steps: 2}")
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 0.0, 1.0])])
    for number, coefficient in enumerate((0.5, 0.25, 0.0, 0.0), start=1):
        log: list[str] = []
        actor = Group()
        actor.calls = log
        workers = replace(workers_of(actor, None), teachers=[Teacher("a", log, "p0", "p1")])
        metrics = train(settings, workers, rollouts_of(groups), number, MovingAverage())
        assert metrics["distillation/coefficient"].value == coefficient
        passes = ["teacher/a"] if coefficient else []
        assert log == [f"coefficient {coefficient}", *passes, "old", "train"]
        assert ("teachers/seconds" in metrics) == bool(coefficient)
        items = [item for update in actor.updates for item in update]
        assert items and all(("teacher/a" in item.scores) == bool(coefficient) for item in items)


def test_teachers_rest_while_only_the_critic_is_trained():
    keys = ("algorithm.advantage.estimator=gae", "critic={tokens_per_microbatch: 64, warmup_steps: 1}", "run.steps=2")
    settings = config(*keys, "teachers={models: [{name: a, path: x}], tokens_per_microbatch: 64}")
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 0.0, 1.0])])
    log: list[str] = []
    workers = replace(workers_of(Group(), Group()), teachers=[Teacher("a", log, "p0", "p1")])
    assert "teachers/seconds" not in train(settings, workers, rollouts_of(groups), 1, MovingAverage())
    assert log == []
    assert "teachers/seconds" in train(settings, workers, rollouts_of(groups), 2, MovingAverage())
    assert log == ["teacher/a"]


EPOCHS = (
    *("batch.prompts_per_step=4", "batch.prompts_per_update=2", "batch.epochs=3", "actor.layout.dp=2"),
    *("algorithm.advantage.estimator=gae", "critic.tokens_per_microbatch=64"),
)


def test_epochs_shuffle_prompts_across_updates():
    """The first epoch keeps the order. Later ones depend on seed, step and epoch."""
    groups, _ = select(config(), [[sample(p, k) for k in range(2)] for p in range(8)], [score(1.0)] * 16)

    def epochs(step: int, *overrides: str) -> list[list[list[str]]]:
        batch = "batch={prompts_per_step: 8, prompts_per_update: 2, epochs: 4}"
        all_epochs = epochs_of(config(batch, *overrides), groups, step)
        assert all(len(group) == 2 for updates in all_epochs for update in updates for group in update)
        return [[[group[0].prompt_id for group in update] for update in updates] for updates in all_epochs]

    first = epochs(1)
    assert first[0] == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"], ["p6", "p7"]]
    for updates in first:
        assert [len(update) for update in updates] == [2] * 4
        assert sorted(name for update in updates for name in update) == [f"p{i}" for i in range(8)]
    shuffled = [*first[1:], *epochs(2)[1:], *epochs(1, "run.seed=7")[1:]]
    assert len({str(updates) for updates in shuffled}) == 9 and first[0] not in shuffled
    assert epochs(1) == first
    assert epochs(1, "batch.prompts_per_update=8")[1:] == [[[f"p{i}" for i in range(8)]]] * 3


def test_actor_and_critic_train_on_the_same_epochs():
    """Passes run before the first epoch. Later epochs may assign samples to other ranks, so they carry the results."""
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
        assert item.scores == {"values": f"score of {item.id}", "old": f"old of {item.id}"}
    assert metrics == {"policy/loss": 4.0, "update/epochs": 3}


@pytest.mark.parametrize(("divergences", "done"), [((0.0, 0.2, 0.1, 0.3), 2), ((0.4, 0.2), 1), ((0.1,) * 6, 3)])
def test_epochs_stop_after_the_kl_limit(divergences, done):
    """Each epoch has two updates, whose mean KL is compared with the limit. The critic stops with the actor."""
    samples = [[sample(prompt, k) for k in range(2)] for prompt in range(4)]
    groups, _ = select(config(), samples, [*map(score, [1.0, 0.0] * 4)])
    actor, critic = Group(*({"policy/kl_old": Metric(value, weight=8.0)} for value in divergences)), Group()
    settings = config(*EPOCHS, "batch.epochs_kl_limit=0.1999")
    metrics = values(train(settings, workers_of(actor, critic), rollouts_of(groups), 1, MovingAverage()))
    assert actor.calls == ["old", *["train", "resume", "resume"][:done]]
    assert critic.calls == ["score_tokens", *["train", "resume", "resume"][:done]]
    assert metrics["update/epochs"] == done
    assert metrics["policy/kl_old"] == pytest.approx(sum(divergences) / len(divergences))


def test_step_without_any_score_fails_the_run():
    with pytest.raises(RunFailure, match="could not score any sample of this step"):
        select(config("rewards.failure_limit=1.0"), GROUPS, [score(None)] * 4)


REMAX = "algorithm.advantage.estimator=remax"


def test_remax_uses_the_greedy_response_as_baseline():
    settings = config(REMAX, "rewards.failure_limit=0.5", "batch.samples_per_prompt=2")
    samples = [[sample(prompt, k) for k in range(3)] for prompt in range(2)]
    scores = [*map(score, [1.0, 0.0, 0.25, 1.0, 0.5, None])]
    groups, metrics = select(settings, samples, scores)
    assert [[item.reward for item in group] for group in groups] == [[1.0, 0.0], []]
    assert values(metrics)["reward/mean"] == 0.5 and values(metrics)["reward/greedy_mean"] == 0.25
    samples = attach_baselines(settings, groups[:1], {}, {}, MovingAverage())
    assert [item.baseline for item in samples] == [Baseline(0.25)] * 2


def test_overlong_penalty_applies_to_greedy_responses():
    settings = config(REMAX, OVERLONG, "batch.samples_per_prompt=2")
    groups, metrics = select(settings, [[sample(0, 0), sample(0, 1, 14), sample(0, 2, 15)]], [score(1.0)] * 3)
    assert [item.reward for item in groups[0]] == [1.0, 0.5]
    assert values(metrics)["reward/greedy_mean"] == 0.25
    assert [item.baseline for item in attach_baselines(settings, groups, {}, {}, MovingAverage())] == [
        Baseline(0.25)
    ] * 2


def test_remax_requests_a_greedy_response_per_prompt():
    prompts = [Prompt(f"p{i}", "", (7,)) for i in range(2)]
    settings = config(REMAX, "batch.samples_per_prompt=3")
    request_groups = requests(settings, 4, prompts)
    assert [[request.sample_id for request in group] for group in request_groups] == [
        [f"4.{i}.{k}" for k in (0, 1, 2, "greedy")] for i in range(2)
    ]
    assert [[request.greedy for request in group] for group in request_groups] == [[False] * 3 + [True]] * 2
    assert not any(request.greedy for group in requests(config(), 4, prompts) for request in group)


def test_reinforce_baseline_averages_earlier_steps():
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


def test_token_rewards_join_the_sample_or_have_own_baselines():
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


def test_kl_reward_is_computed_before_training():
    """Both passes run first. Then the critic trains with the KL reward, then the actor, whose baselines include it."""
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
    [[critic_sample, *_]], [[actor_sample, *_]] = critic.updates, actor.updates
    assert critic_sample.scores == {"kl_reward": "score of 1.0.0"}
    assert actor_sample.scores == {"kl_reward": "score of 1.0.0", "values": "score of 1.0.0"}


@pytest.mark.parametrize("number", [1, 2])
def test_critic_trains_alone_during_warmup(number):
    settings = config(
        "algorithm.advantage={estimator: gae}", "critic.tokens_per_microbatch=64", "critic.warmup_steps=1"
    )
    actor, critic = Group(), Group()
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 0.0, 1.0])])
    train(settings, workers_of(actor, critic), rollouts_of(groups), number, MovingAverage())
    assert critic.calls == ["score_tokens", "train"]
    assert actor.calls == (["train"] if number > 1 else [])


def test_group_baselines_include_the_kl_reward():
    settings = config("algorithm.kl={placement: reward, coefficient: 0.1}", "algorithm.advantage.std=none")
    groups, _ = select(settings, GROUPS[:1], [*map(score, [1.0, 0.0])])
    kl_reward_totals = {"1.0.0": TokenTotals(4, -3.0, 9.0), "1.0.1": TokenTotals(4, -1.0, 1.0)}
    assert [
        item.baseline.center for item in attach_baselines(settings, groups, {}, kl_reward_totals, MovingAverage())
    ] == [-1.5, -1.5]


@pytest.mark.parametrize("credit", ["whole", "reward_to_go"])
def test_gpg_scale_ignores_the_kl_reward(credit):
    settings = config(
        "algorithm.kl={placement: reward, coefficient: 0.1}",
        f"algorithm.advantage={{estimator: gpg, credit: {credit}}}",
    )
    groups, _ = select(settings, GROUPS, [*map(score, [1.0, 0.0, 1.0, 1.0])])
    kl_reward_totals = {item.id: TokenTotals(4, -float(i), 9.0) for i, item in enumerate(groups[0] + groups[1])}
    samples = attach_baselines(settings, groups, {}, kl_reward_totals, MovingAverage())
    assert [item.baseline.scale for item in samples] == [1 / 2] * 4
    assert [item.baseline.token_scale for item in samples] == [1 / 2] * 4


ONLINE_DPO = ("algorithm.objective.name=dpo", "rollout.context_length=32")


def test_online_dpo_trains_on_best_and_worst_of_each_group():
    """The step has two updates of two prompts each. The second is skipped because all its rewards are equal."""
    settings = config(*ONLINE_DPO, "batch.prompts_per_step=4", "batch.prompts_per_update=2")
    samples = [[sample(prompt, k) for k in range(3)] for prompt in range(4)]
    groups, _ = select(settings, samples, [*map(score, [0.5, 0.0, 1.0, 1.0, 1.0, 1.0, *[0.0] * 6])])
    actor = Group()
    metrics = train(settings, workers_of(actor), rollouts_of(groups), 1, MovingAverage())
    assert actor.calls == ["reference", "train"]
    assert [[item.id for item in update] for update in actor.updates] == [["1.0.2", "1.0.1"]]
    assert values(metrics)["preference/tied_frac"] == 0.75


def test_preference_pairs_are_adjacent_with_equal_weights():
    settings = config(*ONLINE_DPO, "actor.layout.dp=2")
    pairs = [replace(sample(prompt, k, 3 + 5 * k), outcome=1.0 - k) for prompt in range(3) for k in range(2)]
    rank_batches = dispatch(settings, pairs, packing(num_ranks=2, shares_prompts=False))
    dispatched = [batch.samples[i] for batch in rank_batches for members in batch.microbatches for i in members]
    assert all(item.weight == pytest.approx(1 / 6) for item in dispatched)
    names = [item.sample for item in dispatched]
    better, worse = names[::2], names[1::2]
    assert sorted(better) == ["0.0", "1.0", "2.0"] and worse == [f"{name[0]}.1" for name in better]


def test_step_std_covers_all_updates():
    """The scale is the standard deviation of the step's rewards, 0, 2 | 1, 5, although the update has one group."""
    settings = config("algorithm.advantage={std: population, std_epsilon: 0.0, std_over: step}")
    groups, _ = select(settings, GROUPS, [*map(score, [0.0, 2.0, 1.0, 5.0])])
    over_step = step_normalization(settings, groups, {}, {})
    assert over_step == (0.0, pytest.approx(3.5**0.5))
    [first, second] = [attach_baselines(settings, [group], {}, {}, MovingAverage(), over_step) for group in groups]
    scales = dict(scale=over_step.scale, token_scale=over_step.scale)
    assert [item.baseline for item in first] == [Baseline(1.0, **scales)] * 2
    assert [item.baseline for item in second] == [Baseline(3.0, **scales)] * 2
    assert step_normalization(config(), groups, {}, {}) is None


def test_gdpo_normalizes_over_all_updates_of_a_step():
    """The advantages within the groups are ±a and ±a, whatever their scale. Over the step, their mean is 0."""
    settings = config("algorithm.advantage={estimator: gdpo, std_epsilon: 0.0}", "batch.prompts_per_update=1")
    actor = Group()
    groups, _ = select(settings, GROUPS, [*map(score, [0.0, 2.0, 1.0, 5.0])])
    train(settings, workers_of(actor, None), rollouts_of(groups), 1, MovingAverage())
    found = [(item.reward - item.baseline.center) / item.baseline.scale for update in actor.updates for item in update]
    assert len(actor.updates) == 2
    assert found == pytest.approx([-(0.75**0.5), 0.75**0.5] * 2)
