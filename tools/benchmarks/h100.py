"""Measure all single-GPU figures in one call: training step, head, sampling, and a run whose engine shares the GPU.

python tools/benchmarks/h100.py --out tools/benchmarks/results/h100.json
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmark import ROOT, option, run_benchmark
from training_case import SHAPES

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 3600
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all measurements.

    Attributes:
        steps: model shape, and number of documents with 1,024 tokens per microbatch.
        heads: number of tokens, hidden size and vocabulary size.
        shape: model shape for sampling and for the run.
        sequences: number of concurrently sampled sequences.
        tokens: tokens per sequence.
    """

    steps: tuple[tuple[str, int], ...]
    heads: tuple[tuple[int, int, int], ...]
    shape: str
    sequences: int
    tokens: int


SIZES = {
    "full": Sizes(
        steps=(("qwen2.5-1.5b", 8), ("qwen2.5-1.5b", 32), ("llama3.1-8b, 8 layers", 8), ("llama3.1-8b, 8 layers", 32)),
        heads=((4096, 1536, 151936), (8192, 4096, 128256), (32768, 1536, 151936)),
        shape="qwen2.5-1.5b",
        sequences=1024,
        tokens=512,
    ),
    "small": Sizes(steps=(("tiny", 1),), heads=((64, 32, 1000),), shape="tiny", sequences=8, tokens=8),
}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.only:  # a child of `_in_own_process`
        print(json.dumps(MEASUREMENTS[arguments.only](SIZES[arguments.sizes])))
        sys.exit()
    return {"sizes": arguments.sizes, **{name: _in_own_process(name, arguments.sizes) for name in MEASUREMENTS}}


def _in_own_process(name: str, sizes: str) -> Any:
    """Run a measurement in a separate process, which has all of the GPU's memory."""
    print(f"running: {name}", flush=True)
    return json.loads(_run([__file__, "--only", name, "--sizes", sizes]).splitlines()[-1])


def _run(arguments: list[str]) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        sys.exit(f"h100: error: exit status {done.returncode} of {' '.join(arguments)}")
    return done.stdout


