"""Plan, check and describe resharding without moving any weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.core.collector import without_collector
from megarl.core.errors import UserError
from megarl.models.folder import ModelNotLocal, default_cache, read_config_file, read_local_config
from megarl.resharding.families.quantized import FP8, quantized_sources
from megarl.resharding.piece import Holder
from megarl.resharding.planning.figures import Figures, figures
from megarl.resharding.planning.messages import LATENCY_S
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.results import cached
from megarl.resharding.planning.schedule import Bandwidth
from megarl.resharding.planning.side import bytes_per_second, colocate, on_nodes, side_holders


def reshard(
    model: str, source: str, destination: str, ranks_per_node: int, bandwidth: str, colocated: bool = False
) -> Figures:
    """Return the figures for the plan from `source` to `destination`. Ranks are assigned to nodes in order. Raise a
    UserError if an argument is invalid or does not fit the model.

    Args:
        model: a path to config.json, or a value for model.path that is available on this machine.
        source, destination: descriptions of the two layouts; see side_holders.
        colocated: whether source rank i and destination rank i share device i; otherwise they are on different nodes.
    """
    hf_config = _read(model)
    speeds = read_speeds(ranks_per_node, bandwidth)

    def make_sides() -> tuple[list[Holder], list[Holder]]:
        sources = on_nodes(side_holders("--from", source, hf_config, is_source=True), ranks_per_node)
        holders = side_holders("--to", destination, hf_config, is_source=False)
        if FP8 in holders[0].dtypes.values():
            sources = quantized_sources(hf_config, sources)
        destinations = on_nodes(holders, ranks_per_node, first=0 if colocated else sources[-1].node + 1)
        return colocate(source, sources, destination, destinations) if colocated else (sources, destinations)

    return plan_figures([hf_config, source, destination, ranks_per_node, colocated], make_sides, speeds)


def read_speeds(ranks_per_node: int, bandwidth: str) -> Bandwidth:
    """Parse --bandwidth and check --nodes-of. Raise a UserError if either is invalid."""
    if ranks_per_node < 1:
        raise UserError(
            f"--nodes-of {ranks_per_node}: a node must have at least one rank. Fix: pass a positive integer"
        )
    return Bandwidth(**bytes_per_second("--bandwidth", bandwidth, ("inter", "intra")), latency=LATENCY_S)


def plan_figures(
    inputs: list[Any],
    make_sides: Callable[[], tuple[list[Holder], list[Holder]]],
    speeds: Bandwidth,
    bucket_bytes: int | None = None,
) -> Figures:
    """Plan the copies and return the figures, from the cache where possible.

    Args:
        inputs: JSON-serializable values that determine source and destination; used as the cache key.
        make_sides: function that returns the source and the destination holders, with their nodes and devices.
        speeds: bandwidth of the simulated network.
        bucket_bytes: maximum size of a bucket; see make_plan.
    """

    def compute() -> dict[str, Any]:
        with without_collector():
            sources, destinations = make_sides()
            plan = make_plan(sources, destinations, bucket_bytes)
            return figures(plan, sources, destinations, speeds).as_dict()

    return Figures(**cached(default_cache() / "plans", [*inputs, bucket_bytes, asdict(speeds)], compute))


def table(result: Figures) -> str:
    """Format the figures as a table."""
    inter, intra, local = (show_bytes(result.bytes_by_link[link]) for link in ("inter", "intra", "local"))
    local_bytes = f", {local} within devices" if result.bytes_by_link["local"] else ""
    buffers = show_bytes(result.communicator_bytes)
    network = (
        f"{result.neighbors:,} neighbors, {result.operations:,} messages and {result.communicators:,} communicators"
    )
    rows = {
        "ranks": f"{result.ranks_source:,} -> {result.ranks_destination:,}",
        "bytes": f"{show_bytes(result.bytes_total)}: {inter} between nodes, {intra} within nodes{local_bytes}",
        "wasted": show_bytes(result.bytes_wasted),
        "proof": "the plan writes every element exactly once" if result.written_once else "FAILED",
        "balance": f"the busiest source sends {result.source_balance:.3f} x the mean over its replicas",
        "time": _time(result.predicted_seconds, result.floor_seconds),
        "network": f"at most {network} (about {buffers}) per rank",
        "staging": f"at most {show_bytes(result.peak_staging_bytes)} per process",
        "plan": result.plan_hash[:16],
    }
    return "\n".join(f"{name:<8} {text}" for name, text in rows.items())


def _time(predicted: float, floor: float) -> str:
    if not floor:
        return "0 s: no data is sent"
    return f"{predicted:.3g} s predicted, lower bound {floor:.3g} s (ratio {predicted / floor:.3f})"


def show_bytes(num_bytes: float) -> str:
    """Format a number of bytes with a decimal unit prefix."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _read(model: str) -> dict[str, Any]:
    """Return the model's config.json without quantization_config, because the plan does not depend on the quantization
    of the checkpoint."""
    file = Path(model).expanduser()
    try:
        hf_config = read_config_file(file, "--model ") if file.is_file() else read_local_config(model, key="--model")
    except ModelNotLocal as reason:
        raise UserError(f"--model {model}: {reason}. Fix: pass a config.json, or the folder that contains it") from None
    return {**hf_config, "quantization_config": None}
