"""Measure time and memory of megarl's commands: `megarl convert` on a random model with 3B parameters, against a plain
read and write, and `megarl reshard` on published models and layouts.

.venv/bin/python tools/benchmarks/commands.py convert --out tools/benchmarks/results/convert.json
.venv/bin/python tools/benchmarks/commands.py reshard --out tools/benchmarks/results/reshard.json
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml
from benchmark import MEGARL, ROOT, run_benchmark

from megarl.models.folder import read_config
from megarl.resharding.families import huggingface_holder
from megarl.resharding.piece import whole
from megarl.resharding.transports.safetensors import SafetensorsFolder, write_file
from tests.published_models import CONFIGS

CASES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "tools/benchmarks/cases/reshard.yaml").read_text())

MODEL = CONFIGS["Llama-3.2-1B"] | dict(hidden_size=3072, num_attention_heads=24, head_dim=128, dtype="bfloat16")
"""The config of Llama-3.2-3B, except for the number of layers."""

SIZES = {"3B": 28, "tiny": 2}
"""Name -> number of layers."""

BLOCK_BYTES = 64 * 2**20


def convert(work: Path, num_layers: int) -> dict[str, Any]:
    """Measure each conversion with and without verification, each directly after a plain read and write."""
    folder, checkpoint = work / "hf", work / "checkpoint"
    num_parameters = write_model(folder, {**MODEL, "num_hidden_layers": num_layers})
    to_megatron = ["hf-to-megatron", "--hf", folder, "--tp", "2", "--pp", "2"]
    to_hf = ["megatron-to-hf", "--checkpoint", checkpoint]
    runs = {}
    for name, command, source, out in (
        ("hf-to-megatron", to_megatron, folder, checkpoint),
        ("hf-to-megatron --no-verify", [*to_megatron, "--no-verify"], folder, work / "new"),
        ("megatron-to-hf", to_hf, checkpoint, work / "new"),
        ("megatron-to-hf --no-verify", [*to_hf, "--no-verify"], checkpoint, work / "new"),
    ):
        plain = plain_copy(source, work / "copy")
        drop_from_page_cache(source)
        costs, _ = run_megarl("convert", *command, "--out", out)
        floor = plain["read_seconds"] + plain["write_seconds"]
        runs[name] = {**costs, "peak_gb": costs["anonymous_peak_gb"], **plain, "ratio": costs["seconds"] / floor}
        if name == "megatron-to-hf" and not same_weights(folder, out):
            raise RuntimeError("the round trip changed the weights")
        shutil.rmtree(work / "new", ignore_errors=True)
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"num_parameters": num_parameters, "gb": num_bytes / 1e9, "runs": runs}


def write_model(folder: Path, config: Mapping[str, Any]) -> int:
    """Write a model with random bfloat16 weights. Return the number of parameters."""
    holder = huggingface_holder(config)
    largest = max(map(prod, holder.shapes.values()))
    pool = torch.randn(largest + 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    folder.mkdir()

    def tensor(name: str) -> torch.Tensor:
        shape = holder.shapes[name]
        start = zlib.crc32(name.encode()) % 4096  # makes tensors with equal shapes differ
        return pool[start : start + prod(shape)].view(shape)

    write_file(folder / "model.safetensors", holder.shapes, holder.dtypes, tensor)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return sum(map(prod, holder.shapes.values()))


def plain_copy(source: Path, copy: Path) -> dict[str, float]:
    """Return the seconds to read all bytes of a folder from disk, the seconds to write the same number of bytes to
    disk, and the CPU seconds of both.
    """
    block = memoryview(os.urandom(BLOCK_BYTES))
    drop_from_page_cache(source)
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


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def blocks(folder: Path) -> Iterator[bytes]:
    for path in files(folder):
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                yield block


def same_weights(one: Path, other: Path) -> bool:
    """Return whether two model folders hold bitwise equal weights."""
    shapes = huggingface_holder(read_config(one)).shapes
    with SafetensorsFolder(one) as before, SafetensorsFolder(other) as after:
        return all(
            torch.equal(before.read("", name, whole(shape)), after.read("", name, whole(shape)))
            for name, shape in shapes.items()
        )


def drop_from_page_cache(folder: Path) -> None:
    """Drop the files' pages from the page cache, so that they are read from disk."""
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def reshard(case: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """Plan one refit. Return the command's costs and output."""
    config = work / "config.json"
    config.write_text(json.dumps(CONFIGS[case["model"]] | {"dtype": "bfloat16"}), encoding="utf-8")
    options = ["--model", config, "--from", case["source"], "--to", case["destination"], "--json"]
    options += ["--colocated"] if case.get("colocated") else []
    with tempfile.TemporaryDirectory() as cache:
        costs, output = run_megarl("reshard", *options, environment={"MEGARL_CACHE": cache})
    return {"colocated": False, **case, **costs, "figures": json.loads(output)}


def run_megarl(*arguments: Any, environment: Mapping[str, str] = MappingProxyType({})) -> tuple[dict[str, float], str]:
    """Run a megarl command in one process.

    Returns:
        Its wall-clock and CPU seconds, including start-up, and its peak resident memory in GB, with and without file
        pages, because the kernel can evict clean file pages at any time; and its standard output.
    """
    command, anonymous = [*MEGARL, *map(str, arguments)], 0
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=output)
        pid = 0
        while not pid:
            anonymous = max(anonymous, _anonymous_bytes(process.pid))
            time.sleep(0.02)
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        seconds, process.returncode = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{command} exited with status {process.returncode}")
        output.seek(0)
        costs = {
            "seconds": seconds,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_gb": usage.ru_maxrss * 1024 / 1e9,
            "anonymous_peak_gb": anonymous / 1e9,
        }
        return costs, output.read().decode()


def _anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


MEASUREMENTS = {
    "convert": lambda arguments, work: convert(work, SIZES[arguments.size]),
    "reshard": lambda _, work: {"runs": {name: reshard(case, work) for name, case in CASES.items()}},
}


if __name__ == "__main__":
    run_benchmark(__doc__, MEASUREMENTS, ("--size", dict(choices=SIZES, default="3B", help="model to convert")))
