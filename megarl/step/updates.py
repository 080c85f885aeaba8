"""The updates in a step: the samples for each update, with token scores from forward-only passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.algorithms.baselines import MovingAverage
from megarl.cluster.groups.teachers import SelfTeacher, scores_in_turn
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.pending import Pending, join
from megarl.cluster.rank_batch import Scores, Updates, add_scores
from megarl.cluster.workers import Workers
from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.core.sample import SampleRef
from megarl.step.baselines import attach_baselines, step_normalization, update_reward_average
from megarl.step.dispatch import Group, dispatch, epochs_of, samples_of
from megarl.step.passes import make_policy_passes, policies, teacher_scores
from megarl.step.rollouts import Rollouts
from megarl.step.scoring import Metrics
from megarl.step.token_rewards import TokenRewards, reward_tokens


@dataclass(frozen=True, slots=True)
class StepUpdates:
    """The training batches for one step.

    Attributes:
        batches: the batches for each epoch, by role, for every model that this step trains.
        num_samples: number of samples in one epoch or, for pairwise objectives, number of pairs.
    """

    batches: dict[Role, list[Updates]]
    num_samples: int
    metrics: Metrics


def prepare_updates(
    config: Config, workers: Workers, rollouts: Rollouts, number: int, average: MovingAverage
) -> StepUpdates:
    """Compute per-token rewards and baselines, dispatch the samples to the ranks, and run the forward-only passes that
    the updates need. An implicit reward model is trained first, because it provides rewards. `average` is the moving
    average of earlier steps' rewards, updated with this step's rewards."""
    trained = [
        [replace(item, is_stale=item.version_oldest < number - 1) for item in group] for group in rollouts.chosen
    ]
    epochs = epochs_of(config, trained, number)
    if config.algorithm.objective.spec.is_pairwise:
        return _prepare_pairs(config, workers, epochs, number)
    from_teachers, teacher_metrics = _teacher_scores(config, workers, epochs[0], rollouts.feedback, number)
    rewards = reward_tokens(config, workers, epochs[0], rollouts.process_rewards)
    totals = rewards.token_reward_totals, rewards.kl_reward_totals
    over_step = step_normalization(config, rollouts.chosen, *totals)
    samples = [
        [attach_baselines(config, update, *totals, average, over_step) for update in updates] for updates in epochs
    ]
    metrics = teacher_metrics | rewards.metrics | update_reward_average(config, rollouts.chosen, *totals, average)
    batches = _dispatch_with_passes(config, workers, samples, rewards, number, from_teachers)
    return StepUpdates(batches, sum(map(len, rollouts.chosen)), metrics)


def _teacher_scores(
    config: Config,
    workers: Workers,
    updates: Sequence[Sequence[Group]],
    feedback: Mapping[str, Scores],
    number: int,
) -> tuple[dict[str, Scores], Metrics]:
    """Return the results of `teacher_scores`; both are empty in steps that do not train the actor."""
    if not workers.teachers or not config.trains_actor_in(number):
        return {}, {}
    samples = [sample for update in updates for sample in samples_of(update)]
    return teacher_scores(config, workers.actor, number, lambda: _run_teachers(workers, samples, feedback))


def _run_teachers(workers: Workers, samples: Sequence[SampleRef], feedback: Mapping[str, Scores]) -> dict[str, Scores]:
    """Run all teachers: first those with a path, then those that are the policy or the reference. `feedback`: as in
    Rollouts."""
    selves = [teacher for teacher in workers.teachers if isinstance(teacher, SelfTeacher)]
    scores = {}
    if others := [teacher for teacher in workers.teachers if not isinstance(teacher, SelfTeacher)]:
        # An attempt that lost a rank may have left the trained models' states on the devices.
        workers.trained.offload_all().result()
        scores = scores_in_turn(others, samples, feedback)
    if selves:
        passes: dict[Role, Callable[[], Pending[list[Scores]]]] = {
            "actor": lambda: join([teacher.score_tokens(samples, feedback) for teacher in selves])
        }
        results = workers.trained.run(passes, parts=("parameters",))["actor"]
        scores |= {teacher.scores: result for teacher, result in zip(selves, results, strict=True)}
    return scores


def _prepare_pairs(
    config: Config, workers: Workers, epochs: Sequence[Sequence[Sequence[Group]]], number: int
) -> StepUpdates:
    """Prepare updates on the best and the worst sample in each group. Leave out updates in which every group is tied.
    `epochs` lists, for each epoch, the groups of each update."""
    pairs = [[samples for update in updates if (samples := best_and_worst(update))] for updates in epochs]
    batches = _dispatch_with_passes(config, workers, pairs, TokenRewards({}), number)
    num_groups, num_pairs = sum(map(len, epochs[0])), sum(map(len, pairs[0])) // 2
    return StepUpdates(batches, num_pairs, {"preference/tied_frac": Metric(1 - num_pairs / num_groups)})


def best_and_worst(groups: Sequence[Sequence[SampleRef]]) -> list[SampleRef]:
    """Return the first best and the first worst sample of each group whose rewards are not all equal."""
    pairs = []
    for group in groups:
        best, worst = (choose(group, key=lambda item: item.reward) for choose in (max, min))
        pairs += [best, worst] if best.reward > worst.reward else []
    return pairs


def _dispatch_with_passes(
    config: Config,
    workers: Workers,
    epochs: Sequence[Sequence[Sequence[SampleRef]]],
    rewards: TokenRewards,
    number: int,
    teachers: dict[str, Scores] | None = None,
) -> dict[Role, list[Updates]]:
    """Dispatch the samples, and run the forward-only passes that the updates need on the first epoch's batches: the
    critic's values and the policies' log-probs. Return each epoch's batches for the models that this step trains. The
    first critic.warmup_steps steps train only the critic. `epochs` lists, for each epoch, the samples of each update.
    `teachers`: scores keyed by Teacher.scores."""
    actor, critic, trains_actor = workers.actor, workers.critic, config.trains_actor_in(number)

    def dispatched(group: TrainerGroup, role: Role) -> list[Updates]:
        scores = rewards.scores | (teachers or {} if role == "actor" else {})
        return [[dispatch(config, samples, group.packing, role, scores) for samples in updates] for updates in epochs]

    batches: dict[Role, list[Updates]] = {} if critic is None else {"critic": dispatched(critic, "critic")}
    batches |= {"actor": dispatched(actor, "actor")} if trains_actor else {}
    passes = {}
    if trains_actor and policies(config) and not config.kl_in_reward:  # with a KL reward, these passes have already run
        passes["actor"] = lambda: make_policy_passes(config, actor, batches["actor"][0])
    if critic is not None:
        passes["critic"] = lambda: critic.score_tokens(batches["critic"][0])
    results = workers.trained.run(passes, parts=("parameters",))
    scores = {"actor": rewards.log_probs | results.get("actor", {})}
    if critic is not None:
        scores["critic"] = {"values": results["critic"][0]}
        if trains_actor:
            batches["actor"] = [add_scores(updates, scores["critic"]) for updates in batches["actor"]]
    for role, (first, *others) in batches.items():
        if config.moves_samples(config.placed(role)):
            batches[role] = [first, *(add_scores(updates, scores[role]) for updates in others)]
    return batches
