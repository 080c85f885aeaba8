"""A run on a Slurm cluster that is hit by one fault after another.

The plan of faults follows from a seed. Each fault has a step after which it occurs, so it does not depend on the speed
of the machine. The run is asynchronous, its rollouts play in an environment, and its job uses two of three nodes.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

from megarl.run.audit.audit import audit
from megarl.run.time_causes import CAUSES, of_cause
from megarl.run.time_ledger import goodput, read_ledger
from megarl.run.time_records import read_times
from tests.cluster.jobs import Launched
from tests.cluster.machines import Machine
from tests.cluster.slurm import Slurm
from tests.timing import ASK_S, NODE_DOWN_S, RUN_S, SOAK_HEAL_S, SOAK_TIMEOUT_S, SOAK_WAIT_S, wait_until

SPACING = 5
"""Steps between two faults, on average."""

AFTER = 3
"""Number of steps after each fault whose delay is measured. They all end before the next fault."""

DRIVER, SUPERVISOR = "driver", "supervisor"
PATTERNS = {
    "trainer rank": "^ray::TrainerActor",
    "engine": "^ray::EngineActor",
    "environment actor": "^ray::EnvironmentActor",
    "environment process": r" megarl\.environments\.host ",
    "reward actor": "^ray::RewardActor",
    "reward process": r" megarl\.rewards\.worker ",
    "raylet": "/raylet/raylet ",
    "GCS": "/gcs_server ",
    "megarl join": r" -m \S+ join ",
}
"""Process -> regular expression for its command line."""

FAULTS: Mapping[str, int] = {
    "SIGKILL trainer rank": 6,
    "SIGKILL trainer rank twice": 1,
    "SIGSTOP trainer rank": 2,
    "SIGKILL engine": 4,
    "SIGSTOP engine": 1,
    "SIGKILL environment actor": 1,
    "SIGSTOP environment actor": 1,
    "SIGKILL environment process": 4,
    "SIGSTOP environment process": 2,
    "SIGKILL reward actor": 1,
    "SIGSTOP reward actor": 1,
    "SIGKILL reward process": 3,
    "SIGSTOP reward process": 2,
    "SIGKILL driver": 2,
    "SIGSTOP driver": 2,
    "SIGKILL supervisor": 1,
    "SIGSTOP supervisor": 1,
    "SIGKILL raylet": 2,
    "SIGSTOP raylet": 2,
    "SIGKILL GCS": 1,
    "SIGSTOP GCS": 2,
    "SIGKILL megarl join": 1,
    "SIGSTOP megarl join": 1,
    "loss of the first node": 1,
    "loss of another node": 1,
    "partition that heals": 2,
    "partition that does not heal": 1,
    "full shared memory": 1,
    "corrupt newest checkpoint": 1,
}
"""Kind of fault -> number of times that it occurs."""

WORLD = '''
import asyncio
from megarl.environments import Environment, Step


class World(Environment):
    """Lasts three turns, each with 0.8 s of waiting."""

    def reset(self, task):
        pass

    async def step(self, turn):
        await asyncio.sleep(0.8)
        return Step("more", len(set(turn.token_ids)) / 8, done=turn.number == 2)
'''

FILL = """
until mount -o remount,size=$(($(df -B1 --output=used /dev/shm | tail -1) + 4096)) /dev/shm; do sleep 0.1; done
"""
"""Program that shrinks shared memory to the size of its contents plus one page."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault. It occurs `delay_s` after the metrics of `step` were recorded."""

    kind: str
    step: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Occurred:
    """A fault that has occurred: its place, and the Unix timestamp."""

    kind: str
    step: int
    where: str
    at: float


def plan(seed: int, faults: Mapping[str, int] = FAULTS) -> list[Fault]:
    """Return the faults in a random order, each after a random step of its own SPACING steps."""
    chance = random.Random(seed)
    kinds = [kind for kind, count in faults.items() for _ in range(count)]
    chance.shuffle(kinds)
    offsets = SPACING - AFTER
    return [
        Fault(kind, SPACING * number + chance.randrange(offsets), round(chance.uniform(0, 1), 2))
        for number, kind in enumerate(kinds, 1)
    ]


def num_steps(faults: Sequence[Fault]) -> int:
    return SPACING * (len(faults) + 2)


