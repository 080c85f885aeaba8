"""The steps of first_contact.py: `python -m tools.gpu.steps NAME RESULT` runs one when it reads `go` on standard input.

Without a GPU, set MEGARL_REHEARSAL=1 to run the steps on the CPU with small sizes and find bugs beforehand. The times
are then meaningless.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools" / "benchmarks")]  # benchmarks import each other by bare names

import torch
import torch.distributed as dist
import torch.nn.attention.varlen as varlen_module
from megarl_side import RandomActor, batches_of, closed_form, config_of
from torch.nn.attention.varlen import varlen_attn
from training_case import SHAPES, Case, equal_lengths, mixed_lengths

from megarl.cluster.memory.rank import item_bytes, rank_memory
from megarl.core import device
from megarl.data.local_batch import LocalBatch
from megarl.megatron.main_weights import _main_weights
from megarl.megatron.model import kernels
from megarl.megatron.model.build import named_parameters
from megarl.megatron.optimizer import parts_of
from megarl.models.flops import training_flops
from megarl.models.folder import read_config
from megarl.models.shape import ModelShape
from megarl.models.token_cost import TokenCost
from megarl.ops import output_layer
from megarl.ops.linear_head import log_prob_and_entropy, plain_log_prob_and_entropy
from megarl.ops.packed_attention import documents_of, packed_attention
from megarl.ops.products import add_product, put_product
from megarl.ops.shared_attention import pack_mask, shared_attention
from megarl.ops.swiglu import swiglu
from megarl.resharding.families import huggingface_holder, quantized_sources
from megarl.resharding.families.quantized import SCALES
from megarl.resharding.quantized_copy import QuantizedCopy
from tests.closeness import relative_error
from tests.distributed import test_memory as memory
from tests.gpu.gpus import REHEARSES
from tests.gpu.learning import learn, learning_config
from tests.gpu.models import write_model
from tests.gpu.test_updates import HEADS
from tests.packing import documents
from tests.parity import config_of as model_config
from tests.published_models import CONFIGS
from tests.tiny_model import write_tiny_model

Figures = dict[str, Any]

H100_FLOPS = 989.5e12
"""Peak dense bfloat16 FLOP/s of an H100 SXM according to its datasheet."""

TILES = [(4096, 8192), (8192, 8192), (8192, 16384)]

SHAPES["qwen2.5-1.5b"] = CONFIGS["Qwen2.5-0.5B"] | {
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "intermediate_size": 8960,
}
# The model has as many layers as fit on one GPU with their optimizer state.
SHAPES["llama3.1-8b, 8 layers"] = CONFIGS["Llama-3.1-8B"] | {"num_hidden_layers": 8}
SHAPES["tiny, 64 per head"] = SHAPES["tiny"] | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}


def pick(on_gpu: Any, on_cpu: Any) -> Any:
    return on_gpu if device.on_cuda() else on_cpu


def seconds_of(function: Callable[[], object], repeats: int = 7, inner: int = 1) -> float:
    """Return the median duration of a call, after two calls that are not timed. Each timed round makes `inner`
    calls."""
    rounds = []
    for number in range(2 + repeats):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(inner):
            function()
        device.synchronize()
        if number >= 2:
            rounds.append((time.perf_counter() - start) / inner)
    return median(rounds)


def allocated() -> int:
    return torch.cuda.memory_allocated() if device.on_cuda() else 0


def peak_of(function: Callable[[], object]) -> int:
    """Return the memory in bytes that a call allocates at its peak; 0 on CPU."""
    if device.on_cuda():
        torch.cuda.reset_peak_memory_stats()
    before = allocated()
    function()
    device.synchronize()
    return (torch.cuda.max_memory_allocated() if device.on_cuda() else 0) - before


def random(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=device.device()).normal_(std=std)


def machine() -> Figures:
    """Return versions, the memory of a context and of a communicator with one rank, and the speed of matrix products,
    device copies and host copies.
    """
    figures: Figures = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
    n = pick(8192, 256)
    a, b, wide = random(n, n), random(n, n), random(n, n, dtype=torch.float32)
    if device.on_cuda():
        import triton

        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        query = "name,driver_version,memory.total,clocks.max.sm,power.limit"
        figures |= {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "triton": triton.__version__,
            "nvidia_smi": subprocess.run(
                ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
            ).stdout.strip(),
            "total_bytes": total,
            "context_bytes": total - free - torch.cuda.memory_reserved(),
        }
    operations = 2 * n**3
    figures["bf16_tflops"] = operations / seconds_of(lambda: a @ b) / 1e12
    figures["bf16_to_float32_tflops"] = operations / seconds_of(lambda: put_product(wide, a, b)) / 1e12
    figures["bf16_added_to_float32_tflops"] = operations / seconds_of(lambda: add_product(wide, a.t(), b)) / 1e12
    source, target = (random(pick(2**30, 2**16)) for _ in range(2))
    figures["copy_gb_s"] = 2 * source.nbytes / seconds_of(lambda: target.copy_(source)) / 1e9
    start = time.perf_counter()
    host = device.host_empty_like(source)
    figures["lock_seconds_per_gib"] = (time.perf_counter() - start) / (source.nbytes / 2**30)
    figures["to_host_gb_s"] = source.nbytes / seconds_of(lambda: host.copy_(source, non_blocking=True), 3) / 1e9
    figures["from_host_gb_s"] = source.nbytes / seconds_of(lambda: target.copy_(host, non_blocking=True), 3) / 1e9
    if device.on_cuda():
        free, _ = torch.cuda.mem_get_info()
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        figures["nccl_version"] = torch.cuda.nccl.version()
        dist.all_reduce(wide)
        device.synchronize()
        figures["communicator_of_one_bytes"] = free - torch.cuda.mem_get_info()[0]
        dist.destroy_process_group()
    return figures


def head() -> Figures:
    """Compare the tiled head, at several tile sizes, with full logits: errors against float32, times, memory, and the
    time of the matrix products alone.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    shapes = pick(HEADS, {"tiny": (64, 1000, 100)})
    return {name: _head(*sizes) for name, sizes in shapes.items()}


