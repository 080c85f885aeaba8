"""Measure megarl's training step: against transformers and TRL, packed against padded samples, memory against its
closed form, and the time that a checkpoint blocks training.

.venv/bin/python tools/benchmarks/training_step.py equal --out tools/benchmarks/results/step_equal.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from benchmark import option, run_benchmark, run_logged
from step_vs_trl import build_environment
from training_case import SHAPES, Case, equal_lengths, mixed_lengths

TIMEOUT_S = 900
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""Makes glibc return freed memory, so that resident memory is close to the memory in use."""

MICROBATCH = "microbatch sizes to try; the fastest one counts (default: 8)"

LAYOUTS = {"1 process": [], "PP2": ["pp=2"], "DP2": ["dp=2"]}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="training-step-") as name:
        figures = MEASUREMENTS[arguments.what](arguments, cores, Path(name))
    return {"what": arguments.what, "shape": arguments.shape, **figures}


def against_transformers(arguments: argparse.Namespace, cores: int, work: Path) -> dict[str, Any]:
    """Compare one process each, with all cores, on the same samples."""
    lengths = _lengths(arguments, mixed=arguments.what == "mixed")
    case = Case(arguments.shape, lengths, arguments.updates, cores, arguments.tokens_per_microbatch, [])
    megarl = _speed(run("megarl", case, work / "megarl")[0], case)
    sides = []
    for size in arguments.transformers_microbatch:
        other = replace(case, microbatch=size)
        sides.append(_speed(run("transformers", other, work / f"transformers-{size}")[0], other))
    fastest = max(sides, key=lambda side: side["tokens_per_second"])
    return {
        "lengths": lengths,
        "ratio_of_tokens_per_second": megarl["tokens_per_second"] / fastest["tokens_per_second"],
        "megarl": megarl,
        "transformers": fastest,
        "transformers_slower_settings": [side for side in sides if side is not fastest],
    }


def against_trl(arguments: argparse.Namespace, cores: int, work: Path) -> dict[str, Any]:
    """Compare a GRPO update on the same samples, with mixed and with equal lengths: seconds and, in separate runs, the
    peak resident memory without the memory before the model, weights, gradients and Adam's state."""
    trl = build_environment(work / "environment")
    found = {}
    for mix in ("mixed", "equal"):
        lengths = _lengths(arguments, mixed=mix == "mixed")
        case = Case(arguments.shape, lengths, arguments.updates, cores, arguments.tokens_per_microbatch, [])
        theirs = [replace(case, microbatch=size) for size in arguments.trl_microbatch]
        speeds = [_speed(run("trl", own, work / f"trl-{mix}-{own.microbatch}", python=trl)[0], own) for own in theirs]
        fastest = max(speeds, key=lambda side: side["tokens_per_second"])
        own = replace(case, microbatch=fastest["settings"]["samples_per_microbatch"], updates=1)
        [memory] = run("trl", own, work / f"trl-{mix}-memory", environment=RETURN_FREED_MEMORY, python=trl)
        megarl = _speed(run("megarl", case, work / f"megarl-{mix}")[0], case)
        own = replace(case, updates=1)
        [megarl_memory] = run("megarl", own, work / f"megarl-{mix}-memory", environment=RETURN_FREED_MEMORY)
        for side, measured in ((megarl, megarl_memory), (fastest, memory)):
            side["bytes_above_state"] = measured["measured_bytes"] - memory["state_bytes"]
        found[mix] = {
            "lengths": lengths,
            "ratio_of_seconds": megarl["median_seconds"] / fastest["median_seconds"],
            "ratio_of_bytes_above_state": megarl["bytes_above_state"] / fastest["bytes_above_state"],
            "state_bytes": memory["state_bytes"],
            "megarl": megarl,
            "trl": fastest,
            "trl_slower_settings": [side for side in speeds if side is not fastest],
        }
    return {"environment_for_memory": RETURN_FREED_MEMORY, "mixes": found}


def packed_against_padded(arguments: argparse.Namespace, cores: int, work: Path) -> dict[str, Any]:
    """Compare megarl with packed samples and with samples padded to the longest one."""
    lengths = _lengths(arguments, mixed=True)
    case = Case(arguments.shape, lengths, arguments.updates, cores, arguments.tokens_per_microbatch, [])
    packed = _speed(run("megarl", case, work / "packed")[0], case)
    padded = _speed(run("megarl", replace(case, padded=True), work / "padded")[0], case)
    return {
        "lengths": lengths,
        "ratio_of_tokens_per_second": packed["tokens_per_second"] / padded["tokens_per_second"],
        "ratio_of_tokens_with_padding": len(lengths) * case.longest / case.num_tokens,
        "packed": packed,
        "padded": padded,
    }


