"""PPO with a critic through Megatron, with separate layouts for actor and critic, against plain Hugging Face and
torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from transformers.core_model_loading import revert_weight_conversion

from megarl.config.schema import Config
from megarl.core.sample import Sample
from megarl.megatron import parallel
from megarl.megatron.workers.actor import ActorWorker
from megarl.megatron.workers.critic import CriticWorker
from megarl.models.classifier import as_classifier
from megarl.models.folder import read_config
from megarl.models.value_head import add_value_head
from megarl.rewards.process import on_turns, turn_ends
from tests.closeness import LOSS_FLOOR, Expected, assert_close, close_to, expected
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import (
    EPS,
    LR,
    TEMPERATURE,
    Group,
    RankResult,
    config_of,
    local_batch,
    random_groups,
    rank_batches,
    whole_tensors,
)
from tests.ppo_reference import PpoReference, PpoSettings, SharedTrunkReference
from tests.tiny_model import SHARDED_VOCAB, write_tiny_experts, write_tiny_llama

TokenScores = dict[str, dict[str, torch.Tensor]]
"""Field of TokenBatch -> sample id -> one number per response token."""

Values = list[dict[str, torch.Tensor]]
"""The values of each step, by sample id."""

LAYOUTS = {
    "1 process each": ("{}", "{}"),
    "actor PP2, critic TP3 SP": ("{pp: 2}", "{tp: 3, sequence_parallel: true}"),
    "actor TP3 SP, critic PP2": ("{tp: 3, sequence_parallel: true}", "{pp: 2}"),
    "actor DP2, critic TP3": ("{dp: 2}", "{tp: 3}"),
    "actor 1 process, critic DP2": ("{}", "{dp: 2}"),
    "actor CP2, critic PP2 VPP2": ("{cp: 2}", "{pp: 2, vpp: 2}"),
    "actor DP2, critic CP2": ("{dp: 2}", "{cp: 2}"),
    "actor TP3 PP2 SP, critic CP2 TP3 SP": (
        "{tp: 3, pp: 2, sequence_parallel: true}",
        "{cp: 2, tp: 3, sequence_parallel: true}",
    ),
    "actor CP2 TP3 SP, critic PP4": ("{cp: 2, tp: 3, sequence_parallel: true}", "{pp: 4}"),
}
VALUE_COEFFICIENT = 0.7
PLAIN = PpoSettings(1.0, 0.95, None, False, LR, EPS, TEMPERATURE)
EVERYTHING = PpoSettings(0.9, 0.8, 0.1, True, LR, EPS, TEMPERATURE, critic_lr=3 * LR)
DECOUPLED = PpoSettings(0.9, 0.8, None, False, LR, EPS, TEMPERATURE, critic_lambda=1.0, length_alpha=0.5)


@pytest.fixture(scope="module")
def actor(tmp_path_factory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("actor"),
        num_heads=3,
        num_kv_heads=3,
        hidden_size=96,
        num_layers=4,
        intermediate_size=96,
        vocab_size=SHARDED_VOCAB,
    )


@pytest.fixture(scope="module")
def critic(actor, tmp_path_factory) -> Path:
    return write_critic(tmp_path_factory.mktemp("critic"), actor)


def write_critic(folder: Path, actor: Path) -> Path:
    """Write a classifier whose weights, including the head, differ from the actor's."""
    model = AutoModelForSequenceClassification.from_pretrained(actor, num_labels=1)
    # Replace the new head, which transformers draws from the global generator, whose state depends on earlier tests.
    torch.nn.init.zeros_(model.score.weight)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(folder)
    return folder


def ppo_config(
    actor: Path, critic: Path | None, layouts: tuple[str, str | None], settings: PpoSettings, *overrides: str
) -> Config:
    """Return the config for the layouts of the actor and the critic (None: a value head on the actor)."""
    of_critic = [
        f"critic.layout={layouts[1]}",
        f"critic.path={critic or 'null'}",
        f"critic.optimizer.lr={settings.critic_lr or settings.lr}",
        f"critic.optimizer.eps={settings.eps}",
        "critic.tokens_per_microbatch=128",
    ]
    return config_of(
        actor,
        "algorithm.advantage.estimator=gae",
        f"algorithm.advantage.gamma={settings.gamma}",
        f"algorithm.advantage.gae_lambda={settings.gae_lambda}",
        f"algorithm.advantage.whiten={str(settings.whiten).lower()}",
        f"algorithm.advantage.critic_lambda={settings.critic_lambda or 'null'}",
        f"algorithm.advantage.length_alpha={settings.length_alpha or 'null'}",
        f"algorithm.value.clip={'null' if settings.value_clip is None else settings.value_clip}",
        f"actor.layout={layouts[0]}",
        *([] if layouts[1] is None else of_critic),
        *overrides,
    )


