"""Rules for a parallel layout. `keys` is the prefix of the layout's keys, such as "actor.layout."."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from megarl.config.divisors import divisors, listed, quotient
from megarl.config.model_schema import Layout
from megarl.config.violations import raise_all


def check_layout(keys: str, layout: Layout) -> None:
    """Raise a UserError with one line per violated rule."""
    raise_all(line for rule in RULES for line in rule(keys, layout))


def sequence_parallel_needs_tensor_parallel(keys: str, layout: Layout) -> Iterator[str]:
    if layout.sequence_parallel and layout.tp <= 1:
        yield (
            f"{keys}sequence_parallel=true: sequence parallelism shards over tensor-parallel ranks, but {keys}tp=1. "
            f"Fix: set {keys}sequence_parallel=false, or raise {keys}tp"
        )


def uneven_stages_need_pipeline(keys: str, layout: Layout) -> Iterator[str]:
    uneven = [name for name, layers in layout.uneven_stages.items() if layers is not None]
    if uneven and layout.pp <= 1:
        yield (
            f"{', '.join(f'{keys}{name}={layout.uneven_stages[name]}' for name in uneven)}: {keys}pp=1 has a single "
            f"pipeline stage. Fix: {' and '.join(f'set {keys}{name}=null' for name in uneven)}, or raise {keys}pp"
        )


def virtual_stages_need_pipeline(keys: str, layout: Layout) -> Iterator[str]:
    if layout.vpp != 1 and layout.pp <= 1:
        yield (
            f"{keys}vpp={layout.vpp}: virtual stages interleave the layers of several pipeline stages, but {keys}pp=1 "
            f"has a single stage. Fix: set {keys}vpp=1, or raise {keys}pp"
        )


def expert_tensor_parallel_needs_expert_parallel(keys: str, layout: Layout) -> Iterator[str]:
    """Without expert parallelism, Megatron silently computes wrong gradients if etp differs from tp."""
    if layout.ep <= 1 and layout.expert_tp != layout.tp:
        yield (
            f"{keys}etp={layout.etp}: without expert parallelism ({keys}ep=1), experts are sharded like the other "
            f"layers ({keys}tp={layout.tp}). Fix: set {keys}etp=null, or raise {keys}ep"
        )


def experts_tile_a_stage(keys: str, layout: Layout) -> Iterator[str]:
    """Expert layers divide the tp x cp x dp ranks in a pipeline stage into etp x ep x expert data-parallel ranks."""
    ranks, needed = layout.tp * layout.cp * layout.dp, layout.expert_tp * layout.ep
    if ranks % needed:
        legal = listed(divisors(ranks // gcd(ranks, layout.expert_tp)))
        yield (
            f"{keys}ep={layout.ep}: a pipeline stage has tp x cp x dp = {layout.tp} x {layout.cp} x {layout.dp} = "
            f"{ranks} ranks, which are not divisible by etp x ep = {layout.expert_tp} x {layout.ep} = {needed} "
            f"({quotient(ranks, needed)}). Fix: set {keys}ep to {legal}"
        )


RULES = (
    sequence_parallel_needs_tensor_parallel,
    uneven_stages_need_pipeline,
    virtual_stages_need_pipeline,
    expert_tensor_parallel_needs_expert_parallel,
    experts_tile_a_stage,
)
