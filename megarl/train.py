"""The RL run: `run` starts everybody, `step` is one step of learning, read from top to bottom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl import report
from megarl.algorithms.baselines import MovingAverage
from megarl.algorithms.kl import metric_name
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.machine import check_gpu_memory, check_machine
from megarl.cluster.megatron_settings import check_megatron_settings
from megarl.cluster.model_folders import find_models
from megarl.cluster.rank_batch import RankBatch, Scores
from megarl.cluster.session import Session
from megarl.cluster.workers import Workers, launch_workers
from megarl.config.schema import Config, Role
from megarl.core.metrics import Metric, merge_updates, values
from megarl.core.timing import Stopwatch
from megarl.data.prompts import load_prompts
from megarl.run.loop import Loop, exit_status
from megarl.step import passes
from megarl.step.baselines import Totals, attach_baselines, update_reward_average
from megarl.step.dispatch import dispatch, samples_of, updates_of
from megarl.step.metrics import step_metrics
from megarl.step.pairs import best_and_worst
from megarl.step.rollouts import collect_rollouts
from megarl.step.scoring import Metrics, ScoredSample


def main(config: Config, scratch: Path) -> int:
    return exit_status(run, config, scratch)


def run(config: Config, scratch: Path) -> None:
    check_machine(config)
    models = find_models(config)
    check_gpu_memory(config, models)
    check_megatron_settings(config, models)
    with Loop.prepare(config, models, load_prompts(config, models.actor)) as loop:
        with Session(config, loop.folder.logs, scratch) as session:
            workers = launch_workers(session, config, models, loop.placement, loop.resume_point.checkpoint)
            learn(config, workers, loop)
        print(f"report: {report.write(loop.folder.path)}")


def learn(config: Config, workers: Workers, loop: Loop) -> None:
    """All steps, from the first refit of the engines, which may hold any weights, to the trained model."""
    workers.refit.run(version=loop.state.step)
    print(f"kernels: {workers.trainers.kernels}\nrefit: by {workers.refit.transport}", flush=True)
    loop.run(workers.trained, lambda: step(config, workers, loop))
    loop.export(workers.export)
    workers.close()


def step(config: Config, workers: Workers, loop: Loop) -> dict[str, float]:
    """One step: sample and score, update, refit. Returns its metrics; its number is then the engine's version."""
    watch, number = Stopwatch(), loop.state.step
    rollouts = collect_rollouts(
        config, workers, number, loop.take, loop.folder.rollouts(number), watch, loop.saver.commit
    )
    metrics = dict(rollouts.metrics)
    with watch.phase("train"):
        metrics |= train(config, workers, rollouts.chosen, number, rollouts.process_rewards, loop.state.average)
    with watch.phase("refit"):
        metrics |= workers.refit.run(version=number)
    return values(metrics) | step_metrics(config, rollouts.sampled, watch, number)


def train(
    config: Config,
    workers: Workers,
    groups: Sequence[Sequence[ScoredSample]],
    number: int,
    process_rewards: Scores,
    average: MovingAverage,
) -> Metrics:
    """One optimizer step of every model that is trained for every prompts_per_update groups: first of those that score
    tokens for others. process_rewards: where those of single tokens are, if there are any. average: of the rewards of
    earlier steps; it takes up this one's."""
    updates = updates_of(config, groups)
    if config.algorithm.objective.spec.is_pairwise:
        return train_on_pairs(config, workers.trainers, updates, number)
    metrics: Metrics = {}
    scores: dict[str, Scores] = {"process_reward": process_rewards} if process_rewards else {}
    token_reward_totals: Totals = {}
    kl_reward_totals: Totals = {}
    if passes.needed(config, "implicit rewards"):
        plain = [samples_of(update) for update in updates]
        metrics, scores["implicit_reward"], token_reward_totals = score_and_train(
            config, workers.implicit_reward, "implicit_reward", plain, {}
        )
    if config.kl_in_reward:
        rank_batches = [dispatch(config, samples_of(update), workers.trainers.packing) for update in updates]
        make_policy_passes(config, workers.trainers, rank_batches)
        scores["kl_reward"], kl_reward_totals = workers.trainers.score_tokens(rank_batches)
    training_samples = [
        attach_baselines(config, update, token_reward_totals, kl_reward_totals, average) for update in updates
    ]
    metrics |= update_reward_average(config, groups, token_reward_totals, kl_reward_totals, average)
    if passes.needed(config, "critic values"):
        of_critic, scores["values"], _ = score_and_train(config, workers.critic, "critic", training_samples, scores)
        metrics |= of_critic
        if number <= config.critic.warmup_steps:
            if config.kl_in_reward:
                workers.trainers.end_step()  # which has scored the samples
            return metrics
    metrics |= train_actor(config, workers.trainers, training_samples, scores)
    follow_policy(config, workers.trainers, number, metrics, sum(map(len, groups)))
    return metrics


def train_on_pairs(
    config: Config, actor: TrainerGroup, updates: Sequence[Sequence[Sequence[ScoredSample]]], number: int
) -> Metrics:
    """Of the best and the worst sample of each group; an update in which all are equal is left out."""
    pairs = [best_and_worst(update) for update in updates]
    metrics = train_actor(config, actor, [own for own in pairs if own], {})
    num_groups, num_pairs = sum(map(len, updates)), sum(map(len, pairs)) // 2
    follow_policy(config, actor, number, metrics, num_pairs)
    return metrics | {"preference/tied_share": Metric(1 - num_pairs / num_groups)}


def score_and_train(
    config: Config,
    group: TrainerGroup,
    role: Role,
    updates: Sequence[Sequence[ScoredSample]],
    scores: Mapping[str, Scores],
) -> tuple[Metrics, Scores, Totals]:
    """Returns, beside the metrics, where the token scores from before its updates are, and what they amount to."""
    rank_batches = [dispatch(config, update, group.packing, role, scores) for update in updates]
    own, totals = group.score_tokens(rank_batches)
    metrics = merge_updates([group.update(rank_batch) for rank_batch in rank_batches])
    group.end_step()
    return metrics, own, totals


def train_actor(
    config: Config, actor: TrainerGroup, updates: Sequence[Sequence[ScoredSample]], scores: Mapping[str, Scores]
) -> Metrics:
    """The passes that the algorithm needs, unless rewards have needed them before, then the updates."""
    rank_batches = [dispatch(config, update, actor.packing, "actor", scores) for update in updates]
    if not config.kl_in_reward:
        make_policy_passes(config, actor, rank_batches)
    metrics = merge_updates([actor.update(rank_batch) for rank_batch in rank_batches])
    actor.end_step()
    return metrics


def make_policy_passes(config: Config, actor: TrainerGroup, rank_batches: Sequence[Sequence[RankBatch]]) -> None:
    """Log-probs of the policy before its updates, and of its reference, which stay with its ranks."""
    if passes.needed(config, "old log-probs"):
        for rank_batch in rank_batches:
            actor.keep_log_probs("old", rank_batch)
    if passes.needed(config, "reference log-probs"):
        for rank_batch in rank_batches:
            actor.keep_log_probs("reference", rank_batch)


def follow_policy(config: Config, actor: TrainerGroup, number: int, metrics: Metrics, num_samples: int) -> None:
    """The KL's coefficient and its reference go after the policy, where they are to do so."""
    kl = config.algorithm.kl
    name = metric_name(config.algorithm)
    if kl.adaptive_target is not None and name in metrics:  # it is not if no token was trained
        actor.adapt_kl(metrics[name].value, num_samples)
    if kl.renews_after(number):
        actor.renew_reference()
