"""Plans, proves and describes how a model's weights would move from one layout to another, without moving any."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.core.collector import without_collector
from megarl.core.errors import UserError
from megarl.models.folder import NotHere, config_here, default_cache
from megarl.resharding.families.quantised import FP8, quantised_sources
from megarl.resharding.piece import Holder
from megarl.resharding.planning.figures import Figures, figures
from megarl.resharding.planning.messages import LATENCY_S
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.results import kept
from megarl.resharding.planning.schedule import Bandwidth
from megarl.resharding.planning.side import bytes_per_second, colocate, on_nodes, side_holders


def reshard(
    model: str, source: str, destination: str, ranks_per_node: int, bandwidth: str, colocated: bool = False
) -> Figures:
    """Returns the figures of the plan. Nodes are filled in the order of ranks.

    model                 a config.json, or as model.path in a recipe, of what is on this machine
    source, destination   see side_holders
    colocated             whether they share devices, rank i of both the same one; otherwise they are on different nodes

    Raises UserError for what cannot be read, or does not fit the model.
    """
    hf_config = _read(model)
    speeds = read_speeds(ranks_per_node, bandwidth)

    def make_sides() -> tuple[list[Holder], list[Holder]]:
        sources = on_nodes(side_holders("--from", source, hf_config, is_source=True), ranks_per_node)
        wanting = side_holders("--to", destination, hf_config, is_source=False)
        if FP8 in wanting[0].dtypes.values():
            sources = quantised_sources(hf_config, sources)
        destinations = on_nodes(wanting, ranks_per_node, first=0 if colocated else sources[-1].node + 1)
        return colocate(source, sources, destination, destinations) if colocated else (sources, destinations)

    return plan_figures([hf_config, source, destination, ranks_per_node, colocated], make_sides, speeds)


def read_speeds(ranks_per_node: int, bandwidth: str) -> Bandwidth:
    """Reads --bandwidth, and checks --nodes-of. Raises UserError for what cannot be read."""
    if ranks_per_node < 1:
        raise UserError(f"--nodes-of {ranks_per_node}: expected at least one rank on a node")
    return Bandwidth(**bytes_per_second("--bandwidth", bandwidth, ("inter", "intra")), latency=LATENCY_S)


def plan_figures(
    inputs: list[Any],
    make_sides: Callable[[], tuple[list[Holder], list[Holder]]],
    speeds: Bandwidth,
    bucket_bytes: int | None = None,
) -> Figures:
    """Plans the way from sources to destinations, and returns the figures. Those that have been asked for before are
    not computed again.

    inputs       all that the sides follow from, as JSON
    make_sides   returns the holders of both sides, with their nodes and devices
    """

    def compute() -> dict[str, Any]:
        with without_collector():
            sources, destinations = make_sides()
            plan = make_plan(sources, destinations, bucket_bytes)
            return figures(plan, sources, destinations, speeds).as_dict()

    return Figures(**kept(default_cache() / "plans", [*inputs, bucket_bytes, asdict(speeds)], compute))


def table(found: Figures) -> str:
    """Returns the figures as lines for people."""
    inter, intra, local = (show_bytes(found.bytes_by_link[link]) for link in ("inter", "intra", "local"))
    local_bytes = f", {local} on a device" if found.bytes_by_link["local"] else ""
    buffers = show_bytes(found.communicator_bytes)
    network = (
        f"{found.neighbours:,} neighbours, {found.operations:,} messages and {found.communicators:,} communicators"
    )
    rows = {
        "ranks": f"{found.ranks_source:,} -> {found.ranks_destination:,}",
        "bytes": f"{show_bytes(found.bytes_total)}: {inter} between nodes, {intra} inside them{local_bytes}",
        "wasted": show_bytes(found.bytes_wasted),
        "proof": "every element is written exactly once" if found.written_once else "FAILED",
        "busiest": f"source gives {found.source_balance:.3f} of the mean of its replicas",
        "time": _time(found.predicted_seconds, found.floor_seconds),
        "network": f"{network} (about {buffers}) of the rank with most",
        "staging": f"{show_bytes(found.peak_staging_bytes)} per process at most",
        "plan": found.plan_hash[:16],
    }
    return "\n".join(f"{name:<8} {text}" for name, text in rows.items())


def _time(predicted: float, floor: float) -> str:
    if not floor:
        return "nothing travels"
    return f"{predicted:.3g} s predicted, {floor:.3g} s at least: {predicted / floor:.3f} of it"


def show_bytes(num_bytes: float) -> str:
    """Returns the number with its unit, in powers of ten."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _read(model: str) -> dict[str, Any]:
    """Returns the model's config.json. A quantised checkpoint counts as what it is quantised from: trainers and engines
    hold that."""
    file = Path(model).expanduser()
    try:
        hf_config = (
            json.loads(file.read_text(encoding="utf-8")) if file.is_file() else config_here(model, key="--model")
        )
    except json.JSONDecodeError as error:
        raise UserError(f"--model {model}: not JSON: {error}") from None
    except NotHere as reason:
        raise UserError(f"--model {model}: {reason}; give a config.json, or the folder that has it") from None
    return {**hf_config, "quantization_config": None}
