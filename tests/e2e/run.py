"""`megarl train` on a tiny model in a separate process, with its processes, sockets and shared memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

from megarl.cluster.supervision.scratch import PLACE
from megarl.cluster.trace import FILE, Span
from megarl.run.audit.audit import audit
from tests.fakes.megarl import TRAINERS
from tests.metrics import complete_rows, undeclared
from tests.paths import ROOT
from tests.timing import ASK_S, POLL_S, START_S, WAIT_S
from tests.tiny_model import write_tiny_llama

Value = TypeVar("Value")

MEGARL = [sys.executable, "-m", "megarl.cli"]
FAKE_MEGARL = [sys.executable, "-m", "tests.fakes.megarl"]
UNCHECKED = ["logprob_check={limit: 1000, threshold: 1000, canaries: off}"]
"""Keys that disable the check for runs with fake engines, whose log-probs differ from the trainer's."""

SHARED_MEMORY = Path("/dev/shm")
LISTEN = "0A"
"""State of a listening socket in the kernel's tables."""
RECIPE = """
base: {base}
run: {{name: tiny, steps: 1000000, export: false}}
model: {{path: {folder}/model, dtype: float32}}
actor:
  layout: {{pp: 2}}
  threads: 1
  tokens_per_microbatch: 256
rollout: {{max_new_tokens: 8, context_length: 64, kv_cache_gib: 0.01, threads: 1}}
batch: {{prompts_per_step: 4, samples_per_prompt: 4, prompts_per_update: 4}}
data: {{source: {folder}/prompts.jsonl}}
rewards:
  functions: [{{function: "{folder}/reward.py:digit_share"}}]
cluster: {{object_store_mib: 80}}
"""
REWARD = """
import time
from pathlib import Path

HOLD = Path(__file__).with_name("hold")
TRIAL = ("", "This response is wrong.")  # see megarl.environments.trial


def digit_share(prompt, response, answer):
    while HOLD.exists() and response not in (answer, *TRIAL):
        HOLD.with_name("held").touch()
        time.sleep(0.1)
    return sum(c.isdigit() for c in response) / max(1, len(response))


def broken(prompt, response, answer):
    with HOLD.with_name("calls").open("a") as calls:
        calls.write(".")
        if calls.tell() <= 1 + len(TRIAL):
            return 1.0
    raise KeyError("no such key")
"""


def write_recipe(folder: Path) -> Path:
    """Write a recipe with unlimited steps, and its model, prompts and rewards, into `folder`.

    While the file folder/hold exists, the reward function blocks; see Run.wait_until_held. It does not block for the
    responses that the run scores as a trial before it starts.
    """
    write_tiny_llama(folder / "model")
    rows = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE.format(base=ROOT / "configs" / "base.yaml", folder=folder))
    return recipe


def megarl(vllm: bool, megatron: bool) -> tuple[list[str], list[str]]:
    """Return the `megarl` command, with fake engines (tests.fakes.engine) unless `vllm` is set and fake trainers
    (tests.fakes.trainer) unless `megatron` is set, and the overrides that it needs. vLLM requires Megatron.
    """
    if vllm:
        return MEGARL, []
    return [*FAKE_MEGARL, *([] if megatron else [TRAINERS])], UNCHECKED


