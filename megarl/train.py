"""The RL training loop: `run` starts all processes, and `step` is one training step, readable from top to bottom."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from megarl import report
from megarl.algorithms.baselines import MovingAverage
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.pending import join
from megarl.cluster.session import Session
from megarl.cluster.workers import Workers, launch_workers
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.metrics import Metric, merge, values
from megarl.core.timing import ElapsedTime
from megarl.data.prompts import PromptSet
from megarl.models.folder import model_paths
from megarl.report import early_end
from megarl.run.beginning import resolve
from megarl.run.context import RunContext, exit_status
from megarl.run.folder import RunFolder
from megarl.run.preflight import preflight
from megarl.step.evaluation import evaluate
from megarl.step.finished import FinishedRollouts
from megarl.step.logprob_check import LogprobCheck
from megarl.step.metrics import add_effective_sample_size, add_explained_variance, step_metrics, update_rate
from megarl.step.profile import profiled
from megarl.step.queue import RolloutQueue
from megarl.step.rollouts import Advantages, Rollouts, collect_rollouts, take_advantages
from megarl.step.scoring import Metrics
from megarl.step.updates import prepare_updates


def main(config: Config, scratch: Path) -> int:
    return exit_status(run, config, scratch)


def run(config: Config, scratch: Path) -> None:
    config_paths, config = model_paths(config), resolve(config)
    checked = preflight(config)
    with (
        RunContext.prepare(config, checked.models, checked.data, config_paths, checked.evaluation) as context,
        early_end(context.folder),
    ):
        elapsed = ElapsedTime()
        folders, models = context.folder, checked.models
        sizes, encoded = (models.experts, models.teacher_hidden_sizes(config)), checked.image_bytes(config)
        with Session(config, folders.logs, scratch, folders.nodes, *sizes, encoded=encoded) as session:
            elapsed.print("Ray: started")
            context.times.end_start("ray")
            workers = launch_workers(
                session, config, checked.models, context.placement, context.resume_point.checkpoint
            )
            context.times.end_start("workers")
            learn(config, workers, context)
        print(f"report: {report.write(context.folder.path)}")


def learn(config: Config, workers: Workers, context: RunContext) -> None:
    """Run all steps and write the trained model. The first refit replaces the engines' initial weights."""
    print(f"kernels: {workers.actor.kernels}", flush=True)
    elapsed = ElapsedTime()
    data = context.data
    assert isinstance(data, PromptSet), "expected prompts, but the data contains responses"
    for teacher in workers.teachers:
        teacher.prompts = teacher.prompts.among(data, config)
    logprob_check = LogprobCheck(config, workers, data)
    for attempt in workers.trained.attempts():
        with attempt:
            workers.trained.stage_actor_for_sync()
            workers.refit.run(version=context.state.step)
            elapsed.print(f"refit: first refit by {workers.refit.transport}")
            logprob_check.begin()
    context.ledger.refit(context.state.step, workers.refit.weights)
    finished = finished_rollouts(config, workers, context, data)
    queue = RolloutQueue(config, workers, data, context.state, finished)
    if context.resume_point.checkpoint is not None:
        queue.restore(context.resume_point.checkpoint)
    context.run(
        workers.trained,
        lambda: step(config, workers, context, queue, logprob_check),
        lambda: evaluate_due(config, workers, context),
        queue.save,
    )
    context.export(workers.export)
    workers.close()


def finished_rollouts(config: Config, workers: Workers, context: RunContext, data: PromptSet) -> FinishedRollouts:
    """Restore the rollouts that earlier attempts finished after the checkpoint, and start recording new ones."""
    folder, origin = context.folder, {"data": data.data_hash, "code": context.folder.code_hashes}
    finished = FinishedRollouts(config, workers.rewards, folder.finished, origin, reproduces=not device.on_cuda())
    moved = folder.moved if config.resume == "auto" else None
    finished.restore(context.state.step, None if moved is None else RunFolder(moved).finished)
    finished.note_weights(context.state.step, workers.refit.weights)
    return finished


