"""User functions in processes that can be killed. A function that hangs or exits its process fails only one call."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from megarl.config.schema import Config, RewardFunction, Sandbox
from megarl.core import stacks
from megarl.core.errors import UserError
from megarl.core.types import Prompt, Sample
from megarl.rewards.options import NUM_TOKENS
from megarl.rewards.result import Result

READ_BYTES = 65536
NO_COLUMNS: Mapping[str, Any] = {}

IMPORT_S = 60.0
"""Time limit in seconds for importing one function's file, unless `timeout_s` is longer."""

SANDBOX_SHARE = 0.9
"""Fraction of a call's time limit after which its sandboxes are stopped. A program that hangs then scores as wrong
instead of failing the call."""

STACKS_S = 0.1
"""Seconds that a process has to write its stack traces, about a hundred times as long as it needs."""

MOST_PROCESSES = 512
"""Maximum number of processes per call: far more than a function needs, far fewer than a fork bomb starts."""

WATCH_S = 0.25
"""Interval in seconds at which each call's processes are counted. A Python fork bomb starts a few hundred processes in
that time."""


class FunctionPool:
    """A pool of processes that hold a run's reward functions. Each process handles one call at a time.

    A call fails if it exceeds its time limit, if its process exits, or if it starts more than MOST_PROCESSES processes.
    The process is then killed with all its children, and a new one replaces it immediately.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction | str],
        judge: str | None,
        num_processes: int,
        timeout_s: float,
        memory_mib: int | None = None,
        source_column: str | None = None,
        sandbox: Sandbox | None = None,
    ):
        """Start the processes and wait until all have loaded the functions. Raise UserError if a function is missing or
        has the wrong signature, or if an import times out or exits the process.

        Args:
            functions: entries of rewards.functions, which are called by label, or function names.
            judge: name of the rewards.judge function, called as judge.NAME, or None.
            num_processes: number of processes.
            timeout_s: wall-clock limit for one call, in seconds.
            memory_mib: address space in MiB that a process may use for its calls. None: unlimited.
            source_column: data column that selects the functions for a row. None: all functions apply.
            sandbox: settings for functions that use sandboxes, which are stopped after SANDBOX_SHARE of timeout_s.
        """
        entries = [
            entry if isinstance(entry, RewardFunction) else RewardFunction(function=entry) for entry in functions
        ]
        arguments = {
            "functions": [(entry.label, entry.function, entry.options) for entry in entries],
            "judge": judge,
            "memory_mib": memory_mib,
            "sandbox": None if sandbox is None else sandbox.model_dump(),
            "sandbox_s": SANDBOX_SHARE * timeout_s,
        }
        self._arguments = json.dumps(arguments, default=str)
        self._entries = {entry.label: entry for entry in entries}
        self._source_column = source_column
        self._timeout_s = timeout_s
        self._children = {_Child(self._arguments) for _ in range(num_processes)}
        self._idle: SimpleQueue[_Child] = SimpleQueue()
        self._closed = False
        self.columns: dict[str, str | None] = {}
        """Data columns that functions use. Each maps to the name of one function that requires it, or to None."""
        self.batch_functions: list[str] = []
        """Names of the functions that take whole batches."""
        try:
            for child in self._children:
                ready = child.await_start(timeout_s)
                self.columns, self.batch_functions = ready["columns"], ready["batch_functions"]
                self._idle.put(child)
        except BaseException:
            self._kill_all()
            raise
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="rewards")
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="rewards watch", daemon=True).start()

    def judges(self, function: str, prompt: Prompt) -> bool:
        """Return whether the function applies to this prompt's data source."""
        source = None if self._source_column is None else prompt.columns.get(self._source_column)
        return self._entries[function].applies_to(source)

    def call(self, function: str, *arguments: Any, columns: Mapping[str, Any] = NO_COLUMNS) -> Future[Result]:
        """Call the function as soon as a process is free. Calls start in the order of submission.

        Args:
            columns: the data row's columns. The function receives the columns that its parameters name.
        """
        return self._threads.submit(lambda: Result(**self._run(function, arguments, dict(columns))))

    def call_batch(
        self,
        function: str,
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        columns: Sequence[Mapping[str, Any]] | None = None,
    ) -> Future[list[Result]]:
        """Call a batch function once for all samples. A failed call fails every sample.

        Args:
            function: name of the function.
            prompts: one prompt per sample.
            responses: one response per sample.
            columns: data columns of each sample. None: the columns of its prompt.
        """
        arguments = [prompt.text for prompt in prompts], list(responses), [prompt.answer for prompt in prompts]
        columns = [dict(row) for row in ([prompt.columns for prompt in prompts] if columns is None else columns)]

        def results() -> list[Result]:
            reply = self._run(function, arguments, columns)
            return [Result(**fields) for fields in reply.get("results", [reply] * len(prompts))]

        return self._threads.submit(results)

    def _run(self, function: str, arguments: Sequence[Any], columns: Any) -> dict[str, Any]:
        """Run a call in an idle process. Return the process's reply, or the fields of a Result that describes the
        failure."""
        child = self._idle.get()
        try:
            return child.call(function, arguments, columns, self._timeout_s)
        except TimeoutError:
            child.show_stacks()
            child.kill()
            return {"value": None, "failure": f"did not return within rewards.timeout_s={self._timeout_s:g}"}
        except _ProcessEnded as end:
            child.kill()
            return {"value": None, "failure": child.kill_reason or f"ended its process ({end})"}
        finally:
            self._idle.put(child if child.is_running or self._closed else self._replacement(child))

    def _replacement(self, child: _Child) -> _Child:
        self._children.remove(child)
        new = _Child(self._arguments)
        self._children.add(new)
        new.await_start(self._timeout_s)
        return new

    def close(self) -> None:
        """Kill all processes, including busy ones."""
        self._closed = True
        self._ended.set()
        self._kill_all()
        self._threads.shutdown(cancel_futures=True)

    def _watch(self) -> None:
        """Kill the processes of calls that exceed MOST_PROCESSES."""
        while not self._ended.wait(WATCH_S):
            sizes = Counter(_process_groups())
            for child in list(self._children):
                if (size := sizes[child.process_group]) > MOST_PROCESSES:
                    child.kill_reason = f"had {size} processes at once, more than {MOST_PROCESSES},"
                    child.kill_process_group()

    def _kill_all(self) -> None:
        for child in list(self._children):
            child.kill()