def train_critic(store, rank: int, config: Config, folder: Path, steps: list[list[list[Group]]], given: TokenScores):
    """Train a critic on one rank: compute the values and run the updates of every step. Return its state and the
    values that it reports."""
    worker = CriticWorker(config, folder, rank, store, threads=1)
    values: Values = []
    for updates in steps:
        of_ranks = [rank_batches(config, worker.packing, groups, "critic", given) for groups in updates]
        batches = [local_batch(of_update[worker.data_parallel_rank]) for of_update in of_ranks]
        values.append({name: value for batch in batches for name, value in worker.score_tokens(batch).items()})
        metrics = [worker.update(batch) for batch in batches][-1]
        worker.end_step()
    return RankResult(worker.holder, {}, {n: p.clone() for n, p in worker.parameters().items()}, metrics), values


def train_actor(
    store,
    rank: int,
    config: Config,
    folder: Path,
    steps: list[list[list[Group]]],
    values: Values | None,
    given: TokenScores,
):
    worker = ActorWorker(config, folder, rank, store, threads=1)
    move_value_head(worker)
    for i, updates in enumerate(steps):
        scores = given if values is None else given | {"values": values[i]}
        of_ranks = [rank_batches(config, worker.packing, groups, "actor", scores) for groups in updates]
        batches = [local_batch(of_update[worker.data_parallel_rank]) for of_update in of_ranks]
        if len(updates) > 1 or config.actor_has_values:
            for batch in batches:
                worker.keep_log_probs("old", batch)
        metrics = [worker.update(batch) for batch in batches][-1]
        worker.end_step()
        trained = {item.sample.id for batch in batches for item in batch.samples if any(item.sample.response_mask)}
        taken = worker.take_advantages()
        assert taken.keys() == (trained if parallel.returns_results() else set()), (
            "exactly one rank of a replica must report results"
        )
        assert all(map(math.isfinite, taken.values())) and not worker.take_advantages()
    return RankResult(worker.holder, {}, {n: p.clone() for n, p in worker.parameters().items()}, metrics)


def run_both(
    config: Config, actor: Path, critic: Path, steps, given: TokenScores
) -> tuple[list[RankResult], list[RankResult]]:
    results = run_ranks(config.critic.layout.world_size, train_critic, config, critic, steps, given)
    values: Values = [{} for _ in steps]
    for _, of_rank in results:
        for known, own in zip(values, of_rank, strict=True):
            assert not known.keys() & own.keys(), "two ranks report the values of one sample"
            known |= own
    actors = run_ranks(config.actor.layout.world_size, train_actor, config, actor, steps, values, given)
    return actors, [rank for rank, _ in results]


@dataclass(frozen=True)
class Outcome:
    """The reference's losses in its last update, and the weights after it."""

    policy_loss: float
    value_loss: float
    actor: dict[str, torch.Tensor]
    critic: dict[str, torch.Tensor]


def plain_ppo(
    actor: Path, critic: Path, settings: PpoSettings, steps, token_rewards: dict | None = None
) -> Expected[Outcome]:
    """Run the updates of all steps in plain torch. `token_rewards` maps sample ids to per-token rewards; NaN marks
    tokens without one."""
    known = token_rewards and {name: own.nan_to_num(nan=0.0) for name, own in token_rewards.items()}

    def trained() -> Outcome:
        reference = PpoReference(actor, critic, settings, known)
        for updates in steps:
            losses = reference.step(updates)
        # Separate the experts as in a checkpoint, because transformers stacks them in memory.
        models = reference.actor, reference.critic
        return Outcome(*losses, *(revert_weight_conversion(m, dict(m.named_parameters())) for m in models))

    return expected(trained)


def steps_of(seeds: tuple[int, ...]) -> list[list[list[Group]]]:
    """Return steps of one update each."""
    return [[random_groups(seed, SHARDED_VOCAB)] for seed in seeds]


@cache
def plain_steps(actor: Path, critic: Path, settings: PpoSettings, seeds: tuple[int, ...]) -> Expected[Outcome]:
    return plain_ppo(actor, critic, settings, steps_of(seeds))


def check(config: Config, actor: Path, critic: Path, settings: PpoSettings, *seeds: int) -> None:
    """Compare steps of one update each with plain torch. All layouts share the reference."""
    assert_same_ppo(
        run_both(config, actor, critic, steps_of(seeds), {}), actor, critic, plain_steps(actor, critic, settings, seeds)
    )