def step(
    config: Config, workers: Workers, context: RunContext, queue: RolloutQueue, logprob_check: LogprobCheck
) -> dict[str, float]:
    """Collect rollouts, train on them, and sync the weights, so that the engines' weight version equals the step
    number. Return the step's metrics. Meanwhile, the queue's rollouts for later steps continue, except on engines that
    share devices with the trained models."""
    workers.take_idle_shares()  # discard the idle time before this step
    watch, number, trained = context.stopwatch(), context.state.step, workers.trained
    file = context.folder.rollouts(number)
    rollouts = collect_rollouts(config, workers, number, queue, file, watch, context.saver.commit)
    curriculum = context.note_solved(rollouts.solve_rates)
    metrics: Metrics = {}
    advantages: Advantages = {}, {}
    before = context.state.average
    for attempt in trained.attempts():  # if a rank is lost, train again from the state before this step
        average = replace(before)
        with attempt:
            with watch.phase("train"), profiled(config, trained, number, context.folder.profile(number)):
                metrics = train(config, workers, rollouts, number, average)
            advantages = take_advantages(workers.actor)
            with watch.phase("copy"):
                trained.copy_state(number, partial(train_again, config, workers, rollouts, number, before))
            context.state.average = average
    with watch.phase("copy"):
        trained.await_copies()
    recorded = workers.rewards.write_advantages(file, *advantages)
    trained.replace_leaving_node()
    for attempt in trained.attempts():
        with attempt, watch.phase("refit"):
            trained.stage_actor_for_sync()
            refitted = workers.refit.run(version=number, rate=update_rate(metrics))
            logprob_check.check_step(metrics | refitted)
            metrics |= refitted | logprob_check.after_refit(number)
            trained.poll_copies()
    recorded.result()
    context.ledger.step(number, rollouts.record, workers.refit.weights)
    queue.finished.note_weights(number, workers.refit.weights)
    metrics |= workers.take_idle_shares() | workers.alive_reward_models() | trained.take_metrics()
    return values(rollouts.metrics | metrics) | curriculum | step_metrics(config, rollouts.sampled, watch, number)


def evaluate_due(config: Config, workers: Workers, context: RunContext) -> dict[str, float]:
    """Evaluate the sets that are due after the current step (or before the first step) and return their metrics. Call
    it between the refit with the step's weights and the next rollouts."""
    files, record = context.folder.evaluation, context.ledger.evaluation
    return evaluate(config, workers, context.state.step, context.evaluation, files, record)


def train(config: Config, workers: Workers, rollouts: Rollouts, number: int, average: MovingAverage) -> Metrics:
    """Run one optimizer step per prompts_per_update groups on every trained model, in each epoch. Return the metrics.

    With batch.epochs_kl_limit, all models finish an epoch before any of them starts the next one. Training stops after
    an epoch if the actor's divergence from the old policy exceeds the limit.

    Args:
        average: moving average of earlier steps' rewards, updated with this step's rewards.
    """
    updates = prepare_updates(config, workers, rollouts, number, average)
    limit, num_epochs, num_done = config.batch.epochs_kl_limit, config.batch.epochs, 0
    parts: list[Metrics] = []
    while num_done < num_epochs:
        begin, num_done = num_done, num_epochs if limit is None else num_done + 1
        tasks = {}
        for role, epochs in updates.batches.items():
            group = workers.trained.groups[role]
            tasks[role] = partial(group.train, epochs[begin:num_done], begins_step=begin == 0)
        results = workers.trained.run(tasks)
        parts.append({name: metric for metrics in results.values() for name, metric in metrics.items()})
        divergence = parts[-1].get("policy/kl_old")  # absent if no token was trained
        if limit is not None and divergence is not None and divergence.value > limit:
            break
    join([group.end_step() for group in workers.trained.groups.values()]).result()
    metrics = updates.metrics | add_explained_variance(add_effective_sample_size(merge(parts)))
    if num_epochs > 1:
        metrics["update/epochs"] = Metric(num_done)
    if config.trains_actor_in(number):
        follow_policy(config, workers.actor, number, metrics, updates.num_samples)
    return metrics


def train_again(config: Config, workers: Workers, rollouts: Rollouts, number: int, average: MovingAverage) -> None:
    """Repeat the training of an earlier step, because its result was lost with a rank. See `train`.

    Args:
        average: moving average before the step; not updated.
    """
    train(config, workers, rollouts, number, replace(average))
    take_advantages(workers.actor)  # discard them; the step has already recorded them


def follow_policy(config: Config, actor: TrainerGroup, number: int, metrics: Metrics, num_samples: int) -> None:
    """After a step, adapt the KL coefficient and the objective's penalty, and update the reference model, if the config
    enables them."""
    kl = config.algorithm.kl
    name = config.algorithm.kl_metric
    if kl.adaptive_target is not None and name in metrics:  # absent if no token was trained
        actor.adapt_kl(metrics[name].value, num_samples).result()
    if config.algorithm.objective.adapted_penalty_target is not None and "policy/kl_old" in metrics:
        actor.adapt_penalty(metrics["policy/kl_old"].value).result()
    if kl.renews_after(number):
        actor.renew_reference().result()
