"""Training on offline data, without rollouts: supervised fine-tuning, reward models and DPO."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from megarl import report
from megarl.cluster.groups.teachers import PlacedTeacher, scores_in_turn
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.image_files import put_images
from megarl.cluster.pending import join
from megarl.cluster.rank_batch import put_samples
from megarl.cluster.session import Session
from megarl.cluster.trained_models import TrainedModels
from megarl.cluster.workers import close_teachers, teacher_groups, with_teacher_folders
from megarl.config.schema import Config
from megarl.core.metrics import values
from megarl.core.sample import SampleRef
from megarl.core.timing import ElapsedTime
from megarl.data.offline import OfflineData
from megarl.models.folder import model_paths
from megarl.models.run_models import ModelFolders
from megarl.models.trained_model import trained_hf_config
from megarl.report import early_end
from megarl.resharding.families import huggingface_holder
from megarl.resharding.planning.planner import make_plan
from megarl.run.beginning import resolve
from megarl.run.context import RunContext, exit_status
from megarl.run.preflight import preflight
from megarl.step.dispatch import dispatch, samples_of, updates_of
from megarl.step.passes import make_policy_passes, teacher_scores
from megarl.step.profile import profiled
from megarl.step.record import offline_record
from megarl.step.scoring import Metrics
from megarl.train import follow_policy


def main(config: Config, scratch: Path) -> int:
    return exit_status(run, config, scratch)


def run(config: Config, scratch: Path) -> None:
    config_paths, config = model_paths(config), resolve(config)
    checked = preflight(config)
    with RunContext.prepare(config, checked.models, checked.data, config_paths) as context, early_end(context.folder):
        elapsed = ElapsedTime()
        folders, sizes = context.folder, checked.models.teacher_hidden_sizes(config)
        encoded = checked.image_bytes(config)
        with Session(config, folders.logs, scratch, folders.nodes, hidden_sizes=sizes, encoded=encoded) as session:
            elapsed.print("Ray: started")
            context.times.end_start("ray")
            learn(session, config, checked.models, context)
        print(f"report: {report.write(context.folder.path)}")


def learn(session: Session, config: Config, models: ModelFolders, context: RunContext) -> None:
    """Start the trainer and the teachers, run all steps and export the trained model."""
    config_of_actor, placement = with_teacher_folders(config, models), context.placement
    actor = TrainerGroup(session, config_of_actor, "actor", models.actor, placement.trainers)
    teachers = teacher_groups(session, config, models, placement)
    checkpoint = context.resume_point.checkpoint
    elapsed = ElapsedTime()
    for group in (*teachers, actor):
        group.start().result()
        elapsed.print(f"{group.role}: started")
    if checkpoint is not None:
        actor.load_checkpoint(checkpoint).result()
    context.times.end_start("workers")
    print(f"kernels: {actor.kernels}", flush=True)
    trained = TrainedModels.of(session, config, {"actor": actor}, {"actor": ()}, checkpoint)
    context.run(trained, lambda: step(config, trained, teachers, context))
    context.export(lambda out: export(config, trained, models, out))
    join([actor.close(), close_teachers(teachers)]).result()


def export(config: Config, trained: TrainedModels, models: ModelFolders, out: Path) -> None:
    actor, hf_config = trained.groups["actor"], trained_hf_config(config, "actor", models.hf_config)
    plan = make_plan(actor.holders, [huggingface_holder(hf_config, config.model.dtype)])
    for attempt in trained.attempts():
        with attempt:
            actor.export(plan, out)


def step(
    config: Config, trained: TrainedModels, teachers: Sequence[PlacedTeacher], context: RunContext
) -> dict[str, float]:
    """Train on the next prompts_per_step rows and return the step's metrics."""
    watch = context.stopwatch()
    items, data = context.take(config.batch.prompts_per_step), context.data
    assert isinstance(data, OfflineData), "expected responses, but the data contains prompts"
    rows = [data[item.row] for item in items]
    refs = iter(put_samples(put_images([sample for row in rows for sample in row], data.images)))
    groups = [list(islice(refs, len(row))) for row in rows]
    number = context.state.step
    metrics: Metrics = {}
    train_step = partial(train, config, trained.groups["actor"], teachers, groups, number)
    for attempt in trained.attempts():
        with attempt:
            with watch.phase("train"), profiled(config, trained, number, context.folder.profile(number)):
                metrics = train_step()
            with watch.phase("copy"):
                trained.copy_state(number, train_step)
    trained.replace_leaving_node()
    for attempt in trained.attempts():
        with attempt:
            trained.poll_copies()
    context.ledger.step(number, offline_record(items, groups))
    times, samples = watch.metrics(), [sample for group in groups for sample in group]
    num_tokens = sum(sample.num_tokens for sample in samples)
    return {
        **values(metrics | trained.take_metrics()),
        **times,
        "data/tokens": num_tokens,
        "data/trained_tokens": sum(sample.num_trained_tokens for sample in samples),
        "throughput/tokens_per_second": num_tokens / times["time/step"],
    }


def train(
    config: Config,
    actor: TrainerGroup,
    teachers: Sequence[PlacedTeacher],
    groups: Sequence[Sequence[SampleRef]],
    number: int,
) -> Metrics:
    """Run the teachers and the required forward-only passes, then one optimizer step per prompts_per_update rows."""
    updates = [samples_of(update) for update in updates_of(config, groups)]
    scores, metrics = {}, {}
    if teachers:
        samples = [item for update in updates for item in update]
        scores, metrics = teacher_scores(config, actor, number, lambda: scores_in_turn(teachers, samples))
    batches = [dispatch(config, samples, actor.packing, scores=scores) for samples in updates]
    make_policy_passes(config, actor, batches).result()
    metrics |= actor.train([batches]).result()
    actor.end_step().result()
    follow_policy(config, actor, number, metrics, len(groups))
    return metrics
