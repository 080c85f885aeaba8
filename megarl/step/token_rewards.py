"""Rewards of single tokens, from models that are asked after a step's samples are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.pending import Pending, join
from megarl.cluster.rank_batch import Scores, Updates
from megarl.cluster.workers import Workers
from megarl.config.schema import Config
from megarl.step.baselines import Totals
from megarl.step.dispatch import dispatch, samples_of
from megarl.step.passes import make_policy_passes
from megarl.step.scoring import Metrics, ScoredSample


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """Rewards that tokens have one by one.

    scores                references to the rewards, by their name in TokenBatch
    token_reward_totals   sums over the implicit reward model's rewards, by sample
    kl_reward_totals      sums over the rewards for being close to the reference, by sample
    log_probs             references to those of the actor's passes, as TrainerGroup.keep_log_probs returns them
    metrics               metrics of the implicit reward model's training
    """

    scores: dict[str, Scores]
    token_reward_totals: Totals = field(default_factory=dict)
    kl_reward_totals: Totals = field(default_factory=dict)
    log_probs: dict[str, Scores] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)


def reward_tokens(
    config: Config, workers: Workers, updates: Sequence[Sequence[Sequence[ScoredSample]]], process_rewards: Scores
) -> TokenRewards:
    """Joins the rewards that are known (a reward model's, or those of turns) with those of the implicit reward model,
    which learns from the samples after it has scored them, and with the KL to the reference where it is a reward.

    updates           the groups of each update
    process_rewards   references to the rewards that are known; empty if there are none
    """
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
    """Submits scoring and training of a model that learns from the samples that it has scored. The result is ((scores,
    totals), metrics)."""
    scored, trained, ended = group.score_tokens(batches), group.train([batches]), group.end_step()
    return join([scored, trained, ended]).then(lambda results: results[:2])


def _score_kl(config: Config, actor: TrainerGroup, batches: Updates) -> Pending:
    """Submits the passes and the KL that follows from them. The result is ((scores, totals) of the KL, log-probs)."""
    made, scored = make_policy_passes(config, actor, batches), actor.score_tokens(batches)
    return made.then(lambda log_probs: scored.then(lambda of_kl: (of_kl, log_probs)))