def assert_same_ppo(
    ranks: tuple[list[RankResult], list[RankResult]], actor: Path, critic: Path, reference: Expected[Outcome]
) -> None:
    actors, critics = ranks
    exact, plain = reference
    reported = [rank.metrics for rank in actors if rank.metrics]
    assert sum(m["policy/loss"].value for m in reported) == close_to(exact.policy_loss, plain.policy_loss, LOSS_FLOOR)
    reported = [rank.metrics for rank in critics if rank.metrics]
    assert sum(m["value/loss"].value for m in reported) == close_to(exact.value_loss, plain.value_loss, LOSS_FLOOR)
    weights = whole_tensors(read_config(actor), actors, "weights")
    assert_close(weights, exact.actor, plain.actor, "actor's weight")
    weights = whole_tensors(as_classifier(read_config(critic)), critics, "weights")
    assert_close(weights, exact.critic, plain.critic, "critic's weight")


@pytest.mark.parametrize(
    "layouts",
    exhaustive_but(LAYOUTS, "actor CP2, critic PP2 VPP2"),
)
def test_two_steps_equal_plain_torch(actor, critic, layouts):
    config = ppo_config(actor, critic, LAYOUTS[layouts], EVERYTHING)
    check(config, actor, critic, EVERYTHING, 0, 1)


EXPERTS = {
    "actor EP2 TP2 ETP1, critic EP2 PP2": ("{tp: 2, sequence_parallel: true, ep: 2, etp: 1}", "{dp: 2, ep: 2, pp: 2}"),
    "actor EP2 CP2, critic EP2 TP2 ETP2": ("{cp: 2, ep: 2}", "{tp: 2, sequence_parallel: true, dp: 2, ep: 2, etp: 2}"),
}


@pytest.mark.parametrize("layouts", exhaustive_but(EXPERTS, "actor EP2 TP2 ETP1, critic EP2 PP2"))
def test_mixtures_of_experts_equal_plain_torch(tmp_path, layouts):
    actor = write_tiny_experts(tmp_path / "actor", vocab_size=SHARDED_VOCAB)
    critic = write_critic(tmp_path / "critic", actor)
    config = ppo_config(actor, critic, EXPERTS[layouts], EVERYTHING)
    check(config, actor, critic, EVERYTHING, 0, 1)


@pytest.mark.parametrize(
    "layouts",
    exhaustive_but(
        ["actor DP2, critic CP2", "actor TP3 SP, critic PP2", "actor CP2, critic PP2 VPP2"], "actor DP2, critic CP2"
    ),
)
def test_actor_and_critic_support_separate_lambdas(actor, critic, layouts):
    """The actor's lambda depends on the length of each sample, as in VAPO."""
    config = ppo_config(actor, critic, LAYOUTS[layouts], DECOUPLED)
    check(config, actor, critic, DECOUPLED, 0)


@pytest.mark.parametrize(
    ("layouts", "per"),
    [
        (("{pp: 2}", "{dp: 2}"), "token"),
        (("{dp: 2}", "{cp: 2}"), "turn"),
        pytest.param(("{cp: 2}", "{}"), "token", marks=pytest.mark.exhaustive),
    ],
)
def test_token_and_turn_rewards_reach_both_models(actor, critic, layouts, per):
    groups = random_groups(0, SHARDED_VOCAB)
    generator = torch.Generator().manual_seed(11)
    token_rewards = {s.id: torch.randn(len(s.response_ids), generator=generator) for group in groups for s, _ in group}
    if per == "turn":
        masks = {sample.id: sample.response_mask for group in groups for sample, _ in group}
        token_rewards = {name: turn_rewards(own, masks[name]) for name, own in token_rewards.items()}
    config = ppo_config(actor, critic, layouts, EVERYTHING)
    ranks = run_both(config, actor, critic, [[groups]], {"process_reward": token_rewards})
    assert_same_ppo(ranks, actor, critic, plain_ppo(actor, critic, EVERYTHING, [[groups]], token_rewards))


def turn_rewards(rewards: torch.Tensor, mask: Sequence[bool]) -> torch.Tensor:
    """Return the first of the rewards at the ends of the sample's turns, NaN elsewhere. At least one sample has several
    turns."""
    return torch.tensor(on_turns(rewards.tolist()[: len(turn_ends(mask))], mask))


def test_ranks_without_samples_stay_in_sync(actor, critic):
    """Two samples for three ranks, which happens if the rewards of all other samples fail."""
    config = ppo_config(actor, critic, ("{dp: 3}", "{dp: 3}"), EVERYTHING)
    steps = [[[random_groups(seed, SHARDED_VOCAB)[0][1:3]]] for seed in range(2)]
    ranks = run_both(config, actor, critic, steps, {})
    assert_same_ppo(ranks, actor, critic, plain_ppo(actor, critic, EVERYTHING, steps))