def steps(sizes: Sizes) -> list[dict[str, Any]]:
    """Measure the model FLOPs utilization of the training step with mfu.py."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for shape, documents in sizes.steps:
            out = Path(scratch) / f"{len(found)}.json"
            options = ["--shape", shape, f"--documents={documents}", "--microbatches=2", "--recompute=selective"]
            _run([str(Path(__file__).with_name("mfu.py")), *options, "--out", str(out)])
            found.append(json.loads(out.read_text(encoding="utf-8")))
    return found


def heads(sizes: Sizes) -> list[dict[str, Any]]:
    """Measure the head's forward and backward pass against full logits compiled by torch and, if Liger is installed,
    against its fused loss, which has no entropy."""
    import torch

    from megarl.core import device
    from megarl.ops.linear_head import log_prob_and_entropy, plain_log_prob_and_entropy

    compiled = torch.compile(plain_log_prob_and_entropy)
    found = []
    for num_tokens, hidden_size, vocabulary in sizes.heads:
        generator = torch.Generator(device.device()).manual_seed(0)
        given = dict(generator=generator, device=device.device(), dtype=torch.bfloat16)
        hidden = torch.randn(num_tokens, hidden_size, **given).requires_grad_()
        weight = (torch.randn(vocabulary, hidden_size, **given) / hidden_size**0.5).requires_grad_()
        targets = torch.randint(vocabulary, (num_tokens,), generator=generator, device=device.device())
        ways: dict[str, Callable[..., torch.Tensor]] = {
            "megarl": lambda *tensors, size: log_prob_and_entropy(*tensors, 1.0, size).sum(),
            "torch.compile": lambda *tensors, size: sum(part.sum() for part in compiled(*tensors, 1.0, size)),
        }
        if importlib.util.find_spec("liger_kernel") is not None:
            ways["Liger, without entropy"] = _liger
        measured = {name: _measured(way, hidden, weight, targets, vocabulary) for name, way in ways.items()}
        found.append({"tokens": num_tokens, "hidden": hidden_size, "vocabulary": vocabulary, "ways": measured})
    return found


def _liger(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, size: int) -> torch.Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, targets)


def _measured(
    way: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocabulary: int,
) -> dict[str, float | None]:
    """Return the median seconds after two warm-up passes, and the peak bytes beyond the inputs (None on CPU)."""
    import torch

    from megarl.core import device

    seconds, before = [], torch.cuda.memory_allocated() if device.on_cuda() else 0
    for number in range(2 + REPEATS):
        hidden.grad = weight.grad = None
        if number == 2 and device.on_cuda():
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        way(hidden, weight, targets, size=vocabulary).backward()
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() - before if device.on_cuda() else None
    hidden.grad = weight.grad = None
    return {"seconds": median(seconds[2:]), "peak_bytes": peak}


def sampling(sizes: Sizes) -> dict[str, float]:
    """Measure an engine's tokens per second with megarl's requests, which have log-probs and seeds, and with vLLM's own
    `generate`."""
    from megarl.config.load import load
    from megarl.core.types import Prompt
    from megarl.rollout.engine import SamplingRequest
    from megarl.rollout.vllm.engine import VllmEngine, rollout_arguments
    from megarl.rollout.vllm.environment import environment
    from tests.paths import BASE

    os.environ.update(environment(1, threads=len(os.sched_getaffinity(0)), index=0))
    with tempfile.TemporaryDirectory() as scratch:
        folder = _write_config(sizes.shape, Path(scratch) / "model")
        keys = [f"model.path={folder}", "data.source=arithmetic", f"rollout.max_new_tokens={sizes.tokens}"]
        keys += [f"rollout.context_length={2 * sizes.tokens}", f"rollout.kv_cache_gib={_kv_cache_gib(sizes)}"]
        rollout = load(BASE, keys).rollout
        engine = VllmEngine(rollout, rollout_arguments(rollout, folder, "bfloat16", seed=0))
        engine.hold(1)  # random weights, whose responses rarely end early
        prompt = tuple(range(5, 5 + sizes.tokens // 2))

        def ours() -> int:
            requests = [SamplingRequest(f"{i}", Prompt(f"{i}", "", prompt), seed=i) for i in range(sizes.sequences)]
            return sum(len(sample.response_ids) for sample in asyncio.run(engine.generate(requests)))

        def plain() -> int:
            from vllm import SamplingParams

            asked = [{"prompt_token_ids": [*prompt]} for _ in range(sizes.sequences)]
            parameters = SamplingParams(temperature=1.0, max_tokens=sizes.tokens)
            answers = engine._llm.generate(asked, parameters, use_tqdm=False)
            return sum(len(answer.outputs[0].token_ids) for answer in answers)

        ways = {"megarl": ours, "plain vLLM": plain}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(3):  # alternating; the first round is a warm-up
            for name, way in ways.items():
                begin = time.perf_counter()
                num_tokens = way()
                rates[name].append(num_tokens / (time.perf_counter() - begin))
    return {name: median(found[1:]) for name, found in rates.items()}


def _kv_cache_gib(sizes: Sizes) -> float:
    """Return enough for a quarter of the sequences, or a little in a trial on CPU."""
    shape = SHAPES[sizes.shape]
    head = shape["hidden_size"] // shape["num_attention_heads"]
    of_token = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head
    return round(max(0.05, sizes.sequences / 4 * 2 * sizes.tokens * of_token / 2**30), 2)


def _write_config(shape: str, folder: Path) -> Path:
    """Write config.json and a tokenizer. Engines initialize random weights."""
    from transformers import AutoConfig

    from tests.tiny_model import tiny_tokenizer

    given = dict(SHAPES[shape])
    config = AutoConfig.for_model(given.pop("model_type"), **given, max_position_embeddings=8192, eos_token_id=1)
    config.save_pretrained(folder)
    tiny_tokenizer(given["vocab_size"]).save_pretrained(folder)
    return folder


def run(sizes: Sizes) -> dict[str, Any]:
    """Measure a run whose trainer and engine take turns on the GPU: the seconds of a step's phases, and the refit's
    bytes per second compared with a copy on the device."""
    from tests.tiny_model import write_tiny_model

    keys = ["run.steps=3", "run.name=h100", "run.export=false", "model.dtype=bfloat16", "data.source=arithmetic"]
    keys += ["cluster.placement=colocated", "rollout.sleep=true", "actor.offload=[gradients, optimizer]"]
    keys += [f"rollout.max_new_tokens={sizes.tokens}", f"rollout.context_length={sizes.tokens + 128}"]
    keys += [f"rollout.kv_cache_gib={_kv_cache_gib(sizes)}", "batch.samples_per_prompt=8"]
    keys += [f"batch.{name}={max(1, sizes.sequences // 8)}" for name in ("prompts_per_step", "prompts_per_update")]
    keys += ["actor.recompute=selective", "actor.tokens_per_microbatch=8192"]
    with tempfile.TemporaryDirectory() as scratch:
        shape = dict(SHAPES[sizes.shape])
        model = write_tiny_model(
            Path(scratch) / "model", shape.pop("model_type"), **shape, max_position_embeddings=8192
        )
        keys += [f"model.path={model}", f"run.folder={scratch}/runs"]
        _run(["-m", "megarl.cli", "train", str(ROOT / "configs/base.yaml"), *keys])
        lines = (Path(scratch) / "runs/h100/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(lines[-1])
    phases = {name.removeprefix("time/"): value for name, value in last.items() if name.startswith("time/")}
    return {
        "seconds": phases,
        "refit_gb_per_second": last["refit/gb"] / last["time/refit"],
        "copy_gb_per_second": _copy_gb_per_second(),
    }


def _copy_gb_per_second() -> float:
    import torch

    from megarl.core import device

    source = torch.ones(2**28, dtype=torch.bfloat16, device=device.device())
    target, seconds = torch.empty_like(source), []
    for _ in range(2 + REPEATS):
        begin = time.perf_counter()
        target.copy_(source)
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    return source.nbytes / 1e9 / median(seconds[2:])


MEASUREMENTS: dict[str, Callable[[Sizes], Any]] = {"steps": steps, "heads": heads, "sampling": sampling, "run": run}


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        measure,
        option("--sizes", choices=SIZES, default="full", help="small: a trial on CPU (default: %(default)s)"),
        option("--only", choices=MEASUREMENTS, help="run only this measurement, and print it as JSON"),
    )
