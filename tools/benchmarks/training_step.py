"""Measure megarl's training step: against transformers and TRL, packed against padded samples, memory against its
closed form, the time that a checkpoint blocks training, the tiled head and divergences against full logits, and
distillation against TRL.

.venv/bin/python tools/benchmarks/training_step.py equal --out tools/benchmarks/results/step_equal.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, get_args

import torch
from benchmark import in_new_process, run_benchmark, run_logged
from quickstart import build_environment
from training_case import SHAPES, Case, Ids, equal_lengths, mixed_lengths, padded, peak_rss_bytes, timed
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.ops.divergence import DivergenceKind, divergence, plain_divergence
from megarl.ops.linear_head import log_prob_and_entropy, plain_log_prob_and_entropy
from megarl.ops.output_layer import OutputLayer

RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""Environment variables with which glibc returns freed memory, so that resident memory is close to memory in use."""

LAYOUTS = {"1 process": {}, "PP2": {"pp": 2}, "DP2": {"dp": 2}}


def against_transformers(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Compare megarl with transformers on the same samples, each in one process with all cores."""
    case = case_of(arguments, mixed=arguments.what == "mixed")
    megarl = speed("megarl", case, work / "megarl")
    other = speed("transformers", replace(case, microbatch=arguments.other_microbatch), work)
    ratio = megarl["tokens_per_second"] / other["tokens_per_second"]
    return {"lengths": case.lengths, "ratio_of_tokens_per_second": ratio, "megarl": megarl, "transformers": other}


def against_trl(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Compare a GRPO update on the same samples, with mixed and with equal lengths: seconds and, in separate runs, the
    peak resident memory minus the memory before the model is built, the weights, the gradients and Adam's state."""
    python, found = build_environment(work / "environment"), {}
    for mix in ("mixed", "equal"):
        case = case_of(arguments, mixed=mix == "mixed")
        sides, memories = {}, {}
        for side, own in (("trl", replace(case, microbatch=arguments.other_microbatch)), ("megarl", case)):
            interpreter = python if side == "trl" else Path(sys.executable)
            sides[side] = speed(side, own, work / mix / side, interpreter)
            own, folder = replace(own, updates=1), work / mix / f"{side}-memory"
            [memories[side]] = run(side, own, folder, RETURN_FREED_MEMORY, interpreter)
        megarl, trl = sides["megarl"], sides["trl"]
        state_bytes = memories["trl"]["state_bytes"]
        for side, measured in memories.items():
            sides[side]["bytes_above_state"] = measured["measured_bytes"] - state_bytes
        found[mix] = {
            "lengths": case.lengths,
            "ratio_of_seconds": megarl["median_seconds"] / trl["median_seconds"],
            "ratio_of_bytes_above_state": megarl["bytes_above_state"] / trl["bytes_above_state"],
            "state_bytes": state_bytes,
            **sides,
        }
    return {"environment_for_memory": RETURN_FREED_MEMORY, "mixes": found}


def distillation_against_trl(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Compare an update with GKDTrainer's on the same samples: the Jensen-Shannon divergence from a teacher of the
    model's size, including the teacher's pass. Report seconds and, from separate runs, peak resident memory above the
    weights that the process holds, gradients and Adam's state. megarl's process holds only the teacher's output
    layer."""
    python, case = build_environment(work / "environment"), replace(case_of(arguments, mixed=True), has_teacher=True)
    of_side = {"trl": replace(case, microbatch=arguments.other_microbatch), "megarl": case}
    interpreters = {"trl": python, "megarl": Path(sys.executable)}
    sides = {side: speed(side, own, work / side, interpreters[side]) for side, own in of_side.items()}
    for side, own in of_side.items():
        folder = work / f"{side}-memory"
        [memory] = run(side, replace(own, updates=1), folder, RETURN_FREED_MEMORY, interpreters[side])
        if side == "trl":
            held = memory["state_bytes"]
        else:
            held = sum(memory["closed_form_bytes"][part] for part in ("weights", "gradients", "optimizer"))
            held += 4 * case.hf_config["vocab_size"] * case.hf_config["hidden_size"]
        sides[side]["bytes_above_state"] = memory["measured_bytes"] - held
    megarl, trl = sides["megarl"], sides["trl"]
    return {
        "lengths": case.lengths,
        "environment_for_memory": RETURN_FREED_MEMORY,
        "ratio_of_seconds": megarl["median_seconds"] / trl["median_seconds"],
        "ratio_of_bytes_above_state": megarl["bytes_above_state"] / trl["bytes_above_state"],
        **sides,
    }


def packed_against_padded(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Compare packed samples in megarl with samples padded to the longest one."""
    case = case_of(arguments, mixed=True)
    packed = speed("megarl", case, work / "packed")
    padded = speed("megarl", replace(case, padded=True), work / "padded")
    return {
        "lengths": case.lengths,
        "ratio_of_tokens_per_second": packed["tokens_per_second"] / padded["tokens_per_second"],
        "ratio_of_tokens_with_padding": len(case.lengths) * case.longest / case.num_tokens,
        "packed": packed,
        "padded": padded,
    }


def memory_against_closed_form(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Compare each rank's peak resident memory, minus the memory before the model is built, with rank_memory."""
    layouts = {}
    for name, layout in LAYOUTS.items():
        case = case_of(arguments, layout=layout)
        layouts[name] = run("megarl", case, work / name.replace(" ", "-"), environment=RETURN_FREED_MEMORY)
        for rank in layouts[name]:
            rank["measured_to_closed_form"] = rank["measured_bytes"] / rank["closed_form_bytes"]["total"]
    return {"lengths": case.lengths, "environment": RETURN_FREED_MEMORY, "layouts": layouts}


def saving_against_copy(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Compare the time that a checkpoint blocks training with a plain copy of its bytes to new host memory."""
    layouts = {}
    for name in ("1 process", "PP2"):
        case = case_of(arguments, layout=LAYOUTS[name])
        case = replace(case, lengths=case.lengths[:4], updates=1, saves=arguments.saves)
        layouts[name] = [
            {key: median(save[key] for save in rank["saves"]) for key in rank["saves"][0]} | {"saves": rank["saves"]}
            for rank in run("megarl", case, work / name.replace(" ", "-"))
        ]
    return {"layouts": layouts}


def tiled_against_full_logits(arguments: argparse.Namespace, _: Path) -> dict[str, Any]:
    """Compare the head's forward and backward pass with full logits, on as many rows as an update has tokens."""
    hf_config = SHAPES[arguments.shape]
    sizes = dict(vocabulary=hf_config["vocab_size"], hidden=hf_config["hidden_size"], dtype="float32")
    sizes["tokens"] = case_of(arguments).num_tokens
    return sizes | sides_of_head(sizes, arguments.updates)


def divergences_against_full_logits(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Compare each divergence's forward and backward pass with full logits of both models, and with the head's. The
    teacher is as large as the student."""
    found = tiled_against_full_logits(arguments, work)
    kinds: dict[str, Any] = {kind: sides_of_head(found, arguments.updates, kind) for kind in get_args(DivergenceKind)}
    for sides in kinds.values():
        sides["ratio_to_head"] = sides["tiled"]["median_seconds"] / found["tiled"]["median_seconds"]
    return {**found, "divergences": kinds}


def sides_of_head(
    sizes: Mapping[str, Any], repeats: int, divergence_kind: DivergenceKind | None = None
) -> dict[str, Any]:
    vocabulary, hidden, tokens = (sizes[name] for name in ("vocabulary", "hidden", "tokens"))
    plain, tiled = (
        in_new_process(head_side, is_tiled, vocabulary, hidden, tokens, repeats, divergence_kind)
        for is_tiled in (False, True)
    )
    return {
        "ratio_of_seconds": tiled["median_seconds"] / plain["median_seconds"],
        "share_of_logits": {"tiled": tiled["extra_bytes"] / (tokens * vocabulary * 4)},
        "plain": plain,
        "tiled": tiled,
    }


def head_side(
    is_tiled: bool,
    vocabulary: int,
    hidden_size: int,
    num_tokens: int,
    repeats: int,
    divergence_kind: DivergenceKind | None = None,
) -> dict[str, Any]:
    """Measure one side with all cores: log-prob and entropy, or a divergence. The peak memory is that of the first
    pass, including the libraries' setup; that pass is not timed."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator, requires_grad=True)
    weight = torch.empty(vocabulary, hidden_size).normal_(std=hidden_size**-0.5, generator=generator).requires_grad_()
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator)
    gradients = torch.randn(num_tokens, 2, generator=generator)
    teacher = None
    if divergence_kind is not None:
        sizes = ((num_tokens, 1.0), (vocabulary, hidden_size**-0.5))
        teacher = OutputLayer(
            *(torch.empty(rows, hidden_size).normal_(std=std, generator=generator) for rows, std in sizes)
        )
    before = peak_rss_bytes()
    if is_tiled:
        weight.main_grad = torch.ones(weight.shape).zero_()  # commits its memory

    def forward_backward() -> None:
        hidden.grad = weight.grad = None
        if teacher is not None:
            compute = divergence if is_tiled else plain_divergence
            value = compute(hidden, weight, teacher, divergence_kind, 1.0, vocabulary)
            value.backward(gradients[:, 0])
            return
        if is_tiled:
            scored = log_prob_and_entropy(hidden, weight, targets, 1.0, vocabulary)
        else:
            scored = torch.stack(plain_log_prob_and_entropy(hidden, weight, targets, 1.0, vocabulary), -1)
        (scored * gradients).sum().backward()

    forward_backward()
    extra_bytes = peak_rss_bytes() - before - 4 * (hidden.numel() + weight.numel())
    seconds = timed(forward_backward, repeats)
    return {"median_seconds": median(seconds), "seconds": seconds, "extra_bytes": extra_bytes}


MEASUREMENTS = {
    "equal": against_transformers,
    "mixed": against_transformers,
    "trl": against_trl,
    "padded": packed_against_padded,
    "memory": memory_against_closed_form,
    "saving": saving_against_copy,
    "head": tiled_against_full_logits,
    "divergence": divergences_against_full_logits,
    "distillation": distillation_against_trl,
}


def case_of(arguments: argparse.Namespace, mixed: bool = False, layout: Mapping[str, int] | None = None) -> Case:
    """Return a case with the options' sizes. A rank has all cores, or one if the layout has several ranks."""
    response = arguments.longest_response if mixed else arguments.response
    lengths = (mixed_lengths if mixed else equal_lengths)(arguments.samples, arguments.prompt, response)
    threads, layout = 1 if layout else len(os.sched_getaffinity(0)), layout or {}
    return Case(arguments.shape, lengths, arguments.updates, threads, arguments.tokens_per_microbatch, layout)


def run(
    side: str,
    case: Case,
    folder: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    python: Path = Path(sys.executable),
) -> list[dict[str, Any]]:
    """Run every rank in a separate process. Return the result of each."""
    if side == "transformers":
        return [in_new_process(transformers_side, case)]
    case.write(folder)
    script = [str(python), str(Path(__file__).with_name(f"{side}_side.py"))]
    ranks = range(2 if case.layout else 1)
    commands = [[*script, str(folder), str(rank)] for rank in ranks]
    environment = {"PYTHONWARNINGS": "ignore", **environment}
    run_logged(*commands, log=folder / "log", environment=environment)
    return [json.loads((folder / f"{side}-{r}.json").read_text(encoding="utf-8")) for r in ranks]


def speed(side: str, case: Case, folder: Path, python: Path = Path(sys.executable)) -> dict[str, Any]:
    """Run one rank. Return its result with its median seconds and its tokens per second."""
    [result] = run(side, case, folder, python=python)
    seconds, tokens = median(result["seconds"]), case.num_tokens
    return {**result, "median_seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}


def transformers_side(case: Case) -> dict[str, Any]:
    """Run the same updates in plain transformers and torch.

    Like TRL's trainer, it pads prompts on the left and responses on the right to the longest of each microbatch, and
    computes logits for the response only (`logits_to_keep`). It uses torch's fused AdamW and SDPA attention.
    """
    torch.set_num_threads(case.threads)
    config = AutoConfig.for_model(**case.hf_config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    samples = case.ids()
    microbatches = [samples[i : i + case.microbatch] for i in range(0, len(samples), case.microbatch)]
    num_rows = sum(len(response) for _, response in samples)
    update(model, optimizer, microbatches[:1], num_rows)  # fills caches and memory pools
    return {
        "seconds": timed(lambda: update(model, optimizer, microbatches, num_rows), case.updates),
        "settings": {"samples_per_microbatch": case.microbatch, "attention": "sdpa", "threads": case.threads},
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


def update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, microbatches: Sequence[list[Ids]], num_rows: int
) -> None:
    for number, members in enumerate(microbatches):
        loss(model, members, sign=(-1.0) ** number, num_rows=num_rows).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def loss(model: torch.nn.Module, members: Sequence[Ids], sign: float, num_rows: int) -> torch.Tensor:
    """Return the clipped objective at the first update, where the old policy equals the current one."""
    sides = padded(members)
    tokens = torch.cat([sides["prompt_ids"], sides["completion_ids"]], 1)
    mask = torch.cat([sides["prompt_mask"], sides["completion_mask"]], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    width = sides["completion_ids"].shape[1]
    logits = model(tokens, attention_mask=mask, position_ids=positions, logits_to_keep=width + 1).logits[:, :-1]
    log_prob = torch.log_softmax(logits.float(), -1).gather(2, sides["completion_ids"][..., None])[..., 0]
    ratio = (log_prob - log_prob.detach()).exp()
    surrogate = torch.minimum(ratio * sign, ratio.clamp(0.8, 1.2) * sign)
    return -(surrogate * sides["completion_mask"]).sum() / num_rows


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        MEASUREMENTS,
        ("--shape", dict(choices=SHAPES, default="smollm2-135m")),
        ("--updates", dict(type=int, default=2, help="updates of each side after a warm-up (%(default)s)")),
        ("--samples", dict(type=int, default=32, help="samples of an update (%(default)s)")),
        ("--prompt", dict(type=int, default=96, help="tokens of a prompt (%(default)s)")),
        ("--response", dict(type=int, default=32, help="tokens of a response, at equal lengths (%(default)s)")),
        ("--longest-response", dict(type=int, default=384, help="tokens, at mixed lengths (%(default)s)")),
        ("--tokens-per-microbatch", dict(type=int, default=1024, help="megarl's microbatch (%(default)s)")),
        ("--saves", dict(type=int, default=3, help="checkpoints; the result is the median (%(default)s)")),
        ("--other-microbatch", dict(type=int, default=8, help="samples, in transformers and TRL (%(default)s)")),
    )
