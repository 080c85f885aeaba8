"""Functions of the user in processes that can be killed: one that hangs or ends its process costs one call."""

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
"""The time that one function's file has to be imported, unless a call has longer."""

SANDBOX_SHARE = 0.9
"""The share of a call's time that sandboxes have: a program that hangs is wrong, and its call does not fail."""

STACKS_S = 0.1
"""The time that a process has to write its stacks, which takes a hundredth of it."""

MOST_PROCESSES = 512
"""The processes that one call may have at once: far more than a function has a use for, and fewer than a fork bomb."""

WATCH_S = 0.25
"""The time between two looks at how many processes the calls have. Python's fork bombs make some hundreds in it."""


class FunctionPool:
    """Processes that hold the functions of a run's rewards, each working on one call at a time.

    A call that does not return in time is answered with a failure, and its process is killed with everything that it
    has started; so is one whose process ends, or starts more than MOST_PROCESSES. A new process takes its place at
    once.
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
        """Returns when all processes have found the functions. Raises UserError for one that is not there, or cannot
        be called, and for a file whose import does not end in time, or ends the process.

        functions       entries of rewards.functions, which are called by their labels; or names of functions
        judge           the name of the function of rewards.judge, which is called as judge.NAME
        timeout_s       the wall-clock time of one call
        memory_mib      address space that a process may take for its calls; None: no limit
        source_column   the column of the data that says which functions judge a row; None: all do
        sandbox         what functions that ask for sandboxes get, which then have SANDBOX_SHARE of timeout_s
        """
        entries = [
            entry if isinstance(entry, RewardFunction) else RewardFunction(function=entry) for entry in functions
        ]
        named = [(entry.label, entry.function, entry.options) for entry in entries]
        arguments = {
            "functions": named,
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
        """The columns of the data that functions ask for, each with one that cannot do without it, or None."""
        self.batch_functions: list[str] = []
        """The functions that take whole batches."""
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
        """Returns whether the function judges responses to this prompt: those to others have no part of it."""
        source = None if self._source_column is None else prompt.columns.get(self._source_column)
        return self._entries[function].applies_to(source)

    def call(self, function: str, *arguments: Any, columns: Mapping[str, Any] = NO_COLUMNS) -> Future[Result]:
        """Calls the function, in the order in which calls come, as soon as a process is free. columns: of the data's
        row, of which the function gets those that it asks for."""
        return self._threads.submit(lambda: Result(**self._answer(function, arguments, dict(columns))))

    def call_batch(
        self,
        function: str,
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        columns: Sequence[Mapping[str, Any]] | None = None,
    ) -> Future[list[Result]]:
        """Calls a function of batches once, for all samples, with a response to each of the prompts. Where it fails, so
        do all of them. columns: of each sample, those of its prompt if left out."""
        arguments = [prompt.text for prompt in prompts], list(responses), [prompt.answer for prompt in prompts]
        columns = [dict(row) for row in ([prompt.columns for prompt in prompts] if columns is None else columns)]

        def results() -> list[Result]:
            answer = self._answer(function, arguments, columns)
            return [Result(**fields) for fields in answer.get("results", [answer] * len(prompts))]

        return self._threads.submit(results)

    def _answer(self, function: str, arguments: Sequence[Any], columns: Any) -> dict[str, Any]:
        """Returns what a process answers to a call, or in place of an answer the fields of a Result that says why there
        is none."""
        child = self._idle.get()
        try:
            return child.call(function, arguments, columns, self._timeout_s)
        except TimeoutError:
            child.show_stacks()
            child.kill()
            return {"value": None, "failure": f"did not return within rewards.timeout_s={self._timeout_s:g}"}
        except _Ended as end:
            child.kill()
            return {"value": None, "failure": child.excess or f"ended its process ({end})"}
        finally:
            self._idle.put(child if child.runs or self._closed else self._replacement(child))

    def _replacement(self, child: _Child) -> _Child:
        self._children.remove(child)
        new = _Child(self._arguments)
        self._children.add(new)
        new.await_start(self._timeout_s)
        return new

    def close(self) -> None:
        """Ends all processes, also those that are working."""
        self._closed = True
        self._ended.set()
        self._kill_all()
        self._threads.shutdown(cancel_futures=True)

    def _watch(self) -> None:
        """Kills calls that have too many processes."""
        while not self._ended.wait(WATCH_S):
            sizes = Counter(_process_groups())
            for child in list(self._children):
                if sizes[child.group] > MOST_PROCESSES:
                    child.excess = f"had {sizes[child.group]} processes at once, more than {MOST_PROCESSES},"
                    child.kill_group()

    def _kill_all(self) -> None:
        for child in list(self._children):
            child.kill()


def function_pool(config: Config, num_processes: int) -> FunctionPool:
    """Returns a pool of the functions of a run's rewards."""
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
    """Returns what functions may ask for beside prompt, response and answer: columns of the data's row, and the number
    of the response's tokens."""
    return {**sample.prompt.columns, NUM_TOKENS: len(sample.response_ids)}