def _head(hidden_size: int, vocabulary: int, num_tokens: int) -> Figures:
    torch.manual_seed(0)
    hidden = random(num_tokens, hidden_size)
    weight = random(vocabulary, hidden_size, std=hidden_size**-0.5)
    targets = torch.randint(vocabulary, (num_tokens,), device=hidden.device)
    gradient = torch.randn(num_tokens, 2, device=hidden.device)
    hidden.requires_grad_()
    weight.requires_grad_()

    def values(way: str, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if way == "tiled":
            return log_prob_and_entropy(*given, targets, 1.0, vocabulary)
        return torch.stack(plain_log_prob_and_entropy(*given, targets, 1.0, vocabulary), -1)

    def both(way: str) -> None:
        hidden.grad = weight.grad = None
        values(way, (hidden, weight)).backward(gradient)

    def products() -> None:
        """Compute the tiled head's matrix products without tiles, with bfloat16 results."""
        logits = hidden.detach() @ weight.detach().t()
        _ = hidden.detach() @ weight.detach().t(), logits @ weight.detach(), logits.t() @ hidden.detach()

    exact = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    expected = values("plain", tuple(exact))
    expected.backward(gradient)
    actual = values("tiled", (hidden, weight))
    actual.backward(gradient)
    figures: Figures = {
        "hidden": hidden_size,
        "vocabulary": vocabulary,
        "tokens": num_tokens,
        "errors": {
            "values": relative_error(actual.detach(), expected.detach()),
            "hidden_gradient": relative_error(hidden.grad.float(), exact[0].grad),
            "weight_gradient": relative_error(weight.grad.float(), exact[1].grad),
        },
    }
    del exact, expected, actual
    figures["plain"] = {"bytes": peak_of(lambda: both("plain")), "seconds": seconds_of(lambda: both("plain"), 5)}
    weight.main_grad = torch.zeros(weight.shape, device=weight.device)  # as in the trainer
    figures["products_seconds"] = seconds_of(products, 5)
    figures["tiled"] = {}
    before = output_layer.TILE
    for tile in pick(TILES, [(32, 256)]):
        output_layer.TILE = tile
        figures["tiled"][" x ".join(map(str, tile))] = {
            "bytes": peak_of(lambda: both("tiled")),
            "seconds": seconds_of(lambda: both("tiled"), 5),
            "forward_seconds": seconds_of(lambda: values("tiled", (hidden.detach(), weight.detach())), 5),
        }
    output_layer.TILE = before
    return figures


@contextmanager
def trainer(case: Case, kind: type[RandomActor] = RandomActor, **settings: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Build a trainer rank with random weights. Yield it, its batch and its config."""
    with tempfile.TemporaryDirectory() as folder:
        case.write(Path(folder) / "case")
        config = config_of(case, Path(folder) / "case")
        if settings:
            config = config.model_copy(update=settings)
        worker = kind(
            config, Path(folder) / "case", 0, dist.FileStore(f"{folder}/store", 1), threads=pick(1, os.cpu_count())
        )
        try:
            yield worker, batches_of(case, worker)[0], config
        finally:
            worker.close()


def case_of(
    shape: str,
    tokens: int,
    microbatches: int,
    recompute: str = "none",
    dtype: str = "bfloat16",
    mixed: bool = False,
) -> Case:
    """Return a case whose documents have 512 prompt tokens and 1,536 response tokens (16 and 48 on CPU). With
    `mixed`, response lengths follow a log-normal distribution and are at most 6,144 tokens."""
    prompt, response, tokens = pick((512, 1536, tokens), (16, 48, tokens // 32))
    count = microbatches * tokens // (prompt + response)
    lengths = mixed_lengths(count, prompt, 4 * response) if mixed else equal_lengths(count, prompt, response)
    return Case(pick(shape, "tiny, 64 per head"), lengths, 1, 8, tokens, {}, dtype=dtype, recompute=recompute)


def _update(case: Case, profiles: bool = True) -> Figures:
    """Time updates and forward-only passes, and compare the memory with the plan."""
    start = time.perf_counter()
    with trainer(case) as (worker, batch, config):
        device.synchronize()
        figures: Figures = {
            "shape": case.shape,
            "parameters": sum(p.numel() for p in worker.parameters().values()),
            "tokens": case.num_tokens,
            "tokens_per_microbatch": case.microbatch,
            "recompute": case.recompute,
            "kernels": worker.kernels,
            "build_seconds": time.perf_counter() - start,
            "state_bytes": allocated(),
        }

        def update() -> None:
            worker.update(LocalBatch(batch.samples, batch.microbatches))
            worker.end_step()

        def score() -> None:
            worker.keep_log_probs("old", batch)
            worker.end_step()

        start = time.perf_counter()
        update()
        device.synchronize()
        figures["first_seconds"] = time.perf_counter() - start
        update()
        if device.on_cuda():
            torch.cuda.reset_peak_memory_stats()
        figures["seconds"] = seconds = seconds_of(update, 3)
        if device.on_cuda():
            free, total = torch.cuda.mem_get_info()
            figures |= {
                "peak_bytes": torch.cuda.max_memory_allocated(),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
                "outside_torch_bytes": total - free - torch.cuda.memory_reserved(),
            }
        figures["planned"] = closed_form(case, config, 0, [batch])
        shape = ModelShape.of(case.hf_config)
        sizes = [prompt + response for prompt, response in case.lengths]
        scored = sum(response for _, response in case.lengths)
        operations = training_flops(
            shape, sum(sizes), scored, sum(map(TokenCost.of_model(case.hf_config).pairs, sizes))
        )
        figures["mfu_of_h100"] = operations / seconds / H100_FLOPS
        figures["tokens_per_second"] = case.num_tokens / seconds
        figures["forward_seconds"] = seconds_of(score, 3)
        figures["prepare_seconds"] = seconds_of(
            lambda: worker._training_batches(LocalBatch(batch.samples, batch.microbatches)), 3
        )
        figures["optimizer_seconds"] = seconds_of(worker.optimizer.step, 3)
        if profiles:
            figures["profile"] = _profile(update)
        return figures


def _profile(function: Callable[[], object]) -> Figures:
    """Return a call's 25 slowest kernels, the calls that block the host, and the 25 operators with the most self time
    on the host."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device.on_cuda() else []
    with torch.profiler.profile(activities=activities) as profiler:
        function()
        device.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    kernels_by_name: dict[str, list[float]] = {}
    waits: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.name in ("aten::item", "aten::nonzero") or event.name.startswith(("cudaStreamSync", "cudaMemcpy")):
            waits.setdefault(event.name, []).append(event.time_range.elapsed_us())
        if event.device_type == on_device and not event.is_user_annotation:
            kernels_by_name.setdefault(event.name[:160], []).append(event.time_range.elapsed_us())
    totals = sorted(((sum(times), name, len(times)) for name, times in kernels_by_name.items()), reverse=True)
    whole = sum(total for total, _, _ in totals) or 1.0
    top = [
        {"kernel": name, "calls": calls, "milliseconds": total / 1e3, "share": total / whole}
        for total, name, calls in totals[:25]
    ]
    waited = {name: {"calls": len(times), "milliseconds": sum(times) / 1e3} for name, times in waits.items()}
    by_host = sorted(profiler.key_averages(), key=lambda entry: -entry.self_cpu_time_total)[:25]
    host = [{"call": e.key[:80], "calls": e.count, "milliseconds": e.self_cpu_time_total / 1e3} for e in by_host]
    return {"gpu_milliseconds": whole / 1e3, "kernels": top, "waits": waited, "host": host}


def update_1b5() -> Figures:
    return _update(case_of("qwen2.5-1.5b", 8192, 4))


def update_8b() -> Figures:
    return _update(case_of("llama3.1-8b, 8 layers", 8192, 4))


def update_1b5_16k() -> Figures:
    return _update(case_of("qwen2.5-1.5b", 16384, 2))


def update_1b5_mixed() -> Figures:
    return _update(case_of("qwen2.5-1.5b", 8192, 4, mixed=True), profiles=False)


def segments_of_fixed_size() -> Figures:
    """Measure updates without expandable segments, to compare the reserved memory."""
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
    return _update(case_of("llama3.1-8b, 8 layers", 8192, 4), profiles=False)


def offload_test() -> Figures:
    """Run the test that offloading frees device memory, which requires a GPU that no other process uses."""
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_state.py", "-q", "-k", "offload"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return {"status": done.returncode, "output": done.stdout.splitlines()[-15:]}


def update_1b5_long() -> Figures:
    return _update(case_of("qwen2.5-1.5b", 32768, 2, "selective"), profiles=False)


def update_8b_long() -> Figures:
    return _update(case_of("llama3.1-8b, 8 layers", 32768, 2, "full"), profiles=False)


def kernels_alone() -> Figures:
    """Time the layers' small kernels, eager and compiled, and return the minimum number of bytes that each moves."""
    tokens, hidden, rows = pick((8192, 4096, 14336), (64, 128, 256))
    norm = torch.nn.RMSNorm(hidden, eps=1e-5, dtype=torch.bfloat16, device=device.device())
    compiled_norm = torch.compile(norm) if device.on_cuda() else norm
    plain_swiglu = _swiglu_in_torch
    compiled_swiglu = torch.compile(plain_swiglu) if device.on_cuda() else plain_swiglu
    x, gate_and_up = random(tokens, hidden).requires_grad_(), random(tokens, 2 * rows).requires_grad_()
    figures: Figures = {}

    def measure(name: str, function: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor, moved: int) -> None:
        gradient = torch.randn_like(function(given))

        def both() -> None:
            given.grad = None
            function(given).backward(gradient)

        figures[name] = {"seconds": seconds_of(both), "bytes": moved, "peak_bytes": peak_of(both)}

    measure("norm", norm, x, 5 * x.nbytes)
    measure("norm, compiled", compiled_norm, x, 5 * x.nbytes)
    for name, function in {
        "swiglu": swiglu,
        "swiglu, autograd": plain_swiglu,
        "swiglu, compiled": compiled_swiglu,
    }.items():
        measure(name, function, gate_and_up, 4 * gate_and_up.nbytes)
    weight = random(rows, hidden)
    main_grad, gradient, value = torch.zeros(rows, hidden, device=device.device()), random(tokens, rows), x.detach()

    def separately() -> None:
        weight.grad = gradient.t() @ value
        main_grad.add_(weight.grad)

    figures["weight gradient, then added"] = {"seconds": seconds_of(separately)}
    figures["weight gradient, in the product"] = {
        "seconds": seconds_of(lambda: add_product(main_grad, gradient.t(), value))
    }
    figures["operations of a weight gradient"] = 2 * tokens * rows * hidden
    for ways in ({}, {"fused": True}):
        parameter = torch.nn.Parameter(torch.zeros(pick(2**28, 2**16), device=device.device()))
        parameter.grad = torch.ones_like(parameter)
        adam = torch.optim.AdamW([parameter], lr=1e-6, **ways)
        figures[f"adam {ways}"] = {"seconds": seconds_of(adam.step), "bytes": 7 * parameter.nbytes}
    figures["adam of the trainer"] = kernels.adam()
    return figures


def _swiglu_in_torch(gate_and_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def attention() -> Figures:
    """Measure attention over packed documents and over shared prompts, with the head counts of an 8B model."""
    heads, kv_heads, size = pick((32, 8, 128), (4, 2, 32))
    unit = pick(1024, 16)
    lengths = [sum(pair) for pair in mixed_lengths(24, unit // 2, 8 * unit)]
    packs = {
        "16 documents of 2k": [(0, [2 * unit]) for _ in range(16)],
        f"24 documents, {sum(lengths)} tokens": [(0, [length]) for length in lengths],
        "prompts of 4k with 8 responses of 1k": [(4 * unit, [unit] * 8) for _ in range(2)],
    }
    return {name: _attention(heads, kv_heads, size, pack) for name, pack in packs.items()}


def _attention(heads: int, kv_heads: int, size: int, pack: list) -> Figures:
    tokens, boundaries = documents(pack)
    num_tokens = int(tokens.max()) + 1
    query, key, value = (random(num_tokens, n, size).requires_grad_() for n in (heads, kv_heads, kv_heads))
    gradient, scale = random(num_tokens, heads, size), size**-0.5
    # Count the attention of shared tokens once, regardless of how many documents contain them.
    pairs = sum(prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in own) for prompt, own in pack)
    figures: Figures = {"tokens": num_tokens, "operations": 3 * 4 * heads * size * pairs}
    longest = int(boundaries.diff().max())

    def varlen(query, key, value, boundaries, scale):
        return varlen_attn(
            query, key, value, boundaries, boundaries, longest, longest, scale=scale, window_size=(-1, 0)
        )

    def bounds(_tokens, boundaries):
        return boundaries.to(device.device())

    def on_device(describe):
        return lambda *parts: describe(*(part.to(device.device()) for part in parts))

    ways = {"packed": (documents_of, packed_attention), "shared": (pack_mask, shared_attention)}
    if device.on_cuda() and len(tokens) == num_tokens:
        ways |= {"varlen": (bounds, varlen), "varlen with cuDNN": (bounds, varlen)}
    results = {}
    for name, (describe, attend) in ways.items():
        varlen_module._should_use_cudnn = lambda index, name=name: "cuDNN" in name
        try:
            figures[name], results[name] = _attend(
                name, on_device(describe), attend, (tokens, boundaries), (query, key, value), gradient, scale
            )
            figures[name]["tflops"] = figures["operations"] / figures[name]["seconds"] / 1e12
            figures[name]["difference"] = [
                relative_error(a.float(), b.float()) for a, b in zip(results[name], results["packed"], strict=False)
            ]
        except RuntimeError as error:
            figures[name] = {"error": str(error)[:500]}
    return figures


def _attend(name, describe, attend, pack, inputs, gradient, scale) -> tuple[Figures, list[torch.Tensor]]:
    """Return the times and memory of one implementation, and its output and gradients."""
    described = {}
    for threads in (torch.get_num_threads(), 1):
        torch.set_num_threads(threads)
        described[threads] = seconds_of(lambda: describe(*pack), 3)
    mask = describe(*pack)
    trains = device.on_cuda() or name == "packed"  # FlexAttention has no backward pass on CPU

    def both() -> torch.Tensor:
        for x in inputs:
            x.grad = None
        with torch.set_grad_enabled(trains):
            out = attend(*((x if trains else x.detach()) for x in inputs), mask, scale)
        if trains:
            out.backward(gradient)
        return out.detach()

    start = time.perf_counter()
    out = both()
    device.synchronize()
    figures = {
        "describe_seconds_by_threads": described,
        "first_seconds": time.perf_counter() - start,
        "seconds": seconds_of(both, pick(5, 1)),
        "peak_bytes": peak_of(both),
    }
    return figures, [out, *(x.grad.clone() for x in inputs if x.grad is not None)]


def saved() -> Figures:
    """Compare the bytes that the forward pass saves for the backward pass with the memory plan, for each kind
    of model."""
    sizes = pick(dict(hidden_size=1024, num_attention_heads=8, head_dim=128, intermediate_size=2560), {})
    figures: Figures = {}
    for case, (model, overrides) in memory.CASES.items():
        if any("layout" in override for override in overrides):
            continue
        with tempfile.TemporaryDirectory() as name:
            family, keys = memory.MODELS[model]
            folder = write_tiny_model(Path(name), family, **memory.MODEL | sizes | keys)
            settings = ("actor.tokens_per_microbatch=256", "actor.overlap_communication=false")
            config = model_config(folder, *settings, *overrides)
            try:
                measured = memory.measure(dist.FileStore(f"{name}/store", 1), 0, config, folder)
            except RuntimeError as error:
                figures[case] = {"error": str(error)[:500]}
                continue
            tokens = memory.NUM_DOCUMENTS * (memory.PROMPT + memory.RESPONSE)
            rows, hf_config = memory.NUM_DOCUMENTS * memory.RESPONSE, read_config(folder)
            planned = rank_memory(
                hf_config,
                config.actor.layout,
                0,
                item_bytes(config),
                tokens,
                rows,
                1,
                config.actor.recompute,
                config.actor.adapters,
            )
            figures[case] = {"hf_config": hf_config, "tokens": tokens, "rows": rows, **measured}
            figures[case]["planned"] = asdict(planned)
    return figures


def state() -> Figures:
    """Check the main weights, and time the optimizer and offloading."""
    case = case_of("qwen2.5-1.5b", 8192, 1)
    with trainer(case) as (worker, batch, _):
        wrong = sum(
            int((main.to(parameter.dtype) != parameter.view(-1)[span]).sum())
            for part in parts_of(worker.optimizer)
            for main, parameter, span in _main_weights(part)
        )
        figures: Figures = {"main_weights_that_round_elsewhere": wrong, "adam": kernels.adam()}
        metrics = [worker.update(LocalBatch(batch.samples, batch.microbatches)) for _ in range(2)]
        worker.end_step()
        figures["changed_frac"] = [entry["update/changed_frac"].value for entry in metrics]
        count = sum(p.numel() for p in worker.parameters().values())
        figures["optimizer"] = {
            "seconds": seconds_of(worker.optimizer.step, 3),
            "bytes": 30 * count,
        }
        before = _checksums(worker)
        device.release_cache()
        for part in ("gradients", "optimizer", "parameters"):
            rounds = []
            for _ in range(2):
                free = torch.cuda.mem_get_info()[0] if device.on_cuda() else 0
                start = time.perf_counter()
                num_bytes = worker._offload.move_out(part)
                out = time.perf_counter()
                freed = (torch.cuda.mem_get_info()[0] if device.on_cuda() else 0) - free
                begin = time.perf_counter()
                worker._offload.move_in(part)
                rounds.append(
                    {"bytes": num_bytes, "freed": freed, "out": out - start, "in": time.perf_counter() - begin}
                )
            figures[f"offload {part}"] = rounds
        figures["weights_changed_by_offload"] = sum(a != b for a, b in zip(before, _checksums(worker), strict=True))
        worker.update(LocalBatch(batch.samples, batch.microbatches))
        return figures


def _checksums(worker: Any) -> list[int]:
    return [int(weight.view(torch.int16).sum(dtype=torch.int64)) for weight in worker.parameters().values()]


class SameWeights(RandomActor):
    """A RandomActor with the same weights in every dtype: they are seeded by parameter and exact in bfloat16."""

    def _load_weights(self) -> None:
        for number, (name, parameter) in enumerate(sorted(named_parameters(self.chunks).items())):
            generator = torch.Generator(parameter.device).manual_seed(number)
            drawn = torch.empty(parameter.shape, dtype=torch.bfloat16, device=parameter.device)
            parameter.detach().copy_(drawn.normal_(std=0.02, generator=generator) + ("norm" in name))


def precision() -> Figures:
    """Compare the log-probs and gradient norm of a model with 1.5B parameters between bfloat16 and float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    logprobs: dict[str, torch.Tensor] = {}
    norms: dict[str, float] = {}
    losses: dict[str, float] = {}
    for dtype in ("bfloat16", "float32"):
        case = replace(case_of("qwen2.5-1.5b", 8192, 1, "selective", dtype), microbatch=pick(4096, 128))
        with trainer(case, SameWeights) as (worker, batch, _):
            scored = worker._forward(batch)
            logprobs[dtype] = torch.cat([columns[:, 0].cpu() for columns in scored.values()])
            metrics = worker.update(LocalBatch(batch.samples, batch.microbatches))
            norms[dtype], losses[dtype] = metrics["policy/grad_norm"].value, metrics["policy/loss"].value
        del worker
        device.release_cache()
    difference = (logprobs["bfloat16"] - logprobs["float32"]).abs()
    return {
        "logprob_abs_difference": {"mean": difference.mean().item(), "max": difference.max().item()},
        "logprob_mean": {dtype: values.mean().item() for dtype, values in logprobs.items()},
        "loss": losses,
        "grad_norm": norms,
    }


def fp8_blocks() -> Figures:
    """Quantize weights to fp8 blocks on the GPU, and compare them bit by bit with vLLM's formula."""
    config = SHAPES[pick("qwen2.5-1.5b", "tiny, 64 per head")] | {"num_hidden_layers": 2, "tie_word_embeddings": True}
    holder = replace(huggingface_holder(config, "bfloat16"), name="folder")
    [sent] = quantized_sources(config, [holder])
    torch.manual_seed(0)
    weights = {name: torch.randn(shape).bfloat16() / 50 for name, shape in holder.shapes.items()}
    moved = {name: weight.to(device.device()) for name, weight in weights.items()}
    copy = QuantizedCopy(holder.shard, sent.shard, dict(holder.shapes), lambda _: "alone", device.device())
    seconds = seconds_of(lambda: copy.fill(moved, lambda tensor, group: None), 3)
    unequal = []
    for name in copy.tensors:
        if not name.endswith(SCALES):
            expected = dict(zip((name, name + SCALES), _in_blocks(moved[name]), strict=True))
            unequal += [n for n, e in expected.items() if not torch.equal(copy.tensors[n].float(), e.float())]
    return {
        "tensors": len(copy.tensors),
        "unequal": unequal,
        "seconds": seconds,
        "bytes": sum(w.nbytes for w in moved.values()),
    }


def _in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to blocks of 128 x 128 by the formula of vLLM's per_block_cast_to_fp8."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    largest = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
    scales = largest / torch.finfo(torch.float8_e4m3fn).max
    quantized = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn).view(padded.shape)
    return quantized[:rows, :columns], scales.view(blocks.shape[0], blocks.shape[2])


def learning() -> Figures:
    """Train with GRPO on a tiny task. Return the rewards."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name) / "model", "dense")
        start = time.perf_counter()
        rewards = learn(dist.FileStore(f"{name}/store", 1), 0, learning_config(folder), folder, pick(20, 2))
    return {"rewards": rewards, "seconds": time.perf_counter() - start}


def tests() -> Figures:
    """Run the tests for one GPU, except complete runs, which require Ray and vLLM."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/gpu", "--ignore=tests/gpu/test_runs.py", "-q"]
        # Exclude a test that reads the device's free memory, which offload_test runs alone.
        command += ["--deselect=tests/gpu/test_state.py::test_offload_frees_the_reported_bytes"]
        command += pick(["--numprocesses=6", "--timeout=140"], ["-k", "gradients_equal and dense"])
        subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT)
        cases = list(ElementTree.parse(report).iter("testcase"))
    failures = {
        case.get("name"): (child.get("message") or "")[:300] + "\n" + (child.text or "")[-1500:]
        for case in cases
        for child in case
        if child.tag in ("failure", "error")
    }
    skipped = [case.get("name") for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failures) - len(skipped),
        "failures": failures,
        "skipped": skipped,
        "seconds": {case.get("name"): float(case.get("time", 0)) for case in cases},
    }


