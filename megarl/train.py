"""The RL run: `run` starts all processes, `step` is one step of learning, read from top to bottom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl import report
from megarl.algorithms.baselines import MovingAverage
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.rank_batch import Scores
from megarl.cluster.session import Session
from megarl.cluster.workers import Workers, launch_workers
from megarl.config.schema import Config
from megarl.core.metrics import Metric, values
from megarl.core.timing import ElapsedTime
from megarl.data.model_folder import model_paths
from megarl.run.loop import Loop, exit_status
from megarl.run.model_paths import find_model_paths
from megarl.run.preflight import preflight
from megarl.step.agreement import warn_of_disagreement
from megarl.step.baselines import attach_baselines, update_reward_average
from megarl.step.dispatch import dispatch, updates_of
from megarl.step.evaluation import evaluate
from megarl.step.metrics import step_metrics, update_rate, with_explained_variance
from megarl.step.pairs import best_and_worst
from megarl.step.passes import make_policy_passes, policies
from megarl.step.profile import profiled
from megarl.step.queue import RolloutQueue
from megarl.step.rollouts import Rollouts, collect_rollouts, record_advantages
from megarl.step.scoring import Metrics, ScoredSample
from megarl.step.token_rewards import reward_tokens


def main(config: Config, scratch: Path) -> int:
    return exit_status(run, config, scratch)


def run(config: Config, scratch: Path) -> None:
    given, config = model_paths(config), find_model_paths(config)
    found = preflight(config)
    with Loop.prepare(config, found.models, found.data, given, found.evaluation) as loop:
        elapsed = ElapsedTime()
        with Session(config, loop.folder.logs, scratch, loop.folder.nodes, found.models.experts) as session:
            elapsed.print("Ray: started")
            workers = launch_workers(session, config, found.models, loop.placement, loop.resume_point.checkpoint)
            learn(config, workers, loop)
        print(f"report: {report.write(loop.folder.path)}")


def learn(config: Config, workers: Workers, loop: Loop) -> None:
    """Runs all steps, from the first refit of the engines, which may hold any weights, to the trained model."""
    print(f"kernels: {workers.actor.kernels}", flush=True)
    elapsed = ElapsedTime()
    workers.trained.present_actor()
    workers.refit.run(version=loop.state.step)
    elapsed.print(f"refit: by {workers.refit.transport}, the first")
    queue = RolloutQueue(config, workers, loop.data, loop.state)
    loop.run(workers.trained, lambda: step(config, workers, loop, queue), lambda: evaluate_due(config, workers, loop))
    loop.export(workers.export)
    workers.close()


def step(config: Config, workers: Workers, loop: Loop, queue: RolloutQueue) -> dict[str, float]:
    """Does one step: collects rollouts, trains, syncs weights. Returns its metrics; the engines' weight version is then
    its number. Rollouts that the queue has begun for later steps go on meanwhile."""
    workers.take_idle_shares()  # of what was between the last step and this one
    watch, number = loop.stopwatch(), loop.state.step
    file = loop.folder.rollouts(number)
    rollouts = collect_rollouts(config, workers, number, queue, file, watch, loop.saver.commit)
    curriculum = loop.note_solved(rollouts.solve_rates)
    with watch.phase("train"), profiled(config, workers.trained, number, loop.folder.profile(number)):
        metrics = train(config, workers, rollouts, number, loop.state.average)
    warn_of_disagreement(config, metrics, loop.folder.logs)
    recorded = record_advantages(workers, file)
    with watch.phase("refit"):
        workers.trained.present_actor()
        metrics |= workers.refit.run(version=number, rate=update_rate(metrics))
    recorded.result()
    metrics |= workers.take_idle_shares()
    return values(rollouts.metrics | metrics) | curriculum | step_metrics(config, rollouts.sampled, watch, number)


def evaluate_due(config: Config, workers: Workers, loop: Loop) -> dict[str, float]:
    """Evaluates what is due after a step, or before the first: between the refit, which gave the engines that step's
    weights, and the next rollouts. Returns its metrics."""
    return evaluate(config, workers, loop.state.step, loop.evaluation, loop.folder.evaluation)


def train(config: Config, workers: Workers, rollouts: Rollouts, number: int, average: MovingAverage) -> Metrics:
    """Updates every trained model once for every prompts_per_update groups, models that reward tokens for others first.

    average: the mean reward of earlier steps, which takes up this step's."""
    updates = updates_of(config, rollouts.chosen)
    if config.algorithm.objective.spec.is_pairwise:
        return train_on_pairs(config, workers, updates, number)
    rewards = reward_tokens(config, workers, updates, rollouts.process_rewards)
    totals = rewards.token_reward_totals, rewards.kl_reward_totals
    samples = [attach_baselines(config, update, *totals, average) for update in updates]
    metrics = rewards.metrics | update_reward_average(config, rollouts.chosen, *totals, average)
    metrics |= with_explained_variance(update_models(config, workers, samples, rewards.scores, number))
    if config.trains_actor_in(number):
        follow_policy(config, workers.actor, number, metrics, sum(map(len, rollouts.chosen)))
    return metrics


