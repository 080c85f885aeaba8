"""The causes of a run's device-seconds, and the attribution of intervals to these causes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from megarl.cluster.placement import Placement
from megarl.cluster.trace import DRIVER, Span

CAUSES: Mapping[str, str] = {
    "rollout": "sampling",
    "long_rollouts": "engines waiting for the longest rollouts",
    "idle_trainers": "trainers' devices waiting for rollouts",
    "reward": "rewards after the last rollout",
    "train": "passes and updates",
    "idle_engines": "engines' devices waiting for training",
    "refit": "weight sync",
    "driver": "driver between the phases of a step",
    "evaluation": "evaluation",
    "checkpoint": "waiting for checkpoints and for copies in memory",
    "startup": "start-up",
    "finish": "export, report and shutdown",
    "detection": "failure detection",
    "restart": "restart after a failure",
    "repeated": "repeated steps",
    "queue": "waiting in Slurm's queue",
    "spare": "spare nodes and unused devices",
    "unexplained": "not recorded",
}
"""Cause -> its description. `startup` and `restart` have parts, such as startup/engines."""

KEPT = ("rollout", "long_rollouts", "idle_trainers", "reward", "train", "idle_engines", "refit", "driver")
"""Causes inside the steps whose results were kept. Goodput is their share of the allocated time."""

LOST_WITH_STEP = (*KEPT, "evaluation")
"""Causes that become `repeated` if their step is repeated."""

DETECT, RECOVER, MOVE, REPEAT = "detect", "recover", "move", "repeat"
"""Prefixes of the driver's tasks in the trace: detecting a failure, replacing lost processes, moving processes to a
spare node (after which no work is repeated), and training earlier steps again."""

SAVE, ROLLOUT, TRAIN = "save", "rollout", "train"
PHASES = {SAVE: "checkpoint", "copy": "checkpoint", "evaluation": "evaluation", "reward": "reward", "refit": "refit"}
"""Phase of the driver -> cause, for phases whose time has the same cause on all devices. Time between phases counts as
`driver`."""

WITHOUT_SAMPLING: Mapping[str, Mapping[str, str]] = {
    "shared": {ROLLOUT: "long_rollouts", TRAIN: "train"},
    "engines": {ROLLOUT: "long_rollouts", TRAIN: "idle_engines"},
    "trainers": {ROLLOUT: "idle_trainers", TRAIN: "train"},
}
"""Kind of device -> phase -> cause, for devices whose engine does not sample. See Devices for the kinds."""

START_PARTS = {"engine": "engines", "reward-model": "engines"} | dict.fromkeys(
    ("trainer", "critic", "implicit-reward", "teacher"), "models"
)
"""Role of a process -> part of the start-up in which it loads its model."""

WORKERS = "workers"
"""Part of the start-up in which processes start. Loading models is separate: see START_PARTS."""

Seconds = dict[str, float]
"""Device-seconds by cause."""


def of_cause(seconds: Mapping[str, float], cause: str) -> float:
    """Return the device-seconds of a cause, including those of its parts."""
    return sum(value for name, value in seconds.items() if name.partition("/")[0] == cause)


@dataclass(frozen=True, slots=True)
class Devices:
    """Device counts of a run: with both trained models and engines, with only one of these, and with neither. Reward
    models count as engines, and teachers as trained models.

    Attributes:
        samples_while_training: whether the engines sample for later steps outside the rollout phase.
    """

    shared: int = 0
    engines: int = 0
    trainers: int = 0
    unused: int = 0
    samples_while_training: bool = False

    @classmethod
    def of(cls, placement: Placement, samples_while_training: bool) -> Devices:
        teachers = (process for processes in placement.teachers for process in processes)
        trained = (*placement.trainers, *placement.critics, *placement.implicit_rewards, *teachers)
        training, sampling = (
            {device for process in processes for part in process.parts for device in part.devices}
            for processes in (trained, (*placement.engines, *placement.reward_models))
        )
        total = sum(len(node.devices) for node in placement.nodes)
        shared = len(training & sampling)
        return cls(
            shared,
            len(sampling) - shared,
            len(training) - shared,
            total - len(training | sampling),
            samples_while_training,
        )

    @property
    def total(self) -> int:
        return self.shared + self.engines + self.trainers + self.unused


def partition(
    begin: float, end: float, spans: Iterable[Span], order: Callable[[Span], float]
) -> Iterator[tuple[float, float, Span | None]]:
    """Cut an interval at the starts and ends of the spans. Yield each piece with the overlapping span that comes last
    in this order, or None."""
    spans = [span for span in spans if span.begin < end and span.end > begin and span.begin < span.end]
    times = (time for span in spans for time in (span.begin, span.end))
    cuts = sorted({begin, end, *(time for time in times if begin < time < end)})
    for left, right in pairwise(cuts):
        over = [span for span in spans if span.begin <= left and span.end >= right]
        yield left, right, max(over, key=order, default=None)


def step_seconds(
    begin: float, end: float, spans: Iterable[Span], devices: Devices, sampling_s: float | None = None
) -> Seconds:
    """Attribute a step's interval to causes. The sum is the interval's length times the number of devices.

    The interval consists of the driver's phases. In each phase, a device computes, or waits for the longest rollouts or
    for the devices of other roles. A phase is recorded when it is complete, so time outside phases before the end of
    the last recovery is work that is repeated.

    Args:
        spans: spans of the trace. If spans of the driver overlap, the one that began last counts.
        sampling_s: mean number of seconds for which an engine sampled in this interval. Engines sample in the rollout
            phase, and with `samples_while_training` outside it. None: engines sample throughout the rollout phase.
    """
    # A span `step N` covers the phases of the step.
    spans = [span for span in spans if span.process == DRIVER and not span.task.startswith("step ")]
    recovered = max((span.end for span in spans if span.task.startswith(RECOVER)), default=begin)
    used = devices.total - devices.unused
    lengths: defaultdict[str, float] = defaultdict(float)
    seconds = defaultdict(float, spare=(end - begin) * devices.unused)
    for left, right, span in partition(begin, end, spans, order=lambda span: span.begin):
        task = "" if span is None else span.task
        if task.startswith(DETECT):
            seconds["detection"] += (right - left) * used
        elif task.startswith((RECOVER, MOVE)):
            seconds["restart/in place"] += (right - left) * used
        elif task.startswith(REPEAT) or (right <= recovered and not task):
            seconds["repeated"] += (right - left) * used
        elif not spans:
            seconds["unexplained"] += (right - left) * used
        else:
            lengths[task] += right - left
    ahead = devices.samples_while_training and sampling_s is not None
    sampled = {ROLLOUT, "reward", TRAIN, ""} if ahead else {ROLLOUT}
    capacity = sum(lengths[task] for task in sampled)
    share = 1.0 if sampling_s is None or not capacity else min(1.0, max(0.0, sampling_s / capacity))
    for task, length in lengths.items():
        for kind, causes in WITHOUT_SAMPLING.items():
            may_sample = task == ROLLOUT if kind == "shared" else kind == "engines" and task in sampled
            samples = share if may_sample else 0.0
            time = length * getattr(devices, kind)
            seconds["rollout"] += time * samples
            seconds[causes.get(task, PHASES.get(task, "driver"))] += time * (1 - samples)
    return {cause: value for cause, value in seconds.items() if value > 0}


def start_seconds(begin: float, end: float, spans: Iterable[Span], devices: Devices, part: str) -> Seconds:
    """Attribute an interval before the first step to a part of the start-up. In the part `workers`, all devices wait
    for the model that is loaded last: of overlapping spans, the one that ends last counts."""
    used = devices.total - devices.unused
    seconds = defaultdict(float, spare=(end - begin) * devices.unused)
    loading = [span for span in spans if part == WORKERS and _role(span.process) in START_PARTS]
    for left, right, span in partition(begin, end, loading, order=lambda span: span.end):
        name = part if span is None else START_PARTS[_role(span.process)]
        seconds[f"startup/{name}"] += (right - left) * used
    return {cause: value for cause, value in seconds.items() if value > 0}


def _role(process: str) -> str:
    """Return the role in a process's name. The name of a teacher's process also contains the teacher's name:
    teacher-NAME-0."""
    return "teacher" if process.startswith("teacher-") else process.rpartition("-")[0]