class Soak:
    """Launches the run and injects faults into it."""

    def __init__(self, cluster: Slurm, shared: Path, seed: int, faults: Sequence[Fault], vllm: bool):
        (shared / "world.py").write_text(WORLD)
        rows = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(4000)]
        (shared / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.cluster, self._faults, self._chance = cluster, faults, random.Random(seed)
        self._machines = {machine.name: machine for machine in cluster.machines}
        self._lost: list[Machine] = []
        self.occurred: list[Occurred] = []
        self._record = shared / "faults.json"
        options = *_options(), *_keys(shared, num_steps(faults))
        self.run = Launched(cluster, shared, "soak", *options, vllm=vllm, megatron=True)
        self.begin = self._time("SubmitTime")

    def inject(self) -> None:
        """Inject all faults, and wait until the run has ended."""
        for number, fault in enumerate(self._faults, 1):
            self._wait_for_step(fault.step)
            time.sleep(fault.delay_s)
            at, step = time.time(), self.run.steps
            where = self._inject(fault.kind)
            self.occurred.append(Occurred(fault.kind, step, where, at))
            self._record.write_text(json.dumps([asdict(occurred) for occurred in self.occurred]))
            print(f"fault {number} of {len(self._faults)}, {at - self.begin:.0f} s: {fault.kind}, {where}", flush=True)
            self._wait_for_step(step + AFTER)
            for machine in self._lost:
                self._boot_again(machine)
            self._lost.clear()
        self.cluster.wait_for_state(self.run.number, "COMPLETED", "FAILED", "CANCELLED", seconds=RUN_S)
        self.end = self._time("EndTime")

    def _time(self, field: str) -> float:
        return datetime.fromisoformat(self.run.job[field]).timestamp()

    def _wait_for_step(self, number: int) -> None:
        """Wait until the run has finished a step. Return lost machines to the cluster after NODE_DOWN_S."""
        begin = time.monotonic()
        while self.run.steps < number:
            passed = time.monotonic() - begin
            assert passed < SOAK_WAIT_S, (self.run.job, self.run.log[-20000:])
            assert self.run.job["JobState"] not in ("FAILED", "CANCELLED", "COMPLETED"), self.run.log[-20000:]
            if passed > 1.5 * NODE_DOWN_S:
                for machine in self._lost:
                    self._boot_again(machine)
                self._lost.clear()
            time.sleep(ASK_S)

    def _boot_again(self, machine: Machine) -> None:
        """Boot a lost machine again. A machine without a connection must have ended its part of the run by itself."""
        if machine.is_up:
            wait_until(lambda: not _megarl(machine), lambda: _megarl(machine))
            machine.crash()
        machine.boot()
        self.cluster.boot(machine)

    def _inject(self, kind: str) -> str:
        """Inject a fault and return where it occurred."""
        first, other = (self._machines[name] for name in self.run.attempts[-1].split())
        signal, _, target = kind.partition(" ")
        if signal in ("SIGKILL", "SIGSTOP"):
            machine, pid = self._signal(signal, target.removesuffix(" twice"), (first, other))
            if target.endswith(" twice"):
                self._kill_again(machine, pid)
            return f"process {pid} on {machine.name}"
        if kind == "partition that heals":
            other.cut()
            time.sleep(SOAK_HEAL_S)
            other.mend()
            return other.name
        if kind == "full shared memory":
            first.run("bash", "-c", FILL)
            time.sleep(SOAK_HEAL_S)
            first.run("mount", "-o", "remount,size=4g", "/dev/shm")
            return first.name
        if kind == "corrupt newest checkpoint":
            return self._corrupt(first)
        lost = first if kind == "loss of the first node" else other
        if kind == "partition that does not heal":
            lost.cut()
        else:
            lost.crash()
        self._lost.append(lost)
        return lost.name

    def _signal(self, signal: str, target: str, machines: Sequence[Machine]) -> tuple[Machine, int]:
        """Signal one of the target's processes, and return it with its machine. Wait until there is one, because some
        may be restarting, or exit after they were found."""
        signaled: list[tuple[Machine, int]] = []

        def send() -> bool:
            found = [(machine, pid) for machine in machines for pid in _pids(machine, target)]
            if found:
                machine, pid = self._chance.choice(found)
                with suppress(subprocess.CalledProcessError):
                    machine.run("kill", f"-{signal}", str(pid))
                    signaled.append((machine, pid))
            return bool(signaled)

        wait_until(send, lambda: target)
        return signaled[0]

    def _kill_again(self, machine: Machine, before: int) -> None:
        """Kill one of the ranks that replace a killed one, while they start."""
        known = {before, *_pids(machine, "trainer rank")}
        new: list[int] = []

        def find() -> bool:
            new[:] = [pid for pid in _pids(machine, "trainer rank") if pid not in known]
            return bool(new)

        wait_until(find, lambda: "no new rank")
        machine.run("kill", "-SIGKILL", str(new[0]))

    def _corrupt(self, first: Machine) -> str:
        """Damage a file of the newest checkpoint, and kill the driver, so that the run must resume from one."""
        [driver] = _pids(first, DRIVER)
        first.run("kill", "-SIGSTOP", str(driver))  # so that `latest` does not change
        name = (self.run.folder / "checkpoints/latest").read_text().strip()
        file = max((self.run.folder / "checkpoints" / name / "actor").iterdir(), key=lambda path: path.stat().st_size)
        with file.open("r+b") as stream:
            stream.seek(file.stat().st_size // 2)
            stream.write(os.urandom(64))
        first.run("kill", "-SIGKILL", str(driver))
        return f"{name}/actor/{file.name}"

    def figures(self, seed: int) -> dict[str, Any]:
        """Check the run's end, its audit and its ledger of time. Return the figures for the benchmarks."""
        run, num_nodes = self.run, len(self.cluster.machines)
        assert run.job["JobState"] == "COMPLETED" and run.log.splitlines()[-1] == "job: done", run.log[-20000:]
        run.check_nothing_is_left()
        is_proven, proof = audit(run.folder, reads_all=True)
        assert is_proven, proof
        ledger = read_ledger(run.folder, now=self.end)
        total, devices = sum(ledger.seconds.values()), ledger.num_devices
        allocated = devices * (self.end - self.begin)
        assert devices == 2 * num_nodes, ledger
        return {
            "seed": seed,
            "after_steps": AFTER,
            "minutes": (self.end - self.begin) / 60,
            "steps": ledger.num_steps,
            "attempts": ledger.num_attempts,
            "allocations": ledger.num_allocations,
            "goodput": goodput(ledger.seconds),
            "ledger_difference": total / allocated - 1,
            "ledger": {cause: s / total for cause in CAUSES if (s := of_cause(ledger.seconds, cause))},
            "proof": [line for line in proof if not line.startswith(("/", "ledger"))],
            **lost_time(run.folder, self.occurred),
            "faults": [asdict(fault) for fault in self.occurred],
        }


def lost_time(run: Path, faults: Sequence[Occurred]) -> dict[str, Any]:
    """Return the number of faults by kind, and their median and longest time lost: the delay of the AFTER steps after
    the fault, relative to the mean duration of undisturbed steps. It is a mean because long and short steps alternate:
    rollouts for two steps finish together."""
    attempts = read_times(run)
    rows = sorted((row for times in attempts for row in times.rows if row.step is not None), key=lambda row: row.end)
    windows: list[tuple[Occurred, float, float]] = []
    for fault in faults:
        before = [row for row in rows if row.end <= fault.at]
        done = max(row.step for row in before)
        since = max(row.end for row in before if row.step == done)
        windows.append((fault, since, next(row.end for row in rows if row.step >= done + AFTER and row.end > fault.at)))
    disturbed = [(begin, end) for _, begin, end in windows]
    lengths = [
        row.end - row.begin for row in rows if not any(row.begin < end and row.end > begin for begin, end in disturbed)
    ]
    step_s = mean(lengths)
    lost: dict[str, list[float]] = {}
    ended: Counter[str] = Counter()
    for fault, begin, end in windows:
        lost.setdefault(fault.kind, []).append(max(0.0, end - begin - AFTER * step_s))
        ended[fault.kind] += any(fault.at < times.start.begin < end for times in attempts)
    kinds = {
        kind: {
            "number": len(seconds),
            "ended_attempts": ended[kind],
            "median_s": round(median(seconds), 1),
            "longest_s": round(max(seconds), 1),
        }
        for kind, seconds in sorted(lost.items(), key=lambda item: -median(item[1]))
    }
    return {"step_s": round(step_s, 2), "kinds": kinds}


def _options() -> list[str]:
    return ["--nodes=2", "--spares=1", "--time=60", "--restarts=9", "--stalled=9"]


def _keys(shared: Path, steps: int) -> list[str]:
    timeouts = dict.fromkeys(("rollout", "rewards", "passes", "update", "refit", "checkpoint"), SOAK_TIMEOUT_S)
    return [
        f"run.steps={steps}",
        "cluster.placement=disaggregated",
        f"cluster.timeouts={json.dumps({**timeouts, 'start': 240})}",
        "actor.layout.pp=2",
        "rollout={replicas: 2, max_staleness: 1, max_new_tokens: 40}",
        "actor.tokens_per_microbatch=512",
        f"environment={{class: '{shared}/world.py:World', processes: 2, turn_tokens: 8, timeout_s: 15}}",
        f"rewards={{functions: [{{function: {shared}/rewards.py:digit_shares}}], processes: 2, timeout_s: 15}}",
        "checkpoint.every_steps=1",
    ]


def _processes(machine: Machine) -> Iterable[tuple[int, int, str]]:
    """Yield each process's id, its parent's id and its command line, except zombies."""
    for line in machine.run("ps", "-wweo", "pid=,ppid=,stat=,args=").splitlines():
        pid, parent, state, words = line.split(maxsplit=3)
        if not state.startswith("Z"):
            yield int(pid), int(parent), words


def _pids(machine: Machine, target: str) -> list[int]:
    processes = list(_processes(machine))
    if target in (DRIVER, SUPERVISOR):
        both = {pid: parent for pid, parent, words in processes if re.search(r" -m \S+ train ", words)}
        return [pid for pid, parent in both.items() if (parent in both) == (target == DRIVER)]
    return [pid for pid, _, words in processes if re.search(PATTERNS[target], words)]


def _megarl(machine: Machine) -> list[str]:
    """Return the command lines of the machine's processes that belong to megarl or Ray."""
    return [words for _, _, words in _processes(machine) if re.search("ray|megarl", words)]
