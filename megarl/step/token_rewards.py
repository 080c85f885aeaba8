"""Per-token rewards from models that run after the samples in a step are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.pending import Pending
from megarl.cluster.rank_batch import Scores, Updates
from megarl.cluster.workers import Workers
from megarl.config.schema import Config
from megarl.core.sample import SampleRef
from megarl.step.dispatch import dispatch, samples_of
from megarl.step.passes import make_policy_passes
from megarl.step.rollout_rewards import Totals
from megarl.step.scoring import Metrics


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """Per-token rewards for a step's samples.

    Attributes:
        scores: references to the rewards, by name in TokenBatch.
        token_reward_totals: sums over the implicit reward model's rewards, by sample id.
        kl_reward_totals: sums over the KL rewards, by sample id.
        log_probs: references to log-probs from the actor's passes, as returned by TrainerGroup.keep_log_probs.
    """

    scores: dict[str, Scores]
    token_reward_totals: Totals = field(default_factory=dict)
    kl_reward_totals: Totals = field(default_factory=dict)
    log_probs: dict[str, Scores] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)


def reward_tokens(
    config: Config, workers: Workers, updates: Sequence[Sequence[Sequence[SampleRef]]], process_rewards: Scores
) -> TokenRewards:
    """Combine the per-token rewards that are already known (from a reward model, or assigned to turns) with the
    implicit reward model's rewards and, with algorithm.kl.placement=reward, the KL rewards. The implicit reward model
    then trains on the samples. `updates` lists the groups of each update; `process_rewards` holds the known rewards."""
    samples = [samples_of(update) for update in updates]
    actor, implicit_reward, tasks = workers.actor, workers.implicit_reward, {}
    if implicit_reward is not None:
        batches = [dispatch(config, update, implicit_reward.packing, "implicit_reward") for update in samples]
        tasks["implicit_reward"] = lambda: _score_and_train(implicit_reward, batches)
    if config.kl_in_reward:
        actor_batches = [dispatch(config, update, actor.packing) for update in samples]
        tasks["actor"] = lambda: _score_kl(config, actor, actor_batches)
    results = workers.trained.run(tasks)
    scores = {"process_reward": process_rewards} if process_rewards else {}
    token_reward_totals, metrics = {}, {}
    if "implicit_reward" in results:
        (scores["implicit_reward"], token_reward_totals), metrics = results["implicit_reward"]
    kl_reward_totals, log_probs = {}, {}
    if "actor" in results:
        (scores["kl_reward"], kl_reward_totals), log_probs = results["actor"]
    return TokenRewards(scores, token_reward_totals, kl_reward_totals, log_probs, metrics)


def _score_and_train(group: TrainerGroup, batches: Updates) -> Pending:
    """Submit calls that score the batches with a model and then train it. The result is ((scores, totals), metrics)."""
    scored, trained, ended = group.score_tokens(batches), group.train([batches]), group.end_step()
    return scored.then(lambda scores: trained.then(lambda metrics: ended.then(lambda _: (scores, metrics))))


def _score_kl(config: Config, actor: TrainerGroup, batches: Updates) -> Pending:
    """Submit the policies' passes and the KL rewards. The result is ((KL rewards, their totals), log-probs)."""
    passes, scored = make_policy_passes(config, actor, batches), actor.score_tokens(batches)
    return passes.then(lambda log_probs: scored.then(lambda kl_scores: (kl_scores, log_probs)))
