"""Formats plans as text, as JSON values, and as an overlay for the recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config import document
from megarl.config.device_spans import num_devices
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.files import write_new_file
from megarl.planner.hardware import GIB, STORAGE_GB_S, Cluster
from megarl.planner.phases import COPIES, SPARES, host_memory
from megarl.planner.plan import Planned, describe_layout
from megarl.planner.simulation import Simulated
from megarl.planner.step_plan import SaveTime, StepPlan, StepTimes
from megarl.resharding.planning.preview import show_bytes

SHOWN = 5


def table(planned: Planned) -> str:
    """Return a table that ranks the plans, followed by the details of the first plan."""
    best, result = planned.best, planned.search_result
    config, cluster = best.config, best.cluster
    used = num_devices(config)
    rows = {
        "cluster": cluster.describe(),
        "model": f"model.path={config.model.path}: {planned.num_parameters / 1e9:.3g} billion parameters",
        "step": best.workload.describe(),
    }
    lines = [f"{name:<10}{value}" for name, value in rows.items()]
    if result is not None:
        lines += [
            f"layouts   {result.tried} valid for training; {len(result.plans)} of the fastest also fit with engines",
            *(f"          rejected: {line}" for line in result.refused),
            "",
            *_ranking(result.plans[:SHOWN]),
            "",
            "Plan 1:",
        ]
    lines += [f"{name:<10}{value}" for name, value in _details(best, used)]
    return "\n".join(lines)


def simulated_table(runs: Mapping[int, Simulated]) -> str:
    """Return a table that compares simulated runs. runs: the simulated run for each value of rollout.max_staleness. The
    value 0 must be present."""
    synchronous, drops = runs[0].step_seconds, any(run.dropped for run in runs.values())
    lines = [
        "simulated, by rollout.max_staleness:",
        f"{'':>14}{'step':>10}{'speedup':>9}{'engines idle':>14}{'trainers idle':>15}{'mean lag':>10}"
        f"{'dropped' if drops else '':>9}",
        *(
            f"{max_staleness:>14}{run.step_seconds:>8.1f} s{synchronous / run.step_seconds:>7.2f} x"
            f"{100 * run.engines_idle:>12.1f} %{100 * run.trainers_idle:>13.1f} %{run.mean_age:>10.1f}"
            + (f"{100 * run.dropped:>7.1f} %" if drops else "")
            for max_staleness, run in runs.items()
        ),
    ]
    return "\n".join(lines)


def as_dict(planned: Planned) -> dict[str, Any]:
    """Return the plans as JSON values. Times are in seconds and sizes in bytes."""
    plans = [planned.best] if planned.search_result is None else planned.search_result.plans[:SHOWN]
    return {
        "gpus": f"{planned.best.cluster.num_gpus}x{planned.best.cluster.name}",
        "headroom": planned.best.cluster.headroom,
        "parameters": planned.num_parameters,
        "layouts_tried": None if planned.search_result is None else planned.search_result.tried,
        "plans": [_plan_dict(plan) for plan in plans],
    }


def _plan_dict(plan: StepPlan) -> dict[str, Any]:
    config, times = plan.config, plan.times
    engines = None if config.is_offline else {"replicas": config.rollout.replicas, "tp": config.rollout.tp}
    return {
        "layout": describe_layout(config.actor.layout.model_dump()),
        "engines": engines,
        "kv_cache_gib": None if config.is_offline or config.samples_images else config.rollout.kv_cache_gib,
        "recompute": config.actor.recompute,
        "offload": config.actor.offload,
        "nodes": on_nodes(plan).cluster.nodes,
        "step_seconds": times.seconds,
        "phase_seconds": times.phases,
        "bounds": times.bounds,
        "overlapped_seconds": _overlapped(plan),
        "save_seconds": None if plan.save is None else {"copying": plan.save.copying, "writing": plan.save.writing},
        "gpu_bytes": {load.phase: dict(load.parts) for load in plan.loads},
        "host_bytes": dict(plan.host),
        "bubble": {role: time.bubble for role, time in times.training.items()},
        "sent_bytes": {role: dict(time.volume) for role, time in times.training.items()},
        "concurrent_images" if config.samples_images else "concurrent_sequences": (
            None if times.rollout is None else times.rollout.concurrent
        ),
    }


def _ranking(plans: Sequence[StepPlan]) -> list[str]:
    header = ["", "step", "rollout", "training", "refit", "fullest", "actor.layout", "engines", "recompute", "offload"]
    rows = [header, *([str(number), *_row(plan)] for number, plan in enumerate(plans, start=1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(plan: StepPlan) -> list[str]:
    config, times = plan.config, plan.times
    training = times.training_seconds
    rollout = "-" if times.rollout is None else f"{times.rollout.seconds:.1f} s"
    refit = "-" if times.refit is None else f"{times.refit.seconds:.1f} s"
    fullest = f"{plan.fullest.total / GIB:.1f} GiB"
    offload = ", ".join(config.actor.offload) or "-"
    return [
        *(f"{times.seconds:.1f} s", rollout, f"{training:.1f} s", refit, fullest),
        *(_layout(config), _engines(config), config.actor.recompute, offload),
    ]


def _layout(config: Config) -> str:
    return " ".join(f"{name}={size}" for name, size in describe_layout(config.actor.layout.model_dump()).items())


def _engines(config: Config) -> str:
    return "-" if config.is_offline else f"{config.rollout.replicas} x tp={config.rollout.tp}"


def _details(plan: StepPlan, used: int) -> list[tuple[str, str]]:
    config, times, cluster = plan.config, plan.times, plan.cluster
    unused = f", {cluster.num_gpus - used} unused" if used < cluster.num_gpus else ""
    has_cache = not config.is_offline and not config.samples_images
    cache = f", KV cache {config.rollout.kv_cache_gib:g} GiB per GPU" if has_cache else ""
    dtype_note = ", with matrix products in bfloat16" if config.model.dtype == "float32" else ""
    on_host = config.actor.megatron_overrides.optimizer.get("optimizer_cpu_offload")
    rows = [
        ("layout", f"{_layout(config)}, recompute={config.actor.recompute}; engines {_engines(config)}{cache}"),
        *([("optimizer", "updated in host memory, which the trainer does not support yet")] if on_host else []),
        ("gpus", f"{config.cluster.placement}: {used} of {cluster.num_gpus}{unused}"),
        ("memory", f"on the fullest GPU in each phase, of {cluster.gpu.memory_gib:g} GiB{_headroom(cluster)}:"),
        *(("", f"{load.phase}: {load.arithmetic}") for load in plan.loads),
        ("host", _host(plan)),
        ("time", f"{times.seconds:.1f} s per step{dtype_note}:"),
        *(("", f"{phase} {seconds:.1f} s{_bound(times, phase)}") for phase, seconds in times.phases.items()),
    ]
    if times.rollout is not None and config.samples_images:
        rows.append(("images", f"at most {times.rollout.concurrent:,} denoised at once per engine"))
    elif times.rollout is not None:
        capacity = f"{times.rollout.concurrent:,} per engine at once, {times.rollout.guaranteed:,} at maximum length"
        rows.append(("sequences", capacity))
    for role, time in times.training.items():
        sent = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in time.volume.items()) or "nothing"
        rows.append((role, f"{time.microbatches} microbatches per update, pipeline bubble {100 * time.bubble:.1f} %"))
        rows.append(("", f"each GPU sends per step: {sent}"))
    if times.refit is not None:
        rows.append(("refit", f"{show_bytes(times.refit.entering)} received by each node with engines"))
    if plan.save is not None:
        rows.append(("save", _save(plan.save, config.checkpoint.background)))
    if config.cluster.replace_ranks:
        rows.append(("recovery", _recovery(plan)))
    overlapped = _overlapped(plan)
    if overlapped is not None:
        rows.append(("async", _asynchrony(config, times, overlapped)))
    return rows


def _overlapped(plan: StepPlan) -> float | None:
    """Return the duration of a step in which rollout and training overlap, or None for runs that cannot sample ahead:
    runs on offline data, and runs of image models."""
    return None if plan.config.samples_images else plan.times.overlapped(plan.config.is_colocated)


def _headroom(cluster: Cluster) -> str:
    if not cluster.headroom:
        return ""
    return f" with {100 * cluster.headroom:g} % kept free (--headroom {cluster.headroom:g})"


def _bound(times: StepTimes, phase: str) -> str:
    return f", mostly {times.bounds[phase]}" if phase in times.bounds else ""


def _save(save: SaveTime, in_background: bool) -> str:
    meanwhile = "in the background" if in_background else "while training waits"
    return (
        f"copying to host memory takes at least {save.copying:.1f} s, and the fullest node writes "
        f"{show_bytes(save.node_bytes)} in {save.writing:.1f} s at {STORAGE_GB_S:g} GB/s, {meanwhile}"
    )


def _recovery(plan: StepPlan) -> str:
    copies, spares = f"copies of the ranks' state take {show_bytes(plan.copies)}", plan.host.get(SPARES)
    made = " of shared memory on the fullest node, and twice that with a spare node"
    if COPIES not in plan.host:
        made = " on the fullest node. None are made if /dev/shm has its default size"
    return f"{copies}{made}" + ("" if spares is None else f"; spare processes take {show_bytes(spares)} of host memory")


def _host(plan: StepPlan) -> str:
    parts = " + ".join(f"{size / GIB:.1f} ({what})" for what, size in plan.host.items()) or "0"
    total = f"{sum(plan.host.values()) / GIB:.1f} GiB of {host_memory(plan.cluster) / GIB:,.0f}"
    return f"{parts} = {total} on the fullest node"


def _asynchrony(config: Config, times: StepTimes, overlapped: float) -> str:
    gain = f"at least {overlapped:.1f} s per step, a speedup of {times.seconds / overlapped:.2f} x"
    if config.is_colocated:
        return f"without waiting for the last responses, on the same GPUs: {gain}"
    return f"with the next step's rollout during training: {gain}"


def emit(planned: Planned, recipe: Path, overrides: Sequence[str], original: Config, path: Path, gpus: str) -> None:
    """Write the first plan as an overlay for the recipe. It contains the overrides and the keys that the plan changes.
    Raise a UserError if the file already exists or cannot be written.

    Args:
        recipe: recipe file that the overlay extends.
        original: the recipe with the overrides applied.
    """
    best = planned.best
    config = on_nodes(best)
    target = config.model_dump()
    values: dict[str, Any] = {"base": os.path.relpath(recipe.resolve(), path.resolve().parent)}
    for override in overrides:
        _put(values, override.partition("=")[0].split("."), target)
    for key in _changed((), original.model_dump(), target):
        _put(values, key, target)
    lines = [
        f"# Written by `megarl plan {recipe} --gpus {gpus}`. Prediction: {best.times.seconds:.1f} s per step,",
        f"# {best.fullest.total / GIB:.1f} of {best.cluster.gpu.memory_gib:g} GiB on the fullest GPU.",
        document.render(values),
    ]
    write_new_file("--emit", path, "\n".join(lines))
    assert load(path) == config, "the overlay differs from the plan"


def on_nodes(plan: StepPlan) -> Config:
    """Return the plan's config with cluster.nodes set to the number of nodes that its ranks occupy."""
    nodes = -(-num_devices(plan.config) // plan.cluster.gpus_per_node)
    return plan.config.model_copy(update={"cluster": plan.config.cluster.model_copy(update={"nodes": nodes})})


def _changed(key: tuple[str, ...], old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the keys under `key` whose values differ between `old` and `new`."""
    keys = []
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(name), dict) and value:
            keys += _changed((*key, name), old[name], value)
        elif value != old.get(name):
            keys.append((*key, name))
    return keys


def _put(values: dict[str, Any], key: Sequence[str], target: Mapping[str, Any]) -> None:
    """Copy the value of `key` from `target` into `values`. Both are nested mappings."""
    value: Any = target
    for part in key:
        value = value[part]
    for part in key[:-1]:
        values = values.setdefault(part, {})
    values[key[-1]] = value
