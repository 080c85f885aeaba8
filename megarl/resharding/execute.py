"""Carries out the part of a plan that writes into one holder: a loop over data."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megarl.resharding.plan import Plan
from megarl.resharding.transports.transport import Transport, view


@torch.no_grad()
def execute(plan: Plan, parameters: Mapping[str, torch.Tensor], transport: Transport, cast: bool = False) -> int:
    """Writes the parameters in place. Returns the bytes written.

    plan        for_destination() of the holder whose parameters these are
    parameters  exactly those that the plan writes
    cast        convert from the sources' dtypes; otherwise a difference is an error

    Raises ValueError, before anything is written, for a parameter that is missing, unexpected, or of another shape or
    dtype than the plan and its sources have.
    """
    _check_shapes(plan, parameters)
    if not cast:
        _check_dtypes(plan, parameters, transport)
    written = 0
    for copy in plan.copies:
        target = view(parameters[copy.destination_parameter], copy.destination_rectangle)
        source = transport.read(copy.source, copy.source_parameter, copy.source_rectangle)
        # copy_ would broadcast a source of another shape.
        assert source.shape == target.shape, f"{tuple(source.shape)} into {tuple(target.shape)}: {copy}"
        target.copy_(source)
        written += target.nbytes
    for fill in plan.fills:
        target = view(parameters[fill.destination_parameter], fill.destination_rectangle)
        target.zero_()
        written += target.nbytes
    return written


def planned_shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Parameter -> shape, of a plan for one destination: its copies and fills reach to the end of every axis."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in (*plan.copies, *plan.fills):
        stops = tuple(stop for _, stop in entry.destination_rectangle)
        known = shapes.get(entry.destination_parameter, stops)
        shapes[entry.destination_parameter] = tuple(map(max, known, stops))
    return shapes


def _check_shapes(plan: Plan, parameters: Mapping[str, torch.Tensor]) -> None:
    planned = planned_shapes(plan)
    for name, shape in planned.items():
        if name not in parameters:
            raise ValueError(f"{name}: the plan writes it, but the model has no such parameter")
        actual = tuple(parameters[name].shape)
        if actual != shape:
            raise ValueError(f"{name}: the model's parameter has shape {actual}, the plan's {shape}")
    for name in parameters:
        if name not in planned:
            raise ValueError(f"{name}: the model has this parameter, but the plan does not write it")


def _check_dtypes(plan: Plan, parameters: Mapping[str, torch.Tensor], transport: Transport) -> None:
    for copy in plan.copies:
        theirs = transport.dtype(copy.source, copy.source_parameter)
        ours = parameters[copy.destination_parameter].dtype
        if theirs != ours:
            raise ValueError(
                f"{copy.destination_parameter} is {ours}, but {copy.source} has {copy.source_parameter} as {theirs}; "
                "to convert, say cast=True"
            )