def restore_sigint() -> None:
    """Reset SIGINT's handler: background processes of a shell without job control, as these tests may be, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Run:
    """A run in its own session and process group, started on construction. All of its processes stay in the session."""

    def __init__(self, recipe: Path, folder: Path, *overrides: str, vllm: bool = False, megatron: bool = True):
        """Start the run.

        Args:
            folder: the parent of the run's folder; also receives stdout and stderr.
            vllm, megatron: see `megarl`.
        """
        command, keys = megarl(vllm, megatron)
        self.folder = folder / "tiny"
        self._shared_memory = set(SHARED_MEMORY.iterdir())
        self._temporary = folder / "temporary"
        self._temporary.mkdir(exist_ok=True)  # an earlier run may have used this folder
        self._output, self._errors = folder / "stdout", folder / "stderr"
        with self._output.open("w") as stdout, self._errors.open("w") as stderr:
            self._process = subprocess.Popen(
                [*command, "train", str(recipe), f"run.folder={folder}", *keys, *overrides],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(self._temporary)},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=restore_sigint,
            )
        self.pid = self._process.pid

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(WAIT_S)
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):  # the process may exit with its parent
                process.kill()
        self._process.wait()
        metrics = self.folder / "metrics.jsonl"
        if kind is None and metrics.exists():
            assert undeclared(metrics) == []
            is_proven, proof = audit(self.folder, reads_all=True)
            assert is_proven, proof

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> list[str]:
        """The lines of stderr."""
        return self._errors.read_text().splitlines()

    def processes(self) -> list[psutil.Process]:
        """Return the run's live processes, including reparented ones."""
        return [p for p in psutil.process_iter() if _session(p.pid) == self.pid and _runs(p)]

    def find(self, title: str) -> psutil.Process:
        """Wait for a process whose title starts with `title`, such as raylet or ray::TrainerActor, and return it."""
        found: list[psutil.Process] = []
        self.wait_until(lambda: found.extend(self.find_all(title)) or found)
        return found[0]

    def suspend(self, title: str) -> psutil.Process:
        """Suspend a process while it has this title, such as ray::EngineActor.generate during that call."""
        while True:
            process = self.find(title)
            process.suspend()
            if _title(process).startswith(title):
                return process
            process.resume()

    def find_all(self, title: str) -> list[psutil.Process]:
        return [process for process in self.processes() if _title(process).startswith(title)]

    def named(self, name: str) -> psutil.Process:
        """Wait for the actor process with this name, such as engine-1, and return it.

        Its open log identifies it, because process ids do not follow the engines' order.
        """
        found: list[psutil.Process] = []
        self.wait_until(lambda: found.extend(self.writers(name, "ray::")) or found)
        return found[0]

    def workers(self, engine: str, count: int) -> list[psutil.Process]:
        """Wait for `count` vLLM worker processes of the named engine, and return them."""
        found: list[psutil.Process] = []

        def has_count() -> bool:
            found[:] = self.writers(engine, "VLLM::Worker")
            return len(found) == count

        self.wait_until(has_count)
        return found

    def writers(self, name: str, title: str) -> list[psutil.Process]:
        """Return processes with this title that have the actor's log open, which its children inherit."""
        log = str(self.folder / f"logs/attempt_1/{name}.log")
        return [process for process in self.find_all(title) if log in _open_files(process.pid)]

    @property
    def driver(self) -> psutil.Process:
        [driver] = psutil.Process(self.pid).children()
        return driver

    def sockets(self) -> set[str]:
        """Return the inodes of the run's listening sockets. Ports may be reused by other runs later."""
        links = set[str]().union(*(_open_files(process.pid) for process in self.processes()))
        return {inode for inode in listening_sockets() if f"socket:[{inode}]" in links}

    def scratch(self) -> Path:
        """Return the folder of the run's temporary files, from the raylet's command line."""
        [option] = [word for word in self.find("raylet").cmdline() if word.startswith("--temp_dir=")]
        return Path(option.removeprefix("--temp_dir=")).parent

    def left_shared_memory(self) -> set[Path]:
        """Return unmapped segments and folders that were created since the start and still exist after WAIT_S seconds.
        Those of other tests' exiting processes may exist briefly."""
        deadline = time.monotonic() + WAIT_S
        while (left := self._unmapped_segments()) and time.monotonic() < deadline:
            time.sleep(ASK_S)
        return left

    def _unmapped_segments(self) -> set[Path]:
        """Return shared-memory segments and folders that were created since the start and that no process maps. Other
        runs do not interfere: their segments are mapped, and their folders belong to scratch folders. Those of unit
        tests are excluded by name."""
        new = set(SHARED_MEMORY.iterdir()) - self._shared_memory
        new = {path for path in new if not (PLACE / path.name).exists()}
        new = {path for path in new if not path.name.removeprefix("sem.").startswith("megarl-test-")}
        return new - {path for process in psutil.process_iter() for path in mapped_shared_memory(process)}

    def left_files(self) -> list[Path]:
        """Return the files left in TMPDIR."""
        return list(self._temporary.rglob("*"))

    @property
    def metrics(self) -> list[dict]:
        """The metrics of the finished steps."""
        rows = complete_rows(self.folder / "metrics.jsonl")
        return [row for row in rows if row["step"] > 0]  # exclude an evaluation before the first step

    def wait_for_step(self, number: int) -> None:
        self.wait_until(lambda: len(self.metrics) >= number)

    def wait_until_held(self, folder: Path) -> None:
        """Wait until sampling has finished and the run only waits for the blocked rewards."""
        (folder / "held").unlink(missing_ok=True)
        # The title of an actor with concurrent calls shows only the call that started or finished last.
        self.wait_until(lambda: (folder / "held").exists() and not self.find_all("ray::EngineActor.generate"))

    def wait_until(self, condition: Callable[[], Value]) -> Value:
        """Wait until the condition returns a true value, and return it."""
        deadline = time.monotonic() + START_S
        while not (value := condition()):
            assert self._process.poll() is None, f"exited with {self._process.returncode}: {self.errors}"
            if time.monotonic() > deadline:
                processes = [(process.pid, process.ppid(), _title(process)) for process in self.processes()]
                raise AssertionError(f"after {START_S} s: {self.output} {self.errors} {processes}")
            time.sleep(POLL_S)
        return value

    def end(self, seconds: float = WAIT_S) -> int:
        """Wait until no process of the run is left. Return the exit status."""
        deadline = time.monotonic() + seconds
        code = self._process.wait(seconds)
        while alive := self.processes():
            assert time.monotonic() < deadline, f"still running after {seconds} s: {alive}"
            time.sleep(0.05)
        return code


def mapped_shared_memory(process: psutil.Process) -> set[Path]:
    """Return the segments and semaphores that a process maps. They are found by inode, because the maps contain a
    semaphore's first name, which glibc has deleted."""
    try:
        lines = [line.split() for line in Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines()]
    except OSError:  # the process has exited or is not readable
        return set()
    inodes = {int(words[4]) for words in lines if len(words) > 5 and Path(words[5]).parent == SHARED_MEMORY}
    return {path for path in SHARED_MEMORY.iterdir() if inodes and _inode(path) in inodes}


def _inode(path: Path) -> int | None:
    with suppress(FileNotFoundError):  # it was removed after it was listed
        return path.stat().st_ino
    return None


def listening_sockets() -> set[str]:
    """Return the inodes of all listening TCP sockets of the machine."""
    tables = (Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table]
    return {row[9] for row in rows if row[3] == LISTEN}


def _open_files(pid: int) -> set[str]:
    links = set()
    with suppress(OSError):  # the process has exited
        for file in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it closed this file
                links.add(os.readlink(file))
    return links


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _title(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [""])[0].rpartition("/")[2]
    except psutil.NoSuchProcess:
        return ""


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_trace(logs: Path) -> list[Span]:
    """Return all spans in this log folder, in the order in which the driver received them."""
    return [Span(**json.loads(line)) for line in (logs / FILE).read_text(encoding="utf-8").splitlines()]