@pytest.mark.parametrize(
    "settings",
    [pytest.param(PLAIN, marks=pytest.mark.exhaustive, id="plain"), pytest.param(EVERYTHING, id="everything")],
)
def test_two_updates_of_one_step_share_their_values(actor, critic, settings):
    """The policy and the critic of the second update have moved since the values were computed."""
    config = ppo_config(actor, critic, ("{pp: 2}", "{dp: 2}"), settings)
    second = [[(renamed(sample), reward) for sample, reward in group] for group in random_groups(1, SHARDED_VOCAB)]
    steps = [[random_groups(0, SHARDED_VOCAB), second]]
    ranks = run_both(config, actor, critic, steps, {})
    assert_same_ppo(ranks, actor, critic, plain_ppo(actor, critic, settings, steps))


def test_critic_initialized_from_the_actor_starts_at_zero(actor):
    config = ppo_config(actor, None, ("{}", "{tp: 3}"), PLAIN)
    check(config, actor, actor, PLAIN, 0, 1)


@pytest.mark.parametrize(
    "layout",
    exhaustive_but(
        ["{}", "{tp: 3, sequence_parallel: true}", "{tp: 3}", "{pp: 2}", "{dp: 2}", "{cp: 2}"],
        "{tp: 3, sequence_parallel: true}",
        "{pp: 2}",
    ),
)
def test_a_value_head_on_the_actor_equals_plain_torch(actor, layout):
    check_value_head(actor, layout, 1)


@pytest.mark.parametrize("num_updates", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_value_head_in_a_separate_bucket_is_up_to_date(actor, num_updates):
    """The other replica sends the head's updates separately from the backbone's."""
    check_value_head(actor, "{dp: 2}", num_updates, "actor.megatron_overrides.ddp={bucket_size: 1}")


def value_head_steps(num_updates: int) -> list[list[list[Group]]]:
    """Return two steps, of which the first has `num_updates` updates."""
    second = [[(renamed(sample), reward) for sample, reward in group] for group in random_groups(2, SHARDED_VOCAB)]
    return [[random_groups(0, SHARDED_VOCAB), second][:num_updates], [random_groups(1, SHARDED_VOCAB)]]


def value_head_config(actor: Path, layout: str, *overrides: str) -> Config:
    shared = ("critic.shared_backbone=true", f"algorithm.value.coefficient={VALUE_COEFFICIENT}", *overrides)
    return ppo_config(actor, None, (layout, None), EVERYTHING, *shared)


@cache
def initial_head(actor: Path) -> dict[str, torch.Tensor]:
    return run_ranks(1, value_head, value_head_config(actor, "{}"), actor)[0]


@cache
def plain_value_head(actor: Path, num_updates: int) -> Expected[tuple[float, float, dict[str, torch.Tensor]]]:
    """Return the losses and weights of plain torch. All layouts share them."""
    start = initial_head(actor)  # before the default dtype changes

    def trained() -> tuple[float, float, dict[str, torch.Tensor]]:
        reference = SharedTrunkReference(actor, start, EVERYTHING, VALUE_COEFFICIENT)
        for updates in value_head_steps(num_updates):
            policy_loss, value_loss = reference.step(updates)
        head = {"value_head.fc1": reference.head[0], "value_head.fc2": reference.head[2]}
        weights = {f"{name}.{kind}": p for name, layer in head.items() for kind, p in layer.named_parameters()}
        return policy_loss, VALUE_COEFFICIENT * value_loss, dict(reference.actor.named_parameters()) | weights

    return expected(trained)


def check_value_head(actor: Path, layout: str, num_updates: int, *overrides: str) -> None:
    config = value_head_config(actor, layout, *overrides)
    steps = value_head_steps(num_updates)
    ranks = run_ranks(config.actor.layout.world_size, train_actor, config, actor, steps, None, {})
    policy_loss, value_loss, weights = zip(*plain_value_head(actor, num_updates), strict=True)
    reported = [rank.metrics for rank in ranks if rank.metrics]
    assert sum(m["policy/loss"].value for m in reported) == close_to(*policy_loss, LOSS_FLOOR)
    assert sum(m["value/loss"].value for m in reported) == close_to(*value_loss, LOSS_FLOOR)
    head_weights = whole_tensors(add_value_head(read_config(actor)), ranks, "weights")
    assert_close(head_weights, *weights, "weight")


def value_head(store, rank: int, config: Config, folder: Path) -> dict[str, torch.Tensor]:
    """Return the actor's value head after `move_value_head`, by parameter name without the prefix."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    assert not any(p.any() for name, p in worker.parameters().items() if "value_head.fc2" in name)
    move_value_head(worker)
    named = worker.parameters().items()
    return {name.partition("value_head.")[2]: p.clone() for name, p in named if "value_head" in name}


def move_value_head(worker: ActorWorker) -> None:
    """Randomize the head's zero-initialized parameters, which would block all gradients in the first step."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in worker.parameters().items():
        if "value_head" in name and not parameter.any():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def renamed(sample: Sample) -> Sample:
    return replace(sample, id=f"second {sample.id}", prompt=replace(sample.prompt, id=f"second {sample.prompt.id}"))
