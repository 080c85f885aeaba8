"""Renders a plan as a single HTML file: GPU placement, memory in each phase, and the timeline of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

import matplotlib
from matplotlib.figure import Figure

from megarl.cluster.memory.shared_gpu import Load
from megarl.config.device_spans import ENGINE, NAMES, device_spans
from megarl.config.model_schema import Layout
from megarl.config.schema import Config
from megarl.core.files import write_new_file
from megarl.planner.hardware import GIB, Cluster
from megarl.planner.plan import Planned
from megarl.planner.plan_text import table
from megarl.planner.step_plan import StepPlan
from megarl.report.page import resource
from megarl.report.plots import PALETTE, SERIES, STYLE, as_svg, figure
from megarl.resharding.families.megatron import Coordinates

WIDTH = 10.4
"""Chart width in inches, equal to the width of charts in the report."""


def write(planned: Planned, path: Path) -> None:
    """Write the plan page to a file that does not exist yet."""
    write_new_file("--html", path, render(planned))


def render(planned: Planned) -> str:
    """Return the plan page as HTML. The page loads no external resources and runs no scripts."""
    best = planned.best
    config, times = best.config, best.times
    memory_caption = (
        "Memory of the fullest GPU in each phase, in GiB. The line marks the capacity of a GPU. Phases run one after "
        "another."
    )
    step_caption = "Predicted duration of each phase in seconds, with its largest part."
    charts = (
        figure("GPU memory per phase", memory_caption, draw_memory(best.loads, best.cluster), wide=True),
        figure("A step", step_caption, draw_timeline(best), wide=True),
    )
    summary = [
        ("A step", f"{times.seconds:.1f} s"),
        ("Fullest GPU", f"{best.fullest.total / GIB:.1f} of {best.cluster.gpu.memory_gib:g} GiB"),
        ("Model", f"{planned.num_parameters / 1e9:.3g} billion parameters"),
        *((f"{role}: pipeline bubble", f"{100 * time.bubble:.1f} %") for role, time in times.training.items()),
    ]
    spans = ", ".join(f"{name} on GPUs {span[0]}-{span[-1]}" for name, span in device_spans(config).items() if span)
    return Template(resource("plan_page.html")).substitute(
        name=escape(f"{config.run.name} on {best.cluster.num_gpus} x {best.cluster.name}"),
        subtitle=escape(f"model.path={config.model.path}: {best.workload.describe()}"),
        style=resource("page.css"),
        summary="".join(f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>" for term, text in summary),
        charts="".join(charts),
        placement=escape(f"{config.cluster.placement}: {spans}. Colors show pipeline stages."),
        gpus="".join(_node_rows(config, best.cluster)),
        words=escape(table(planned)),
    )


def draw_memory(loads: Sequence[Load], cluster: Cluster) -> str:
    """Draw one stacked memory bar for each phase."""
    with matplotlib.rc_context(STYLE):
        picture = Figure(figsize=(WIDTH, 0.9 + 0.62 * len(loads)), facecolor="none", layout="constrained")
        axes = picture.add_subplot(facecolor="none")
        names = list(dict.fromkeys(part for load in loads for part in load.parts))
        for row, load in enumerate(reversed(loads)):
            left = 0.0
            for part, size in load.parts.items():
                shade = 1 - 0.55 * (names.index(part) // len(SERIES)) / max(1, len(names) // len(SERIES))
                color = SERIES[names.index(part) % len(SERIES)]
                axes.barh(row, size / GIB, left=left, height=0.55, color=color, alpha=shade, linewidth=0)
                if size / GIB > 0.055 * cluster.gpu.memory_gib:
                    label = f"{part.removeprefix('actor: ').removeprefix('engine: ')}\n{size / GIB:.1f}"
                    axes.text(left + size / GIB / 2, row, label, ha="center", va="center", fontsize=7)
                left += size / GIB
        axes.axvline(cluster.gpu.memory_gib, color=PALETTE["--ink"], linewidth=1.2)
        axes.set_yticks(range(len(loads)), [load.phase.replace(", on", ",\non") for load in reversed(loads)])
        axes.set_xlabel("GiB")
        axes.set_xlim(0, 1.02 * max(cluster.gpu.memory_gib, *(load.total / GIB for load in loads)))
        axes.grid(visible=False, axis="y")
        return as_svg(picture, "GPU memory per phase")


def draw_timeline(plan: StepPlan) -> str:
    """Draw the phases of a step over time. Each phase has its own row and is labeled with its largest part."""
    spans, bounds, step = plan.times.spans, plan.times.bounds, plan.times.seconds
    with matplotlib.rc_context(STYLE):
        picture = Figure(figsize=(WIDTH, 0.8 + 0.42 * len(spans)), facecolor="none", layout="constrained")
        axes = picture.add_subplot(facecolor="none")
        for row, (phase, (start, end)) in enumerate(spans.items()):
            axes.barh(-row, end - start, left=start, height=0.6, color=SERIES[row % len(SERIES)], linewidth=0)
            label = f"{end - start:.1f} s" + (f": {bounds[phase]}" if phase in bounds else "")
            if end - start > 0.6 * step:
                position, side = (start + end) / 2, "center"
            elif start > step / 2:
                position, side = start - 0.005 * step, "right"
            else:
                position, side = end + 0.005 * step, "left"
            axes.text(position, -row, label, ha=side, va="center", fontsize=8)
        axes.set_yticks([-row for row in range(len(spans))], list(spans))
        axes.set_xlabel("seconds")
        axes.set_xlim(0, step)
        axes.grid(visible=False, axis="y")
        return as_svg(picture, "A step")


def _node_rows(config: Config, cluster: Cluster) -> Iterator[str]:
    """Yield one table row for each node, with one cell for each GPU on the node."""
    spans = device_spans(config)
    for first in range(0, cluster.num_gpus, cluster.gpus_per_node):
        cells = []
        for gpu in range(first, min(first + cluster.gpus_per_node, cluster.num_gpus)):
            lines, stage = _on_gpu(config, spans, gpu)
            kind = "" if stage is None else f" class=stage{stage % len(SERIES)}"
            text = "".join(f"<span>{escape(line)}</span>" for line in lines)
            cells.append(f"<td{kind}>{gpu}{text}</td>")
        yield f"<tr><th>node {first // cluster.gpus_per_node}</th>{''.join(cells)}</tr>"


def _on_gpu(config: Config, spans: dict[str, range], gpu: int) -> tuple[list[str], int | None]:
    """Return a line for each rank on a GPU, and the pipeline stage of the actor's rank (None if the GPU has no actor
    rank)."""
    lines, stage = [], None
    for placed in config.all_placed:
        name = NAMES[placed.section]
        if gpu in spans[name]:
            coordinates = Coordinates.of(placed.layout, gpu - spans[name].start)
            lines.append(f"{name}: {_describe_rank(placed.layout, coordinates, gpu - spans[name].start)}")
            stage = coordinates.stage if placed is config.actor else stage
    if ENGINE in spans and gpu in spans[ENGINE]:
        replica, rank = divmod(gpu - spans[ENGINE].start, config.rollout.tp)
        lines.append(f"engine {replica}" + (f", tp {rank}" if config.rollout.tp > 1 else ""))
    return lines, stage


def _describe_rank(layout: Layout, coordinates: Coordinates, rank: int) -> str:
    """Describe a rank by its coordinate in each kind of parallelism that the layout uses."""
    stage_rank = rank % (layout.tp * layout.cp * layout.dp)
    context, replica = stage_rank // layout.tp % layout.cp, stage_rank // (layout.tp * layout.cp)
    sizes = {
        "stage": (layout.pp, coordinates.stage),
        "dp": (layout.dp, replica),
        "cp": (layout.cp, context),
        "tp": (layout.tp, coordinates.tp_rank),
        "ep": (layout.ep, coordinates.ep_rank),
    }
    return ", ".join(f"{kind} {number}" for kind, (size, number) in sizes.items() if size > 1) or "rank 0"