def train_on_pairs(
    config: Config, workers: Workers, updates: Sequence[Sequence[Sequence[ScoredSample]]], number: int
) -> Metrics:
    """Trains on the best and the worst sample of each group; an update in which all are equal is left out."""
    pairs = [best_and_worst(update) for update in updates]
    metrics = update_models(config, workers, [samples for samples in pairs if samples], {}, number)
    num_groups, num_pairs = sum(map(len, updates)), sum(map(len, pairs)) // 2
    follow_policy(config, workers.actor, number, metrics, num_pairs)
    return metrics | {"preference/tied_share": Metric(1 - num_pairs / num_groups)}


def update_models(
    config: Config,
    workers: Workers,
    updates: Sequence[Sequence[ScoredSample]],
    scores: Mapping[str, Scores],
    number: int,
) -> Metrics:
    """Trains critic and actor: first the passes that they need, the critic's values and the policy's log-probs, then
    their updates. The critic alone is trained in its first critic.warmup_steps steps.

    scores   other models' rewards of tokens, by their name in TokenBatch
    """
    actor, critic = workers.actor, workers.critic
    batches = {"actor": [dispatch(config, samples, actor.packing, "actor", scores) for samples in updates]}
    passes, training = {}, {}
    if config.trains_actor_in(number) and policies(config) and not config.kl_in_reward:  # whose passes have been made
        passes["actor"] = lambda: make_policy_passes(config, actor, batches["actor"])
    if critic is not None:
        batches["critic"] = [dispatch(config, samples, critic.packing, "critic", scores) for samples in updates]
        passes["critic"] = lambda: critic.score_tokens(batches["critic"])
        training["critic"] = lambda: critic.train(batches["critic"])
    if config.trains_actor_in(number):
        training["actor"] = lambda: actor.train(batches["actor"])
    elif config.kl_in_reward:
        training["actor"] = lambda: actor.end_step().then(lambda _: {})
    made = workers.trained.run(passes, parts=("parameters",))
    if critic is not None:
        critic_values, _ = made["critic"]
        batches["actor"] = [[batch.with_scores("values", critic_values) for batch in b] for b in batches["actor"]]
    trained = workers.trained.run(training)
    return {name: metric for metrics in trained.values() for name, metric in metrics.items()}


def follow_policy(config: Config, actor: TrainerGroup, number: int, metrics: Metrics, num_samples: int) -> None:
    """Adapts the KL coefficient and the objective's penalty, and renews the reference after a step, where the config
    asks for it."""
    kl = config.algorithm.kl
    name = config.algorithm.kl_metric
    if kl.adaptive_target is not None and name in metrics:  # it is not if no token was trained
        actor.adapt_kl(metrics[name].value, num_samples).result()
    if config.algorithm.objective.adapted_penalty_target is not None and "policy/kl_old" in metrics:
        actor.adapt_penalty(metrics["policy/kl_old"].value).result()
    if kl.renews_after(number):
        actor.renew_reference().result()