def te_layers() -> Figures:
    """Compare Transformer Engine's layers with plain torch in float32, if it is installed."""
    if not device.on_cuda() or importlib.util.find_spec("transformer_engine") is None:
        return {"installed": False}
    from tools.gpu.te_layers import compare_layers

    return {"installed": True, "errors": compare_layers()}


STEPS: dict[str, Callable[[], Figures]] = {
    "machine": machine,
    "head": head,
    "update_1b5": update_1b5,
    "update_8b": update_8b,
    "kernels": kernels_alone,
    "tests": tests,
    "learning": learning,
    "precision": precision,
    "fp8_blocks": fp8_blocks,
    "attention": attention,
    "saved": saved,
    "te_layers": te_layers,
    "state": state,
    "update_1b5_16k": update_1b5_16k,
    "update_1b5_mixed": update_1b5_mixed,
    "segments_of_fixed_size": segments_of_fixed_size,
    "offload_test": offload_test,
    "update_1b5_long": update_1b5_long,
    "update_8b_long": update_8b_long,
}


def main() -> None:
    name, result = sys.argv[1], Path(sys.argv[2])
    if not device.on_cuda() and not REHEARSES:
        sys.exit("torch finds no GPU. Fix: run this on a machine with a GPU, or set MEGARL_REHEARSAL=1")
    if sys.stdin.readline().strip() != "go":
        sys.exit("ended before the step began")
    result.write_text(json.dumps(STEPS[name](), indent=1) + "\n", encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # threads of process groups may wait for ranks that have exited


if __name__ == "__main__":
    main()