def memory_against_closed_form(arguments: argparse.Namespace, cores: int, work: Path) -> dict[str, Any]:
    """Compare each rank's peak resident memory, without the memory before the model, with rank_memory."""
    lengths, layouts = _lengths(arguments, mixed=False), {}
    for name, layout in LAYOUTS.items():
        threads = 1 if layout else cores
        case = Case(arguments.shape, lengths, arguments.updates, threads, arguments.tokens_per_microbatch, layout)
        folder = work / name.replace(" ", "-")
        ranks = run("megarl", case, folder, num_ranks=2 if layout else 1, environment=RETURN_FREED_MEMORY)
        for rank in ranks:
            rank["measured_to_closed_form"] = rank["measured_bytes"] / rank["closed_form_bytes"]["total"]
        layouts[name] = ranks
    return {"lengths": lengths, "environment": RETURN_FREED_MEMORY, "layouts": layouts}


def saving_against_copy(arguments: argparse.Namespace, cores: int, work: Path) -> dict[str, Any]:
    """Compare the time that a checkpoint blocks training with a plain copy of its bytes to new host memory."""
    lengths, layouts = _lengths(arguments, mixed=False)[:4], {}
    for name in ("1 process", "PP2"):
        layout = LAYOUTS[name]
        case = Case(
            arguments.shape,
            lengths,
            updates=1,
            threads=1 if layout else cores,
            microbatch=arguments.tokens_per_microbatch,
            layout=layout,
            saves=arguments.saves,
        )
        ranks = run("megarl", case, work / name.replace(" ", "-"), num_ranks=2 if layout else 1)
        layouts[name] = [
            {key: median(save[key] for save in rank["saves"]) for key in rank["saves"][0]} | {"saves": rank["saves"]}
            for rank in ranks
        ]
    return {"layouts": layouts}


MEASUREMENTS = {
    "equal": against_transformers,
    "mixed": against_transformers,
    "trl": against_trl,
    "padded": packed_against_padded,
    "memory": memory_against_closed_form,
    "saving": saving_against_copy,
}


def run(
    side: str,
    case: Case,
    folder: Path,
    num_ranks: int = 1,
    environment: Mapping[str, str] = MappingProxyType({}),
    python: Path = Path(sys.executable),
) -> list[dict[str, Any]]:
    """Run every rank in a separate process. Return the result of each."""
    case.write(folder)
    script = [str(python), str(Path(__file__).with_name("trl_side.py" if side == "trl" else f"{side}_side.py"))]
    commands = [[*script, str(folder), str(rank)] for rank in range(num_ranks)]
    environment = {"PYTHONWARNINGS": "ignore", **environment}
    run_logged(*commands, log=folder / "log", timeout_s=TIMEOUT_S, environment=environment)
    return [json.loads((folder / f"{side}-{r}.json").read_text(encoding="utf-8")) for r in range(num_ranks)]


def _speed(side: dict[str, Any], case: Case) -> dict[str, Any]:
    seconds = median(side["seconds"])
    return {
        **side,
        "median_seconds": seconds,
        "tokens": case.num_tokens,
        "tokens_per_second": case.num_tokens / seconds,
    }


def _lengths(arguments: argparse.Namespace, mixed: bool) -> list[list[int]]:
    if mixed:
        return mixed_lengths(arguments.samples, arguments.prompt, arguments.longest_response)
    return equal_lengths(arguments.samples, arguments.prompt, arguments.response)


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        measure,
        option("what", choices=MEASUREMENTS),
        option("--shape", choices=SHAPES, default="smollm2-135m"),
        option("--updates", type=int, default=2, help="updates of each side after a warm-up (%(default)s)"),
        option("--samples", type=int, default=32, help="samples of an update (%(default)s)"),
        option("--prompt", type=int, default=96, help="tokens of a prompt (%(default)s)"),
        option("--response", type=int, default=32, help="tokens of a response, at equal lengths (%(default)s)"),
        option("--longest-response", type=int, default=384, help="tokens, at mixed lengths (%(default)s)"),
        option("--tokens-per-microbatch", type=int, default=1024, help="megarl's microbatch (%(default)s)"),
        option("--saves", type=int, default=3, help="checkpoints; the result is the median (%(default)s)"),
        *(
            option(f"--{other}-microbatch", type=int, nargs="+", default=[8], metavar="SAMPLES", help=MICROBATCH)
            for other in ("transformers", "trl")
        ),
    )
