"""The RL run: `run` starts everybody, `step` is one step of learning, read from top to bottom."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl import report
from megarl.algorithms import passes
from megarl.algorithms.baselines import MovingAverage
from megarl.algorithms.kl import metric_name
from megarl.announcement import announce
from megarl.cluster.cast import Cast, assemble
from megarl.cluster.failure import RunFailure
from megarl.cluster.machine import check_machine
from megarl.cluster.megatron_settings import check_megatron_settings
from megarl.cluster.memory import MemorySampler
from megarl.cluster.model_folders import find_models
from megarl.cluster.placement import place
from megarl.cluster.saver import Saver, checkpoint_bytes
from megarl.cluster.session import Session
from megarl.cluster.share import Scores, Share
from megarl.cluster.trainer_group import TrainerGroup
from megarl.comparison import Totals, compared, take_up
from megarl.config.schema import Config, Role
from megarl.data.prompts import load_prompts
from megarl.handout import hand_out, samples_of, updates_of
from megarl.metrics import merge, values
from megarl.resume import RunState, start
from megarl.sampling import requests
from megarl.selection import Metrics, ScoredSample, select
from megarl.sinks import ConsoleSink, JsonlSink
from megarl.step_metrics import step_metrics
from megarl.stopwatch import Stopwatch


def main(config: Config, scratch: Path) -> int:
    """Runs the training, with temporary files in scratch. Returns the exit status: 0 only if the last step was reached
    and the model written."""
    try:
        run(config, scratch)
    except RunFailure as failure:
        print(f"megarl: error: {failure}", file=sys.stderr)
        return 1
    return 0


def run(config: Config, scratch: Path) -> None:
    check_machine(config)
    models = find_models(config)
    check_megatron_settings(config, models)
    prompts = load_prompts(config, models.actor)
    begin = start(config, prompts)
    folder, state = begin.folder, begin.state
    num_bytes = checkpoint_bytes(config, models.trained)
    saver = Saver(folder.checkpoints, config, num_bytes, prompts.data_hash)
    placement = place(config)
    announce(config, begin, models.actor, prompts, placement.describe())
    sinks = (JsonlSink(folder.metrics), ConsoleSink(config.run.steps))
    memory = MemorySampler()
    with Session(config.cluster, folder.logs, scratch) as session:
        cast = assemble(session, config, models, placement, begin.checkpoint)
        cast.refit.run(version=state.step)
        print(f"kernels: {cast.trainers.kernels}", flush=True)
        while state.step < config.run.steps:
            chosen = [prompts[i] for i in state.cursor.take(config.batch.prompts_per_step)]
            state.step += 1
            metrics = step(config, cast, state, chosen, folder.rollouts(state.step), saver)
            metrics["memory/peak_rss_gb"], metrics["memory/peak_pss_gb"] = memory.peak_gb()
            metrics |= saver.save(cast.trained, state.step, state.dump())
            for sink in sinks:
                sink.write(state.step, metrics)
            saver.commit()  # after the step's metrics: a run that goes on from here has them
        saver.finish()
        if config.run.export:
            cast.export(folder.model)
        cast.close()
    print(f"report: {report.write(folder.path)}")


def step(
    config: Config, cast: Cast, state: RunState, prompts: Sequence, rollouts: Path, saver: Saver
) -> dict[str, float]:
    """One step: sample, score, select, update, refit. Returns its metrics; its number is then the engine's version."""
    watch, number = Stopwatch(), state.step
    with watch.phase("rollout"), cast.offloaded() as offloaded:
        groups = cast.engines.generate(requests(config, number, prompts), meanwhile=saver.commit)
    with watch.phase("reward"):
        scores, process = cast.rewards.score([sample for group in groups for sample in group], number, rollouts)
    scored, metrics = select(config, groups, scores)
    with watch.phase("train"):
        metrics |= offloaded | train(config, cast, scored, number, process, state.average)
    with watch.phase("refit"):
        metrics |= cast.refit.run(version=number)
    return values(metrics) | step_metrics(config, groups, watch, number)


def train(
    config: Config,
    cast: Cast,
    groups: Sequence[Sequence[ScoredSample]],
    number: int,
    process: Scores,
    average: MovingAverage,
) -> Metrics:
    """One optimizer step of every model that is trained for every prompts_per_update groups: first of those that score
    tokens for others. process: where the rewards of single tokens are that a reward model gave, if it did. average: of
    the rewards of earlier steps; it takes up this one's."""
    updates = updates_of(config, groups)
    metrics: Metrics = {}
    scores: dict[str, Scores] = {"process_reward": process} if process else {}
    of_tokens: Totals = {}
    of_kl: Totals = {}
    if passes.needed(config, "implicit rewards"):
        plain = [samples_of(update) for update in updates]
        metrics, scores["token_reward"], of_tokens = train_scorer(
            config, cast.implicit_reward, "implicit_reward", plain, {}
        )
    if config.kl_in_reward:
        shares = [hand_out(config, samples_of(update), cast.trainers.packing) for update in updates]
        score_policy(config, cast.trainers, shares)
        scores["kl_reward"], of_kl = cast.trainers.score_tokens(shares)
    learned_from = [compared(config, update, of_tokens, of_kl, average) for update in updates]
    metrics |= take_up(config, groups, of_tokens, of_kl, average)
    if passes.needed(config, "critic values"):
        of_critic, scores["values"], _ = train_scorer(config, cast.critic, "critic", learned_from, scores)
        metrics |= of_critic
        if number <= config.critic.warmup_steps:
            if config.kl_in_reward:
                cast.trainers.end_step()  # which has scored the samples
            return metrics
    metrics |= train_actor(config, cast.trainers, learned_from, scores)
    follow_policy(config, cast.trainers, number, metrics, sum(map(len, groups)))
    return metrics


def train_scorer(
    config: Config,
    group: TrainerGroup,
    role: Role,
    updates: Sequence[Sequence[ScoredSample]],
    scores: Mapping[str, Scores],
) -> tuple[Metrics, Scores, Totals]:
    """Returns, beside the metrics, where the token scores from before its updates are, and what they amount to."""
    shares = [hand_out(config, update, group.packing, role, scores) for update in updates]
    own, totals = group.score_tokens(shares)
    metrics = merge([group.update(share) for share in shares])
    group.end_step()
    return metrics, own, totals


def train_actor(
    config: Config, actor: TrainerGroup, updates: Sequence[Sequence[ScoredSample]], scores: Mapping[str, Scores]
) -> Metrics:
    """The passes that the algorithm needs, unless rewards have needed them before, then the updates."""
    shares = [hand_out(config, update, actor.packing, "actor", scores) for update in updates]
    if not config.kl_in_reward:
        score_policy(config, actor, shares)
    metrics = merge([actor.update(share) for share in shares])
    actor.end_step()
    return metrics


def score_policy(config: Config, actor: TrainerGroup, shares: Sequence[Sequence[Share]]) -> None:
    """Log-probs of the policy before its updates, and of its reference, which stay with its ranks."""
    for scorer in ("old", "reference"):
        if passes.needed(config, f"{scorer} log-probs"):
            for share in shares:
                actor.score(scorer, share)


def follow_policy(config: Config, actor: TrainerGroup, number: int, metrics: Metrics, num_samples: int) -> None:
    """The KL's coefficient and its reference go after the policy, where they are to do so."""
    kl = config.algorithm.kl
    name = metric_name(kl)
    if kl.adaptive_target is not None and name in metrics:  # it is not if no token was trained
        actor.adapt_kl(metrics[name].value, num_samples)
    if kl.renews_after(number):
        actor.renew_reference()
