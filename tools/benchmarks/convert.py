"""megarl convert on a random model of about 3B parameters: seconds and memory, against reading and writing its bytes.

.venv/bin/python tools/benchmarks/convert.py --out tools/benchmarks/results/convert.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from benchmark import ROOT, children_cpu_seconds, option, run_benchmark

from megarl.models.folder import read_config
from megarl.resharding.families import huggingface_holder
from megarl.resharding.piece import whole
from megarl.resharding.transports.safetensors import SafetensorsFolder, write_file

# The shape of Llama-3.2-3B.
MODEL = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_size=3072,
    intermediate_size=8192,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
SIZES = {"3B": 28, "tiny": 2}
"""Name -> layers."""

TOY = dict(num_hidden_layers=2, hidden_size=24, intermediate_size=32, head_dim=8, vocab_size=128)
"""A model for the time that the command takes to start."""

BLOCK_BYTES = 64 * 2**20


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="convert-", dir=arguments.work) as name:
        return measure_in(Path(name), SIZES[arguments.size])


def measure_in(work: Path, num_layers: int) -> dict[str, Any]:
    """Each conversion with and without reading back, and just before it the plain reading and writing of its bytes."""
    folder, checkpoint = work / "hf", work / "checkpoint"
    num_parameters = write_model(folder, {**MODEL, "num_hidden_layers": num_layers})
    write_model(work / "toy", {**MODEL, **TOY})
    start, start_cpu, _ = run(["hf-to-megatron", "--hf", work / "toy", "--out", work / "toy checkpoint"], work / "toy")
    there = ["hf-to-megatron", "--hf", folder, "--tp", "2", "--pp", "2"]
    back = ["megatron-to-hf", "--checkpoint", checkpoint]
    runs = {}
    for name, command, source, out in (
        ("hf-to-megatron", there, folder, checkpoint),
        ("hf-to-megatron --no-verify", [*there, "--no-verify"], folder, work / "new"),
        ("megatron-to-hf", back, checkpoint, work / "new"),
        ("megatron-to-hf --no-verify", [*back, "--no-verify"], checkpoint, work / "new"),
    ):
        plain = plain_copy(source, work / "copy")
        seconds, cpu_seconds, peak = run([*command, "--out", out], source)
        floor = plain["read_seconds"] + plain["write_seconds"]
        print(f"{name}: {seconds:.1f} s ({cpu_seconds:.1f} of CPU), {floor:.1f} s plain, {peak:.2f} GB", flush=True)
        found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_gb": peak}
        runs[name] = {**found, **plain, "ratio": seconds / floor}
        if name == "megatron-to-hf" and not same_weights(folder, out):
            raise RuntimeError("the model came back changed")
        shutil.rmtree(work / "new", ignore_errors=True)
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    starts = {"start_seconds": start, "start_cpu_seconds": start_cpu}
    return {"num_parameters": num_parameters, "gb": num_bytes / 1e9, **starts, "runs": runs}


def write_model(folder: Path, config: Mapping[str, Any]) -> int:
    """Random bfloat16 weights. Returns the number of parameters."""
    holder = huggingface_holder(config)
    largest = max(map(prod, holder.shapes.values()))
    pool = torch.randn(largest + 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    folder.mkdir()

    def tensor(name: str) -> torch.Tensor:
        shape = holder.shapes[name]
        start = zlib.crc32(name.encode()) % 4096  # tensors of one shape differ
        return pool[start : start + prod(shape)].view(shape)

    write_file(folder / "model.safetensors", holder.shapes, holder.dtypes, tensor)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return sum(map(prod, holder.shapes.values()))


def plain_copy(source: Path, copy: Path) -> dict[str, float]:
    """Seconds to read all bytes of a folder, from the disk, and to write as many, to the disk; CPU seconds of both."""
    block = memoryview(os.urandom(BLOCK_BYTES))
    forget(source)
    start, start_cpu = time.perf_counter(), time.process_time()
    num_bytes = sum(map(len, blocks(source)))
    read = time.perf_counter() - start
    start = time.perf_counter()
    with copy.open("wb", buffering=0) as file:
        for position in range(0, num_bytes, BLOCK_BYTES):
            file.write(block[: num_bytes - position])
        os.fsync(file.fileno())
    written = time.perf_counter() - start
    copy.unlink()
    return {"read_seconds": read, "write_seconds": written, "plain_cpu_seconds": time.process_time() - start_cpu}


def run(command: list[Any], source: Path) -> tuple[float, float, float]:
    """Seconds of the whole command, start-up included, on the clock and of one core; and the most memory that it had,
    without pages of files."""
    forget(source)
    start, start_cpu, peak = time.perf_counter(), children_cpu_seconds(), 0
    tool = [sys.executable, "-m", "megarl.cli", "convert", *command]
    with subprocess.Popen([str(part) for part in tool], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"{tool} ended with exit code {process.returncode}")
    return time.perf_counter() - start, children_cpu_seconds() - start_cpu, peak / 1e9


def anonymous_bytes(pid: int) -> int:
    """Resident memory that is no page of a file, of which the kernel can drop those that nobody has changed."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def blocks(folder: Path) -> Iterator[bytes]:
    for path in files(folder):
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                yield block


def same_weights(one: Path, other: Path) -> bool:
    """Bit by bit."""
    shapes = huggingface_holder(read_config(one)).shapes
    with SafetensorsFolder(one) as before, SafetensorsFolder(other) as after:
        return all(
            torch.equal(before.read("", name, whole(shape)), after.read("", name, whole(shape)))
            for name, shape in shapes.items()
        )


def forget(folder: Path) -> None:
    """The files' pages leave the page cache, so that they are read from the disk."""
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        measure,
        option("--size", choices=SIZES, default="3B"),
        option("--work", type=Path, help="folder for 20 GB of temporary files"),
    )
