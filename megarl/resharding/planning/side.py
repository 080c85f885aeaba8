"""Parse the source or destination given to `megarl reshard`: trainer ranks, engines or a Hugging Face folder."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megarl.config.divisors import quotient
from megarl.config.model_schema import Layout
from megarl.config.rules.layout import check_layout
from megarl.core.errors import UserError
from megarl.models.denoiser import is_denoiser
from megarl.resharding.families import (
    diffusers_holders,
    huggingface_holder,
    megatron_holders,
    quantized_destinations,
    vllm_holders,
)
from megarl.resharding.families.canonical import canonical_of
from megarl.resharding.piece import Holder
from megarl.resharding.selection import ONE_PROCESS

FORMS = (
    "tp=…,pp=… (a trainer), vllm:tp=…,replicas=… (engines; ep=true keeps experts whole, fp8=true uses fp8 blocks), "
    "diffusers:replicas=… (engines of an image model), or hf (a folder)"
)
_BITS = {"b": 1, "B": 8}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def side_holders(option: str, text: str, hf_config: Mapping[str, Any], is_source: bool) -> list[Holder]:
    """Return the holders for a description such as "tp=8,pp=16,ep=32,etp=1,dp=4", "vllm:tp=8,replicas=32" or "hf".
    Raise a UserError that contains the command-line option if the text is invalid or does not fit the model."""
    kind, _, values = text.rpartition(":") if ":" in text or text != "hf" else ("hf", "", "")
    try:
        if kind == "hf":
            return [huggingface_holder(hf_config)]
        if kind in ("vllm", "diffusers") and not is_source:
            expected = "diffusers" if is_denoiser(hf_config) else "vllm"
            if kind != expected:
                raise UserError(f"{kind} engines cannot hold this model. Fix: pass {expected}:replicas=1")
            return _image_engines(values, hf_config) if kind == "diffusers" else _engines(values, hf_config)
        if kind in ("", "megatron"):
            return megatron_holders(hf_config, _layout(values, hf_config))
        raise UserError(f"{kind} is not a {'source' if is_source else 'destination'}. Fix: pass {FORMS}")
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None


def on_nodes(holders: list[Holder], ranks_per_node: int, first: int = 0) -> list[Holder]:
    """Assign the holders in order to nodes of `ranks_per_node`; node numbers start at `first`."""
    return [replace(holder, node=first + i // ranks_per_node) for i, holder in enumerate(holders)]


def colocate(
    source: str, sources: Sequence[Holder], destination: str, destinations: Sequence[Holder]
) -> tuple[list[Holder], list[Holder]]:
    """Place source rank i and destination rank i on device i. Raise a UserError if a device does not have exactly one
    source rank and one destination rank. Its message contains the option values `source` and `destination`."""
    for option, text in (("--from", source), ("--to", destination)):
        if text == "hf":
            raise UserError(f"--colocated: {option} hf is a folder, which has no devices. Fix: omit --colocated")
    if len(sources) != len(destinations):
        raise UserError(
            f"--colocated: {source} has {len(sources):,} ranks, but {destination} has {len(destinations):,}. Each "
            f"device must have one source rank and one destination rank. Fix: {_remedy(len(sources), destinations)}"
        )
    sources, destinations = (
        [replace(holder, device=i) for i, holder in enumerate(side)] for side in (sources, destinations)
    )
    return sources, destinations


def _remedy(num_sources: int, destinations: Sequence[Holder]) -> str:
    """Return a fix that makes the numbers of source and destination ranks equal."""
    workers = sum(holder.name.startswith("vllm:0.") or holder.name == "diffusers:0" for holder in destinations)
    if workers and num_sources % workers == 0:
        replicas = num_sources // workers
        return f"set replicas={replicas} in --to, so that {workers} x {replicas} = {num_sources:,}"
    if workers:
        return (
            f"set tp in --to to a divisor of {num_sources:,} ({num_sources:,} / {workers} = {num_sources / workers:g})"
        )
    return "set dp in --from or --to so that both have the same number of ranks"


def bytes_per_second(option: str, text: str, names: Sequence[str]) -> dict[str, float]:
    """Parse bandwidths such as "inter=50GB/s,intra=400Gb/s" (B: bytes, b: bits). Raise a UserError if invalid."""
    values = {name: value for name, _, value in (item.partition("=") for item in text.split(","))}
    if values.keys() != set(names):
        raise UserError(
            f"{option} {text}: expected {' and '.join(names)}. Fix: pass both, for example inter=50GB/s,intra=400GB/s"
        )
    return {name: _bandwidth(f"{option} {name}={values[name]}", values[name]) for name in names}


def _bandwidth(key: str, text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]i?|)([bB])/s", text)
    if match is None or float(match[1]) == 0:
        raise UserError(
            f"{key}: expected a positive number and a unit. Fix: use a form such as 50GB/s, 400Gb/s or 1.5GiB/s"
        )
    return float(match[1]) * _UNITS[match[2]] * _BITS[match[3]] / 8


def _engines(text: str, hf_config: Mapping[str, Any]) -> list[Holder]:
    fields = _fields(text, ("tp", "replicas", "ep", "fp8"))
    whole_experts, quantized = (_switch(name, fields.pop(name, "false")) for name in ("ep", "fp8"))
    sizes = {"tp": 1, "replicas": 1} | {name: _positive(name, value) for name, value in fields.items()}
    holders = vllm_holders(hf_config, sizes["tp"], sizes["replicas"], expert_parallel=whole_experts)
    return quantized_destinations(hf_config, holders) if quantized else holders


def _image_engines(text: str, hf_config: Mapping[str, Any]) -> list[Holder]:
    fields = _fields(text, ("replicas",))
    return diffusers_holders(hf_config, _positive("replicas", fields.get("replicas", "1")))


def _switch(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise UserError(f"{name}={value}: expected true or false. Fix: use one of them, or omit {name}")
    return value == "true"


def _layout(text: str, hf_config: Mapping[str, Any]) -> Layout:
    sizes = {name: _positive(name, value) for name, value in _fields(text, ONE_PROCESS).items()}
    layout = Layout.model_validate(ONE_PROCESS | sizes | {"sequence_parallel": False})
    check_layout("", layout)
    _check_stages(layout, canonical_of(hf_config).model.num_layers)
    return layout


def _check_stages(layout: Layout, num_layers: int) -> None:
    """Raise a UserError if the layers cannot be split evenly over the stages and no stage has an explicit size."""
    if num_layers % layout.pp == 0 or any(layout.uneven_stages.values()):
        return
    each = -(-num_layers // layout.pp)
    last = num_layers - each * (layout.pp - 1)
    remedy = f"set pp to a divisor of {num_layers}"
    if last > 0:
        remedy = f"add last_stage_layers={last}, so that each other stage has {each} layers"
    raise UserError(
        f"pp={layout.pp}: num_hidden_layers={num_layers} is not divisible by pp={layout.pp} "
        f"({quotient(num_layers, layout.pp)}). Fix: {remedy}"
    )


def _fields(text: str, known: Collection[str]) -> dict[str, str]:
    """Parse comma-separated name=value pairs."""
    fields: dict[str, str] = {}
    for item in text.split(",") if text else ():
        name, _, value = item.partition("=")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise UserError(f"unknown name {name}. Fix: use {near[0] if near else 'one of ' + ', '.join(known)}")
        if name in fields:
            raise UserError(f"{name} appears twice. Fix: pass {name} once")
        fields[name] = value
    return fields


def _positive(name: str, value: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", value):
        raise UserError(f"{name}={value}: expected a positive integer. Fix: use a value such as {name}=1")
    return int(value)
