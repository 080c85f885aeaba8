"""Transformers of image models in Megatron against diffusers' own classes: velocities, loss and gradients in every
layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from megarl.megatron import denoiser_step, parallel
from megarl.megatron.lora.adapters import Adapters
from megarl.megatron.model.build import adapter_parameters, named_weights
from megarl.megatron.model.denoiser.build import build_denoiser
from megarl.megatron.model.denoiser.inputs import Document
from megarl.megatron.optimizer import build_optimizer
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, megatron_holder
from megarl.resharding.families.adapters import peft_holder
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.local import LocalMemory
from megarl.resharding.transports.safetensors import SafetensorsFolder
from tests.closeness import LOSS_FLOOR, Expected, assert_close, close_to, expected
from tests.forked import run_ranks
from tests.lora_reference import plain_name
from tests.marks import exhaustive_but
from tests.parity import Outcome, RankResult, config_of, reduced_gradients, whole_tensors
from tests.timing import WAIT_S
from tests.tiny_denoiser import CONFIG, MODELS, SIZES, TARGETS, TinyDenoiser

NUM_DOCUMENTS = len(SIZES)
RANK, ALPHA = 3, 6
STEP = 0.1
"""Difference in noise level between consecutive denoising steps."""


def loss(documents: Sequence[Document], velocities: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[float]]:
    """Return the weighted squared distance between the mean of the next latents and a target, as in a Gaussian policy's
    log-prob, and the terms of the sum."""
    terms = torch.stack(
        [
            (1 + document.sigma) * (document.latents - STEP * velocity - document.latents.flip(1)).square().mean()
            for document, velocity in zip(documents, velocities, strict=True)
        ]
    )
    return terms.sum() / NUM_DOCUMENTS, (terms.detach() / NUM_DOCUMENTS).tolist()


@dataclass(frozen=True)
class Result(RankResult):
    """A rank's gradients and their norm. Ranks that report metrics also return their terms of the loss and their
    documents' velocities, by number."""

    norm: float
    terms: list[float]
    velocities: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reference(Outcome):
    """The outcome of diffusers' class, with the velocity of each document."""

    velocities: dict[str, torch.Tensor]


def run(
    store,
    rank: int,
    model: TinyDenoiser,
    folder: Path,
    overrides: list[str],
    per_microbatch: int,
    factors: dict[str, torch.Tensor] | None = None,
) -> Result:
    """Run forward and backward passes on one rank. With `factors`, all other parameters are frozen, and the result
    contains the factors' holder and gradients."""
    settings = config_of(folder, *overrides).actor
    config = json.loads((folder / "config.json").read_text())
    parallel.initialize(settings.layout, store, rank, seed=0, timeout_s=WAIT_S)
    holder = megatron_holder(config, settings.layout, rank)
    adapters = None if factors is None else Adapters(settings.lora, config, holder)
    options = {} if adapters is None else {"frozen": holder.shapes, "attach": adapters.attach}
    chunks = build_denoiser(settings, config, torch.float32, **options)
    with SafetensorsFolder(folder) as transport:
        plan = make_plan([huggingface_holder(config)], [holder])
        execute(plan.into(holder.name), named_weights(chunks), transport)
    if adapters is not None:
        plan, local = make_plan([adapters.whole], [adapters.holder]), adapter_parameters(chunks)
        tensors = {name: factor.data for name, factor in local.items()}
        execute(plan.into(holder.name), tensors, LocalMemory({adapters.whole.name: factors}))
    numbers = range(NUM_DOCUMENTS)[parallel.data_parallel_rank() :: settings.layout.dp]
    own = [model.documents[number] for number in numbers]
    microbatches = [own[i : i + per_microbatch] for i in range(0, len(own), per_microbatch)]
    predicted = [velocity for part in denoiser_step.predict(chunks, microbatches) for velocity in part]
    optimizer = build_optimizer(settings, chunks, torch.float32)
    terms = [t for part in denoiser_step.accumulate_gradients(chunks, loss, microbatches) for t in part]
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    gradients = reduced_gradients(chunks)
    if adapters is not None:
        holder = adapters.holder
        gradients = {name: factor.main_grad.clone() for name, factor in adapter_parameters(chunks).items()}
    if not parallel.returns_results():
        return Result(holder, gradients, {}, {}, norm, [], {})
    velocities = {f"document {number}": velocity for number, velocity in zip(numbers, predicted, strict=True)}
    return Result(holder, gradients, {}, {}, norm, terms, velocities)


def plain_outcome(tiny: TinyDenoiser, folder: Path, factors: dict[str, torch.Tensor] | None = None) -> Reference:
    """Run diffusers' class. With `factors`, only PEFT's adapters are trained."""
    model, dtype = tiny.load(folder), torch.get_default_dtype()
    if factors is not None:
        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS))
        trained = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        assert trained.keys() == factors.keys()
        for name, parameter in trained.items():
            parameter.data = factors[name].to(dtype)
    documents = [Document(d.latents.to(dtype), d.sigma, d.caption.to(dtype)) for d in tiny.documents]
    velocities = tiny.velocities(model, documents)
    value, _ = loss(documents, velocities)
    value.backward()
    trained = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    # The last layer does not use queries of captions, so they have no gradient.
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
    norm = torch.nn.utils.get_total_norm(gradients.values())
    by_number = {f"document {number}": velocity.detach() for number, velocity in enumerate(velocities)}
    return Reference(value.item(), norm.item(), gradients, {}, by_number)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {name: model.write(tmp_path_factory.mktemp("model")) for name, model in MODELS.items()}


