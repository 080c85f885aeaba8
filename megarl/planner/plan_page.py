"""Renders a plan as a single HTML file: GPU placement, memory in each phase, and the timeline of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

from megarl.cluster.memory.shared_gpu import Load
from megarl.config.device_spans import ENGINE, NAMES, device_spans
from megarl.config.model_schema import Layout
from megarl.config.schema import Config
from megarl.core.files import write_new_file
from megarl.planner.hardware import GIB, Cluster
from megarl.planner.plan import Planned
from megarl.planner.plan_text import table
from megarl.planner.step_plan import StepPlan
from megarl.report.charts import NUM_COLORS, resource
from megarl.resharding.families.megatron import Coordinates

WIDTH, LABELS = 1050, 250
"""Widths of a chart and of the labels on its left, in pixels."""

CHARACTER = 6.6
"""Width of one label character, in pixels."""

MEMORY_ROW, TIME_ROW = 48, 30
"""Heights of a memory bar and of a time bar, each with its margin, in pixels."""

GPU_WIDTH = 110
"""Minimum width of a GPU's table cell, in pixels. Eight GPUs and the node's name then fit on the page."""


def write(planned: Planned, path: Path) -> None:
    """Write the plan page to a new file. Raise a UserError if the file already exists or cannot be written."""
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
        _figure("GPU memory per phase", memory_caption, draw_memory(best.loads, best.cluster)),
        _figure("Step timeline", step_caption, draw_timeline(best)),
    )
    summary = [
        ("Step time", f"{times.seconds:.1f} s"),
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
        gpus_width=str(GPU_WIDTH * (best.cluster.gpus_per_node + 1)),
        words=escape(table(planned)),
    )


def draw_memory(loads: Sequence[Load], cluster: Cluster) -> str:
    """Draw one stacked memory bar for each phase."""
    names = list(dict.fromkeys(part for load in loads for part in load.parts))
    most = 1.02 * max(cluster.gpu.memory_gib, *(load.total / GIB for load in loads))
    shapes: list[str] = []
    for row, load in enumerate(loads):
        left, y = 0.0, row * MEMORY_ROW
        first, separator, rest = load.phase.partition(", on")
        shapes.append(_text(LABELS - 8, y + 20, first, "end"))
        shapes.append(_text(LABELS - 8, y + 36, (separator + rest).removeprefix(", "), "end", "--muted"))
        for part, size in load.parts.items():
            shade = 1 - 0.55 * (names.index(part) // NUM_COLORS) / max(1, len(names) // NUM_COLORS)
            x, width = _x(left, most), _x(size / GIB, most) - LABELS
            title = f"{part}: {size / GIB:.1f} GiB"
            shapes.append(_bar(x, y + 2, width, MEMORY_ROW - 8, names.index(part), title, shade))
            if size / GIB > 0.055 * cluster.gpu.memory_gib:
                label = part.removeprefix("actor: ").removeprefix("engine: ")
                if CHARACTER * len(label) < width:
                    shapes.append(_text(x + width / 2, y + 20, label, "middle"))
                shapes.append(_text(x + width / 2, y + 34, f"{size / GIB:.1f}", "middle"))
            left += size / GIB
    height = len(loads) * MEMORY_ROW
    limit = _x(cluster.gpu.memory_gib, most)
    shapes.append(f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="{height}" stroke="var(--ink)"/>')
    return _svg("GPU memory per phase", height, [*shapes, *_scale(most, height, "GiB")])


def draw_timeline(plan: StepPlan) -> str:
    """Draw the phases of a step over time. Each phase has its own row and is labeled with its largest part."""
    spans, bounds, step = plan.times.spans, plan.times.bounds, plan.times.seconds
    shapes: list[str] = []
    for row, (phase, (start, end)) in enumerate(spans.items()):
        y, left, right = row * TIME_ROW, _x(start, step), _x(end, step)
        label = f"{end - start:.1f} s" + (f": {bounds[phase]}" if phase in bounds else "")
        shapes += [_text(LABELS - 8, y + 19, phase, "end"), _bar(left, y + 3, right - left, TIME_ROW - 8, row, label)]
        if end - start > 0.6 * step:
            shapes.append(_text((left + right) / 2, y + 19, label, "middle"))
        elif start > step / 2:
            shapes.append(_text(left - 6, y + 19, label, "end"))
        else:
            shapes.append(_text(right + 6, y + 19, label, "start"))
    height = len(spans) * TIME_ROW
    return _svg("Step timeline", height, [*shapes, *_scale(step, height, "seconds")])


def _x(value: float, most: float) -> float:
    return LABELS + (WIDTH - LABELS - 10) * value / most


def _bar(x: float, y: float, width: float, height: float, color: int, title: str, opacity: float = 1.0) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height}" fill-opacity="{opacity:.2f}" '
        f'fill="var(--series-{1 + color % NUM_COLORS})"><title>{escape(title)}</title></rect>'
    )


def _text(x: float, y: float, text: str, anchor: str, color: str = "--ink") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="var({color})">{escape(text)}</text>'


def _scale(most: float, height: float, unit: str) -> list[str]:
    """Return the labels of the x-axis, at multiples of 1, 2 or 5 times a power of ten, and its unit."""
    power = 10.0 ** math.floor(math.log10(most / 5))
    spacing = next(digit * power for digit in (1, 2, 5, 10) if most / (digit * power) <= 10)
    values = [spacing * i for i in range(1, int(most / spacing) + 1)]
    labels = [_text(_x(value, most), height + 16, f"{value:g}", "middle", "--muted") for value in values]
    return [*labels, _text(LABELS - 8, height + 16, unit, "end", "--muted")]


def _svg(title: str, height: float, shapes: Sequence[str]) -> str:
    return (
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {WIDTH} {height + 24}" font-size="12">'
        f"{''.join(shapes)}</svg>"
    )


def _figure(title: str, explanation: str, svg: str) -> str:
    caption = f"<figcaption>{escape(title)}<span>{escape(explanation)}</span></figcaption>"
    return f"<figure class=wide>{caption}{svg}</figure>"


def _node_rows(config: Config, cluster: Cluster) -> Iterator[str]:
    """Yield one table row for each node, with one cell for each GPU on the node."""
    spans = device_spans(config)
    for first in range(0, cluster.num_gpus, cluster.gpus_per_node):
        cells = []
        for gpu in range(first, min(first + cluster.gpus_per_node, cluster.num_gpus)):
            lines, stage = _on_gpu(config, spans, gpu)
            kind = "" if stage is None else f" class=stage{stage % NUM_COLORS}"
            text = "".join(f"<span>{escape(line)}</span>" for line in lines)
            cells.append(f"<td{kind}>{gpu}{text}</td>")
        yield f"<tr><th>node {first // cluster.gpus_per_node}</th>{''.join(cells)}</tr>"


def _on_gpu(config: Config, spans: dict[str, range], gpu: int) -> tuple[list[str], int | None]:
    """Return a line for each rank on a GPU, and the pipeline stage of the actor's rank (None if the GPU has no actor
    rank)."""
    lines, stage = [], None
    for placed in config.all_placed:
        name = NAMES[placed.section]
        if gpu in spans[name][: placed.layout.world_size]:
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
