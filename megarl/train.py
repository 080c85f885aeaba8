"""The RL run: `run` starts all processes, `step` is one step of learning, read from top to bottom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from megarl import report
from megarl.algorithms.baselines import MovingAverage
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.pending import join
from megarl.cluster.rank_batch import Updates, with_scores
from megarl.cluster.session import Session
from megarl.cluster.trained_models import TrainedModels
from megarl.cluster.workers import Workers, launch_workers
from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.core.metrics import Metric, merge, values
from megarl.core.timing import ElapsedTime
from megarl.models.folder import model_paths
from megarl.report.early_end import early_end
from megarl.run.beginning import find_model_paths
from megarl.run.context import RunContext, exit_status
from megarl.run.preflight import preflight
from megarl.step.baselines import attach_baselines, update_reward_average
from megarl.step.dispatch import Group, dispatch, epochs_of
from megarl.step.evaluation import evaluate
from megarl.step.logprob_check import LogprobCheck
from megarl.step.metrics import step_metrics, update_rate, with_effective_share, with_explained_variance
from megarl.step.pairs import best_and_worst
from megarl.step.passes import make_policy_passes, policies
from megarl.step.profile import profiled
from megarl.step.queue import RolloutQueue
from megarl.step.rollouts import Rollouts, collect_rollouts, record_advantages
from megarl.step.scoring import Metrics, ScoredSample
from megarl.step.token_rewards import TokenRewards, reward_tokens


def main(config: Config, scratch: Path) -> int:
    return exit_status(run, config, scratch)


def run(config: Config, scratch: Path) -> None:
    given, config = model_paths(config), find_model_paths(config)
    found = preflight(config)
    with RunContext.prepare(config, found.models, found.data, given, found.evaluation) as loop, early_end(loop.folder):
        elapsed = ElapsedTime()
        with Session(config, loop.folder.logs, scratch, loop.folder.nodes, found.models.experts) as session:
            elapsed.print("Ray: started")
            workers = launch_workers(session, config, found.models, loop.placement, loop.resume_point.checkpoint)
            learn(config, workers, loop)
        print(f"report: {report.write(loop.folder.path)}")


def learn(config: Config, workers: Workers, loop: RunContext) -> None:
    """Runs all steps, from the first refit of the engines, which may hold any weights, to the trained model."""
    print(f"kernels: {workers.actor.kernels}", flush=True)
    elapsed = ElapsedTime()
    workers.trained.stage_actor_for_sync()
    workers.refit.run(version=loop.state.step)
    elapsed.print(f"refit: by {workers.refit.transport}, the first")
    logprob_check = LogprobCheck(config, workers, loop.data)
    logprob_check.begin()
    queue = RolloutQueue(config, workers, loop.data, loop.state)
    if loop.resume_point.checkpoint is not None:
        queue.restore(loop.resume_point.checkpoint)
    loop.run(
        workers.trained,
        lambda: step(config, workers, loop, queue, logprob_check),
        lambda: evaluate_due(config, workers, loop),
        queue.save,
    )
    loop.export(workers.export)
    workers.close()


def step(
    config: Config, workers: Workers, loop: RunContext, queue: RolloutQueue, logprob_check: LogprobCheck
) -> dict[str, float]:
    """Does one step: collects rollouts, trains, syncs weights. Returns its metrics; the engines' weight version is then
    its number. Rollouts that the queue has begun for later steps go on meanwhile, but stand still while models train
    that share devices with the engines."""
    workers.take_idle_shares()  # of what was between the last step and this one
    watch, number = loop.stopwatch(), loop.state.step
    file = loop.folder.rollouts(number)
    rollouts = collect_rollouts(config, workers, number, queue, file, watch, loop.saver.commit)
    curriculum = loop.note_solved(rollouts.solve_rates)
    with watch.phase("train"), profiled(config, workers.trained, number, loop.folder.profile(number)):
        metrics = train(config, workers, rollouts, number, loop.state.average)
    recorded = record_advantages(workers, file)
    with watch.phase("refit"):
        workers.trained.stage_actor_for_sync()
        metrics |= workers.refit.run(version=number, rate=update_rate(metrics))
        logprob_check.check_step(metrics)
        metrics |= logprob_check.after_refit(number)
    recorded.result()
    metrics |= workers.take_idle_shares()
    return values(rollouts.metrics | metrics) | curriculum | step_metrics(config, rollouts.sampled, watch, number)


def evaluate_due(config: Config, workers: Workers, loop: RunContext) -> dict[str, float]:
    """Evaluates what is due after a step, or before the first: between the refit, which gave the engines that step's
    weights, and the next rollouts. Returns its metrics."""
    return evaluate(config, workers, loop.state.step, loop.evaluation, loop.folder.evaluation)


def train(config: Config, workers: Workers, rollouts: Rollouts, number: int, average: MovingAverage) -> Metrics:
    """Updates every trained model once for every prompts_per_update groups, models that reward tokens for others first;
    actor and critic in each epoch.

    average: the mean reward of earlier steps, which takes up this step's."""
    epochs = epochs_of(config, rollouts.chosen, number)
    if config.algorithm.objective.spec.is_pairwise:
        return train_on_pairs(config, workers, epochs, number)
    rewards = reward_tokens(config, workers, epochs[0], rollouts.process_rewards)
    totals = rewards.token_reward_totals, rewards.kl_reward_totals
    samples = [[attach_baselines(config, update, *totals, average) for update in updates] for updates in epochs]
    metrics = rewards.metrics | update_reward_average(config, rollouts.chosen, *totals, average)
    batches = prepare_updates(config, workers, samples, rewards, number)
    metrics |= with_explained_variance(update_models(config, workers.trained, batches))
    if config.trains_actor_in(number):
        follow_policy(config, workers.actor, number, metrics, sum(map(len, rollouts.chosen)))
    return metrics