@pytest.fixture(scope="module")
def folder(folders) -> Path:
    return folders["Z-Image"]


@pytest.fixture(scope="module")
def outcomes(folders) -> dict[str, Expected[Reference]]:
    return {name: expected(partial(plain_outcome, model, folders[name])) for name, model in MODELS.items()}


LAYOUTS = {
    "1 process": "",
    "DP2": "dp: 2",
    "TP2": "tp: 2",
    "TP2, SP": "tp: 2, sequence_parallel: true",
    "PP2": "pp: 2",
    "PP2, DP2": "pp: 2, dp: 2",
    "PP2, VPP2": "pp: 2, vpp: 2",
    "TP2, PP2, SP": "tp: 2, pp: 2, sequence_parallel: true",
    "CP2": "cp: 2",
    "CP3": "cp: 3",  # does not divide the number of tokens
    "CP2, TP2, SP": "cp: 2, tp: 2, sequence_parallel: true",
    "CP2, PP2": "cp: 2, pp: 2",
    "CP2, DP2": "cp: 2, dp: 2",
}
RUNS = {
    f"{layout}; {variant}": ([f"actor.layout={{{axes}}}", *overrides], per_microbatch)
    for layout, axes in LAYOUTS.items()
    for variant, (overrides, per_microbatch) in {
        "4 documents per microbatch": ([], 4),
        "1 document per microbatch, full recompute": (["actor.recompute=full"], 1),
        "2 documents per microbatch, selective recompute": (["actor.recompute=selective"], 2),
    }.items()
}


CASES = {f"{model}; {run}": (model, *RUNS[run]) for model in MODELS for run in RUNS}
QUICK = [
    "Z-Image; PP2, DP2; 4 documents per microbatch",
    "SD3.5; TP2, PP2, SP; 1 document per microbatch, full recompute",
    "SD3.5; CP2, TP2, SP; 2 documents per microbatch, selective recompute",
]


@pytest.mark.parametrize("case", exhaustive_but(CASES, *QUICK))
def test_velocities_and_gradients_match_diffusers(folders, outcomes, case):
    name, overrides, per_microbatch = CASES[case]
    model, folder = MODELS[name], folders[name]
    world_size = config_of(folder, *overrides).actor.layout.world_size
    ranks = run_ranks(world_size, run, model, folder, overrides, per_microbatch)
    assert_same(ranks, whole_tensors(model.config, ranks, "gradients"), outcomes[name])


def assert_same(ranks: Sequence[Result], gradients: dict[str, torch.Tensor], outcome: Expected[Reference]) -> None:
    """Compare the ranks' velocities, loss, whole gradients and norm with the reference's."""
    exact, plain = outcome
    velocities = {name: velocity for rank in ranks for name, velocity in rank.velocities.items()}
    assert_close(velocities, exact.velocities, plain.velocities, "velocity")
    assert sum(term for rank in ranks for term in rank.terms) == close_to(exact.loss, plain.loss, LOSS_FLOOR)
    assert_close(gradients, exact.gradients, plain.gradients, "gradient")
    for rank in ranks:
        assert rank.norm == close_to(exact.norm, plain.norm)


@pytest.fixture(scope="module")
def factors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = peft_holder(CONFIG, RANK, share_experts=False).shapes
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def whole_gradients(ranks: Sequence[Result]) -> dict[str, torch.Tensor]:
    """Return the gradients of the factors on all ranks as whole tensors under PEFT's names."""
    target = peft_holder(CONFIG, RANK, share_experts=False)
    whole = {name: torch.full(shape, torch.nan) for name, shape in target.shapes.items()}
    plan = make_plan([rank.holder for rank in ranks], [target])
    execute(plan.into(target.name), whole, LocalMemory({rank.holder.name: rank.gradients for rank in ranks}))
    return whole


@pytest.fixture(scope="module")
def adapted(folder, factors) -> Expected[Reference]:
    return expected(lambda: plain_outcome(MODELS["Z-Image"], folder, factors))


@pytest.mark.parametrize("layout", exhaustive_but(LAYOUTS, "TP2, SP"))
def test_adapter_gradients_match_peft(folder, factors, adapted, layout):
    overrides, per_microbatch = RUNS[f"{layout}; 1 document per microbatch, full recompute"]
    overrides = [*overrides, f"actor.lora={{rank: {RANK}, alpha: {ALPHA}}}"]
    world_size = config_of(folder, *overrides).actor.layout.world_size
    ranks = run_ranks(world_size, run, MODELS["Z-Image"], folder, overrides, per_microbatch, factors)
    assert_same(ranks, whole_gradients(ranks), adapted)
