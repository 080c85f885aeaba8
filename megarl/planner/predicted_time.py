"""Predicts a step's seconds by cause, for comparison with those that a run's time ledger measures."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.cluster.placement import place
from megarl.cluster.trace import DRIVER, Span
from megarl.core.files import replace_text
from megarl.planner.plan_text import on_nodes
from megarl.planner.step_plan import StepPlan
from megarl.run.time_causes import ROLLOUT, SAVE, TRAIN, Devices, Seconds, step_seconds
from megarl.run.time_ledger import PREDICTION


def predicted_causes(plan: StepPlan) -> Seconds:
    """Return the predicted seconds of a step by cause, averaged over the devices of the plan's nodes. The sum is the
    step's duration, including its share of a checkpoint save. Rewards are not predicted."""
    config, times = on_nodes(plan), plan.times
    each = min(plan.cluster.num_gpus, plan.cluster.gpus_per_node)
    placement = place(config, cores=1, on_gpus=True, gpus_per_node=each)
    ahead = config.rollout.max_staleness > 0 and not config.is_offline
    devices = Devices.of(placement, ahead and not config.is_colocated)
    training = times.training_seconds + times.moving
    rollout = 0.0 if times.rollout is None else times.rollout.seconds
    refit = 0.0 if times.refit is None else times.refit.seconds
    overlapped = times.overlapped(config.is_colocated) if ahead and not config.samples_images else None
    waiting = rollout if overlapped is None else max(0.0, overlapped - times.training_seconds - refit)
    sampling = None if times.rollout is None else min(times.rollout.full, waiting)
    if times.rollout is not None and devices.samples_while_training:
        sampling = min(rollout, waiting + training)
    spans, at = [], 0.0
    for phase, seconds in ((ROLLOUT, waiting), (TRAIN, training), ("refit", refit)):
        spans.append(Span(DRIVER, phase, at, at + seconds))
        at += seconds
    every = config.checkpoint.every_steps
    if plan.save is not None and every is not None:
        blocked = (plan.save.copying + (0.0 if config.checkpoint.background else plan.save.writing)) / every
        spans.append(Span(DRIVER, SAVE, at, at + blocked))
        at += blocked
    found = step_seconds(0.0, at, spans, devices, sampling)
    return {cause: seconds / devices.total for cause, seconds in found.items()}


def write_prediction(plan: StepPlan, run: Path) -> None:
    """Write the prediction to a run's folder, for its time ledger and its report."""
    seconds = {cause: round(value, 3) for cause, value in predicted_causes(plan).items()}
    replace_text(run / PREDICTION, json.dumps(seconds) + "\n")