def train_on_pairs(
    config: Config, workers: Workers, epochs: Sequence[Sequence[Sequence[Group]]], number: int
) -> Metrics:
    """Trains on the best and the worst sample of each group; an update in which all are equal is left out.

    epochs: the groups of each update of each epoch
    """
    pairs = [[samples for update in updates if (samples := best_and_worst(update))] for updates in epochs]
    batches = prepare_updates(config, workers, pairs, TokenRewards({}), number)
    metrics = update_models(config, workers.trained, batches)
    num_groups, num_pairs = sum(map(len, epochs[0])), sum(map(len, pairs[0])) // 2
    follow_policy(config, workers.actor, number, metrics, num_pairs)
    return metrics | {"preference/tied_frac": Metric(1 - num_pairs / num_groups)}


def prepare_updates(
    config: Config,
    workers: Workers,
    epochs: Sequence[Sequence[Sequence[ScoredSample]]],
    rewards: TokenRewards,
    number: int,
) -> dict[Role, list[Updates]]:
    """Makes the passes that updates need, of the samples of the first epoch: the critic's values and the policy's
    log-probs. Returns the batches of each epoch for the models that this step trains: the critic alone in its first
    critic.warmup_steps.

    epochs: the samples of each update of each epoch
    """
    actor, critic, trains_actor = workers.actor, workers.critic, config.trains_actor_in(number)

    def dispatched(group: TrainerGroup, role: Role) -> list[Updates]:
        scores = rewards.scores
        return [[dispatch(config, samples, group.packing, role, scores) for samples in updates] for updates in epochs]

    batches: dict[Role, list[Updates]] = {} if critic is None else {"critic": dispatched(critic, "critic")}
    batches |= {"actor": dispatched(actor, "actor")} if trains_actor else {}
    passes = {}
    if trains_actor and policies(config) and not config.kl_in_reward:  # whose passes have been made
        passes["actor"] = lambda: make_policy_passes(config, actor, batches["actor"][0])
    if critic is not None:
        passes["critic"] = lambda: critic.score_tokens(batches["critic"][0])
    made = workers.trained.run(passes, parts=("parameters",))
    kept = {"actor": rewards.log_probs | made.get("actor", {})}
    if critic is not None:
        kept["critic"] = {"values": made["critic"][0]}
        if trains_actor:
            batches["actor"] = [with_scores(updates, kept["critic"]) for updates in batches["actor"]]
    for role, (first, *others) in batches.items():
        if config.moves_samples(config.placed(role)):
            batches[role] = [first, *(with_scores(updates, kept[role]) for updates in others)]
    return batches


def update_models(config: Config, trained: TrainedModels, batches: Mapping[Role, Sequence[Updates]]) -> Metrics:
    """Trains these models on the batches of one epoch after the other, and ends the step. With batch.epochs_kl_limit,
    all of them end an epoch before any begins the next, and none does once the actor's divergence from the old policy
    was above the limit. Returns the metrics over all epochs.

    batches: of each epoch
    """
    limit, epochs = config.batch.epochs_kl_limit, range(config.batch.epochs)
    parts: list[Metrics] = []
    for part in [epochs] if limit is None else [epochs[i : i + 1] for i in epochs]:
        tasks = {
            role: partial(trained.groups[role].train, own[part.start : part.stop], begins_step=part.start == 0)
            for role, own in batches.items()
        }
        parts.append({name: metric for found in trained.run(tasks).values() for name, metric in found.items()})
        divergence = parts[-1].get("policy/kl_old")  # there is none where no token was trained
        if limit is not None and divergence is not None and divergence.value > limit:
            break
    join([group.end_step() for group in trained.groups.values()]).result()
    done = {} if len(epochs) == 1 else {"update/epochs": Metric(part.stop)}
    return with_effective_share(merge(parts)) | done


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