def function_pool(config: Config, num_processes: int) -> FunctionPool:
    """Create a pool for the run's reward functions."""
    rewards = config.rewards
    return FunctionPool(
        rewards.functions,
        rewards.judge,
        num_processes,
        rewards.timeout_s,
        rewards.memory_mib,
        config.data.source_column,
        config.sandbox,
    )


def columns_of(sample: Sample) -> dict[str, Any]:
    """Return the values that functions may use besides prompt, response and answer: the data row's columns and the
    number of response tokens."""
    return {**sample.prompt.columns, NUM_TOKENS: len(sample.response_ids)}


def _process_groups() -> Iterator[int]:
    """Yield the process group id of each process on this machine."""
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with suppress(OSError), open(f"/proc/{entry.name}/stat", "rb") as stat:  # the process may have exited
                # The process name may contain spaces and parentheses. State, parent and process group follow it.
                yield int(stat.read().rpartition(b")")[2].split()[2])


class _ProcessEnded(Exception):
    """Raised when a process exits during a call. The message is its exit status or signal."""


class _Child:
    """One worker process. It has its own process group, so that killing it also kills its children."""

    def __init__(self, arguments: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megarl.environments.child", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        self._unread = b""
        self.kill_reason: str | None = None
        """Failure to report for the current call, if the process was killed because it exceeded a limit."""

    @property
    def process_group(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def await_start(self, timeout_s: float) -> dict[str, Any]:
        """Wait until the process has loaded its functions. Return its `columns` and `batch_functions` (see
        FunctionPool). Raise UserError if loading fails.

        Args:
            timeout_s: wall-clock limit for a call, in seconds. It also limits imports if it is longer than IMPORT_S.
        """
        reply, limit_s = {"importing": "rewards"}, None  # the worker's own imports have no limit
        while "ready" not in reply:
            importing = reply["importing"]
            try:
                reply = self._read(None if limit_s is None else time.monotonic() + limit_s)
            except _ProcessEnded as end:
                raise UserError(
                    f"{importing}: the import ended the process ({end}). Fix: correct the file (its output is in this "
                    "process's log)"
                ) from None
            except TimeoutError:
                self.show_stacks()
                raise UserError(
                    f"{importing}: the import did not finish within {limit_s:g} s. Fix: move slow work out of the "
                    "file's top level, or raise rewards.timeout_s"
                ) from None
            limit_s = max(timeout_s, IMPORT_S)
            if "refused" in reply:
                raise UserError(reply["refused"])
        return reply

    def call(self, function: str, arguments: Sequence[Any], columns: Any, timeout_s: float) -> dict[str, Any]:
        """Send a call and return the reply. Raise TimeoutError, or _ProcessEnded if the process exits."""
        deadline = time.monotonic() + timeout_s
        try:
            pickle.dump((function, tuple(arguments), columns), self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _ProcessEnded(self._status()) from None
        return self._read(deadline)

    def _read(self, deadline: float | None) -> dict[str, Any]:
        file = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([file], [], [], remaining)[0]:
                raise TimeoutError
            chunk = os.read(file, READ_BYTES)
            if not chunk:
                raise _ProcessEnded(self._status())
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _status(self) -> str:
        code = self._process.wait()
        return f"exit status {code}" if code >= 0 else signal.Signals(-code).name

    def show_stacks(self) -> None:
        """Make the process write its stack traces to stderr."""
        self._process.send_signal(stacks.SIGNAL)
        time.sleep(STACKS_S)

    def kill(self) -> None:
        self.kill_process_group()
        self._process.wait()

    def kill_process_group(self) -> None:
        with suppress(ProcessLookupError):  # the whole process group has already exited
            os.killpg(self.process_group, signal.SIGKILL)