def _process_groups() -> Iterator[int]:
    """Yields the group of each process of this machine."""
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with suppress(OSError), open(f"/proc/{entry.name}/stat", "rb") as stat:  # it may have ended meanwhile
                # After the name, which may have spaces and brackets: state, parent, group.
                yield int(stat.read().rpartition(b")")[2].split()[2])


class _Ended(Exception):
    """The end of a process that was to answer. Its text says how it ended."""


class _Child:
    """One process, in a group of its own, so that what it starts is killed with it."""

    def __init__(self, arguments: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megarl.environments.child", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        self._unread = b""
        self.excess: str | None = None
        """What it had too much of, if it was killed for that."""

    @property
    def group(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def await_start(self, timeout_s: float) -> dict[str, Any]:
        """Returns what the process says of its functions, when it has found them: `columns` and `batch_functions` of
        FunctionPool. Raises UserError if it has not. timeout_s: the wall-clock time of a call, and of an import if it
        is longer than IMPORT_S."""
        answer, limit_s = {"importing": "rewards"}, None  # this process's own imports are not the user's
        while "ready" not in answer:
            importing = answer["importing"]
            try:
                answer = self._read(None if limit_s is None else time.monotonic() + limit_s)
            except _Ended as end:
                raise UserError(f"{importing}: importing it ended the process ({end}); fix the file") from None
            except TimeoutError:
                self.show_stacks()
                raise UserError(
                    f"{importing}: importing it did not end within {limit_s:g} s; mend the file, or raise "
                    "rewards.timeout_s"
                ) from None
            limit_s = max(timeout_s, IMPORT_S)
            if "refused" in answer:
                raise UserError(answer["refused"])
        return answer

    def call(self, function: str, arguments: Sequence[Any], columns: Any, timeout_s: float) -> dict[str, Any]:
        """Returns the answer to a call. Raises TimeoutError, or _Ended if the process ends."""
        deadline = time.monotonic() + timeout_s
        try:
            pickle.dump((function, tuple(arguments), columns), self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _Ended(self._status()) from None
        return self._read(deadline)

    def _read(self, deadline: float | None) -> dict[str, Any]:
        file = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([file], [], [], remaining)[0]:
                raise TimeoutError
            chunk = os.read(file, READ_BYTES)
            if not chunk:
                raise _Ended(self._status())
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _status(self) -> str:
        code = self._process.wait()
        return f"exit status {code}" if code >= 0 else signal.Signals(-code).name

    def show_stacks(self) -> None:
        """Makes the process write on its standard error where it is."""
        self._process.send_signal(stacks.SIGNAL)
        time.sleep(STACKS_S)

    def kill(self) -> None:
        self.kill_group()
        self._process.wait()

    def kill_group(self) -> None:
        with suppress(ProcessLookupError):  # it has ended, and so has what it started
            os.killpg(self.group, signal.SIGKILL)
