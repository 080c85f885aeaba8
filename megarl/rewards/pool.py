"""User functions in processes that can be killed. A function that hangs or exits its process fails only one call."""

from __future__ import annotations

import json
import pickle
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from megarl.config.schema import Config, RewardFunction, Sandbox
from megarl.core.errors import InfrastructureFailure, UserError
from megarl.core.latents import AnySample
from megarl.core.outage import Outage
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.rewards.judge import NAME
from megarl.rewards.options import NUM_TOKENS, PROMPT_IMAGE_FILES
from megarl.rewards.registry import require_response_kind
from megarl.rewards.result import Result
from megarl.usercode.child_process import IMPORT_S, ChildFailure, ChildProcess, group_sizes, new_number
from megarl.usercode.failures import RESTARTS

NO_COLUMNS: Mapping[str, Any] = {}

SANDBOX_SHARE = 0.9
"""Fraction of a call's time limit after which its sandboxes are stopped. A program that hangs then counts as a wrong
response, not as a failed call."""

MAX_PROCESSES = 512
"""Maximum number of processes per call: far more than a function needs, far fewer than a fork bomb starts."""

WATCH_S = 0.25
"""Interval in seconds at which a call's processes are counted. In this time, a fork bomb in Python starts a few hundred
processes."""


class FunctionPool:
    """A pool of processes that hold a run's reward functions. Each process handles one call at a time. A call fails if
    it exceeds its time limit, if its process exits, or if it starts more than MAX_PROCESSES processes. The process is
    then killed with all its children, and a new one replaces it immediately.

    If the infrastructure fails, the call is repeated for the samples that failed: up to RESTARTS times if its process
    or a sandbox was killed, and with pauses for up to `outage_s` while a server is unavailable."""

    def __init__(
        self,
        functions: Sequence[RewardFunction | str],
        judge: str | None,
        num_processes: int,
        timeout_s: float,
        memory_mib: int | None = None,
        source_column: str | None = None,
        sandbox: Sandbox | None = None,
        outage_s: float = 0.0,
    ):
        """Start the processes and wait until all have loaded the functions. Raise UserError if a function is missing or
        has the wrong signature, or if an import times out or exits the process.

        Args:
            functions: entries of rewards.functions, which are called by label, or function names.
            judge: name of the rewards.judge function, called as judge.NAME, or None.
            timeout_s: wall-clock limit for one call, in seconds.
            memory_mib: address space in MiB that a process may use for its calls. None: unlimited.
            source_column: data column that selects the functions for a row. None: all functions apply.
            sandbox: settings for functions that use sandboxes. A sandbox is stopped after SANDBOX_SHARE of timeout_s.
            outage_s: total time in seconds that all calls of a function wait for an unavailable server.
        """
        entries = {
            entry if isinstance(entry, str) else entry.label: RewardFunction(function=entry)
            if isinstance(entry, str)
            else entry
            for entry in functions
        }
        arguments = {
            "functions": [(label, entry.function, entry.options) for label, entry in entries.items()],
            "judge": judge,
            "sandbox": None if sandbox is None else sandbox.model_dump(),
            "sandbox_s": SANDBOX_SHARE * timeout_s,
        }
        self._arguments = json.dumps(arguments, default=str).encode() + b"\n"
        self._memory_mib = memory_mib
        self._entries = entries
        self._source_column = source_column
        self._timeout_s = timeout_s
        self._outages = {name: Outage(outage_s) for name in (*self._entries, NAME)}
        self._children = {_start_child() for _ in range(num_processes)}
        self._idle: SimpleQueue[ChildProcess] = SimpleQueue()
        self._closed = False
        self.columns: dict[str, str | None] = {}
        """Data columns that functions use, each mapped to the name of one function that requires it, or to None.
        Includes the names in PROVIDED that functions use; the data must not have columns with these names."""
        self.batch_functions: list[str] = []
        """Names of the functions that take whole batches."""
        self.row_checks: dict[str, list[str]] = {}
        """Functions that check data rows, mapped to the data columns that their checks use."""
        self.image_functions: list[str] = []
        """Names of the functions that receive the images in prompts."""
        try:
            for child in self._children:
                self._send_arguments(child)
            for started in list(self._children):
                child, ready = self._load_or_replace(started)
                self.columns, self.batch_functions = ready["columns"], ready["batch_functions"]
                self.row_checks, self.image_functions = ready["row_checks"], ready["image_functions"]
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
        """Call the function as soon as a process is free. Calls start in the order of submission. The function receives
        the data row's columns that its parameters name."""
        row = self._sent(function, columns)

        def results(_: Sequence[int]) -> list[Result]:
            return [Result(**self._run(function, arguments, row))]

        return self._threads.submit(lambda: self._repeat(function, results, 1)[0])

    def call_batch(
        self,
        function: str,
        prompts: Sequence[Prompt],
        responses: Sequence[Any],
        columns: Sequence[Mapping[str, Any]] | None = None,
    ) -> Future[list[Result]]:
        """Call a batch function once for all samples.

        Args:
            responses: texts, or RGB images as uint8 [height, width, 3].
            columns: the data columns of each sample; None uses the columns of its prompt.
        """
        rows = [self._sent(function, row) for row in ([p.columns for p in prompts] if columns is None else columns)]

        def results(indices: Sequence[int]) -> list[Result]:
            batch = [prompts[i] for i in indices]
            pairs = [prompt.text for prompt in batch], [responses[i] for i in indices]
            reply = self._run(function, (*pairs, [prompt.answer for prompt in batch]), [rows[i] for i in indices])
            return [Result(**fields) for fields in reply.get("results", [reply] * len(batch))]

        return self._threads.submit(lambda: self._repeat(function, results, len(prompts)))

    def _sent(self, function: str, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns to send to a function. Omit images unless it uses them."""
        uses_images = function in self.image_functions
        return {name: value for name, value in columns.items() if uses_images or name != PROMPT_IMAGE_FILES}

    def _repeat(
        self, function: str, call: Callable[[Sequence[int]], Sequence[Result]], num_samples: int
    ) -> list[Result]:
        """Call a function, and repeat the call for samples that failed because of the infrastructure. Return the
        results of all samples. `call` returns the results of the samples with the given indices."""
        outage, num_lost = self._outages[function], 0
        pauses, results = outage.begin_call(), list(call(range(num_samples)))
        while failed := [i for i, result in enumerate(results) if result.is_infrastructure]:
            failure = results[failed[0]].failure
            if any(results[i].kind == "away" for i in failed):
                pause, limit = next(pauses), f"waited for rewards.outage_s={outage.limit_s:g}"
            else:
                num_lost += 1
                pause, limit = 0.0 if num_lost <= RESTARTS else None, f"in each of {num_lost} attempts"
            if pause is None or self._ended.wait(pause):
                for i in failed if num_lost or outage.limit_s else ():
                    results[i] = replace(results[i], failure=f"{results[i].failure} ({limit})")
                return results
            print(f"rewards: {function} {failure}; repeating the call (samples: {len(failed)})", flush=True)
            for i, result in zip(failed, call(failed), strict=True):
                results[i] = result
        outage.end()
        return results

    def check_rows(self, function: str, rows: Sequence[tuple[Any, Mapping[str, Any]]]) -> Future[Sequence[str | None]]:
        """Check rows, given as (answer, columns), with a function in `row_checks`. Return the problem with each row, or
        None. rewards.timeout_s limits the mean time per row."""

        def problems() -> Sequence[str | None]:
            reply: dict[str, Any] = {}
            for _ in range(RESTARTS + 1):
                reply = self._run(function, rows, None, self._timeout_s * len(rows))
                if reply.get("kind", "error") == "error":
                    failure = (
                        f"{function} {reply.get('failure')} while it checked {len(rows)} rows. Fix: raise "
                        "rewards.timeout_s or rewards.memory_mib, or drop the row that exceeds the limit"
                    )
                    return reply.get("problems", [failure] * len(rows))
            raise InfrastructureFailure(
                f"{function} {reply['failure']} in each of {RESTARTS + 1} attempts to check rows. Fix: lower "
                "rewards.processes, or run on a node with more memory"
            )

        return self._threads.submit(problems)

    def _run(
        self, function: str, arguments: Sequence[Any], columns: Any, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Run a call in an idle process. Return its reply, or the fields of a Result that describes the failure."""
        child = self._idle.get()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            number = new_number()
            return child.call(pickle.dumps((number, function, tuple(arguments), columns)), timeout_s, number)
        except ChildFailure as failure:
            if failure.timed_out:
                return {"value": None, "failure": f"did not return within rewards.timeout_s={self._timeout_s:g}"}
            if child.kill_reason is not None:
                return {"value": None, "failure": child.kill_reason}
            if failure.was_killed and not self._closed:
                reason = f"lost its process ({failure}, possibly because memory ran out)"
                return {"value": None, "failure": reason, "kind": "lost"}
            reason = failure.with_limit("rewards.memory_mib", self._memory_mib)
            return {"value": None, "failure": f"terminated its process ({reason})"}
        finally:
            self._idle.put(self._replacement(child) if child.has_ended and not self._closed else child)

    def _replacement(self, child: ChildProcess) -> ChildProcess:
        return self._load_or_replace(self._start_instead(child))[0]

    def _start_instead(self, child: ChildProcess) -> ChildProcess:
        self._children.remove(child)
        new = _start_child()
        self._children.add(new)
        self._send_arguments(new)
        return new

    def _send_arguments(self, child: ChildProcess) -> None:
        with suppress(ChildFailure):  # `_load_functions` reports the failure
            child.send(self._arguments)

    def _load_or_replace(self, child: ChildProcess) -> tuple[ChildProcess, dict[str, Any]]:
        """Load the functions in a process. If it is killed while loading, start another one, up to RESTARTS times.
        Return the process and its reply."""
        for num_left in reversed(range(RESTARTS + 1)):
            try:
                return child, self._load_functions(child)
            except InfrastructureFailure:
                if not num_left or self._closed:
                    raise
                child = self._start_instead(child)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _load_functions(self, child: ChildProcess) -> dict[str, Any]:
        """Wait until the process has loaded its functions, and limit its memory. Return its first message. Raise
        UserError if loading fails."""
        importing, limit_s = "rewards", None  # the timeout starts after the worker's own imports
        try:
            while "ready" not in (reply := child.receive(limit_s)):
                if "refused" in reply:
                    raise UserError(reply["refused"])
                importing, limit_s = reply["importing"], max(self._timeout_s, IMPORT_S)
            if self._memory_mib is not None:
                child.limit_memory(self._memory_mib)
        except ChildFailure as failure:
            if failure.was_killed:
                raise InfrastructureFailure(
                    f"{importing}: the reward functions' process was killed while it started ({failure}). The "
                    "kernel kills processes when memory runs out. Fix: lower rewards.processes, or run on a node with "
                    "more memory"
                ) from None
            raise UserError(failure.import_error(importing, limit_s, ", or raise rewards.timeout_s")) from None
        return reply

    def close(self) -> None:
        """Kill all processes, including busy ones."""
        self._closed = True
        self._ended.set()
        self._kill_all()
        self._threads.shutdown(cancel_futures=True)

    def _watch(self) -> None:
        """Kill each worker that has more than MAX_PROCESSES processes."""
        while not self._ended.wait(WATCH_S):
            sizes = group_sizes()
            for child in list(self._children):
                if (size := sizes[child.pid]) > MAX_PROCESSES:
                    child.kill(f"had {size} processes at once, more than {MAX_PROCESSES},")

    def _kill_all(self) -> None:
        for child in list(self._children):
            child.kill()


def function_pool(config: Config, num_processes: int, outage_s: float | None = None) -> FunctionPool:
    """Create a pool for the run's reward functions. The default for outage_s is rewards.outage_s. Raise UserError if a
    function does not score the responses of rollout.engine."""
    require_response_kind(config.rewards.functions, config.rollout.engine)
    rewards, source = config.rewards, config.data.source_column
    limits = num_processes, rewards.timeout_s, rewards.memory_mib
    outage_s = rewards.outage_s if outage_s is None else outage_s
    return FunctionPool(rewards.functions, rewards.judge, *limits, source, config.sandbox, outage_s)


def columns_of(sample: AnySample) -> dict[str, Any]:
    """Return the values that functions may use: the data row's columns, the prompt's encoded images and, for a text,
    the number of its tokens."""
    tokens = {NUM_TOKENS: len(sample.response_ids)} if isinstance(sample, Sample) else {}
    return {**sample.prompt.columns, PROMPT_IMAGE_FILES: sample.prompt.files, **tokens}


def _start_child() -> ChildProcess:
    return ChildProcess([sys.executable, "-m", "megarl.rewards.worker"])
