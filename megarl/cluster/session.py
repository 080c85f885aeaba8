"""A Ray of our own on this machine, for the length of one run."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from megarl.cluster.failure import RunFailure, cause, is_cause, is_loss
from megarl.cluster.supervision import processes, segments
from megarl.cluster.supervision.watchdog import Watchdog
from megarl.config.schema import Config
from megarl.planning.object_store import FLOOR_MIB, object_store_mib

SETTLE_S = 3.0
"""After a first failure, how long the other calls may take to tell their own: the cause is among them."""

CHECK_S = 5.0
"""How often, during a wait, those are asked for a sign of life that are not waited for."""

PING_S = 1.0
"""How long they have to answer. One that is alive may take longer, for a dead one Ray answers at once."""

SMALL = 4096
"""Bytes up to which a result of a call is sent to the caller itself: samples stay where they were made."""

HEALTH_CHECKS = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 5,
    "gcs_rpc_server_reconnect_timeout_s": 10,
}
"""Short delays, so that a lost process is noticed within seconds."""


class Session:
    """Starts Ray and waits for remote calls with a deadline and a diagnosis. Inside `supervised`, which ends what is
    left of its processes."""

    def __init__(self, config: Config, logs: Path, scratch: Path):
        """scratch: the folder for files that are not needed after the run."""
        self.logs, self.scratch = logs.resolve(), scratch
        self._config = config.cluster
        self._watched: dict[str, ActorHandle] = {}
        logging.getLogger("ray").setLevel(logging.ERROR)  # its advice to administrators is not for the console
        os.environ.update(
            RAY_AUTH_TOKEN=secrets.token_hex(32),  # else Ray keeps one in the home folder
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",  # which GPUs a process sees, the placement says
        )
        terminate = signal.getsignal(signal.SIGTERM)
        ray.init(
            address="local",
            num_cpus=len(os.sched_getaffinity(0)),
            object_store_memory=object_store_bytes(config),
            object_spilling_directory=str(scratch / "spilled"),
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(scratch),
            # Ray's workers would yield to every other process; here they are the work itself.
            _system_config=HEALTH_CHECKS | {"worker_niceness": 0, "max_direct_call_object_size": SMALL},
        )
        # Ray's handler prints a stack and skips all clean-up.
        signal.signal(signal.SIGTERM, terminate)
        self._watchdog = Watchdog()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_) -> None:
        self._watchdog.stop()
        ray.shutdown()

    def watch(self, actors: Mapping[str, ActorHandle]) -> None:
        """From now on the loss of these processes (by name) ends every wait, also one for others."""
        self._watched |= actors

    def wait(
        self,
        calls: Mapping[str, ray.ObjectRef],
        phase: str,
        timeout_s: float | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Results of remote calls (by the name of the process that runs each), in order.

        The first failure ends the wait: a ValueError from a worker is raised as such, anything else is a RunFailure
        that names process and phase. timeout_s: None takes cluster.step_timeout_s. meanwhile: called now and then
        during a long wait; it may wait for other processes.
        """
        answers, _ = self.gather(calls, phase, timeout_s, meanwhile=meanwhile)
        return list(answers.values())

    def gather(
        self,
        calls: Mapping[str, ray.ObjectRef],
        phase: str,
        timeout_s: float | None = None,
        expendable: Collection[str] = (),
        meanwhile: Callable[[], object] | None = None,
    ) -> tuple[dict[str, Any], set[str]]:
        """As `wait`, but the loss of an expendable process is no failure. Returns the answers by process, without those
        of calls that failed because of a loss, once every call has ended; and the processes that are lost.
        """
        timeout_s = timeout_s or self._config.step_timeout_s
        deadline = time.monotonic() + timeout_s
        names = {ref: name for name, ref in calls.items()}
        pending = list(names)
        errors: dict[str, Exception] = {}
        while pending:
            self._watchdog.phase = phase
            remaining = deadline - time.monotonic()
            ready, pending = ray.wait(pending, timeout=min(max(remaining, 0.0), CHECK_S))
            waiting = [names[ref] for ref in pending]
            errors |= _errors(ready, names) if ready else self._lost(set(self._watched).difference(waiting))
            if errors and not _lost_among(errors, expendable):
                errors |= self._settled(errors, pending, names)
            if fatal := _unexplained(errors, expendable):
                raise cause(fatal, phase, self.logs)
            if not ready and remaining <= 0:
                raise RunFailure(
                    f"{phase}: no answer from {', '.join(waiting)} in {timeout_s:g} s; {self._seen(waiting)}"
                )
            if not ready and meanwhile is not None:
                meanwhile()
        answers = {name: ray.get(ref) for name, ref in calls.items() if name not in errors}
        return answers, _lost_among(errors, expendable)

    def _seen(self, stuck: Sequence[str]) -> str:
        """Where it can be seen what these processes are doing, if they still tell."""
        files = processes.ask_for_stacks([self.logs / f"{name}.log" for name in stuck])
        return f"their stacks are at the end of {', '.join(map(str, files))}" if files else f"see {self.logs}"

    def _lost(self, idle: Collection[str]) -> dict[str, Exception]:
        """The errors of those processes that died while nothing was asked of them."""
        pings = {self._watched[name].__ray_ready__.remote(): name for name in idle}
        answered, _ = ray.wait(list(pings), num_returns=len(pings), timeout=PING_S) if pings else ([], [])
        return _errors(answered, pings)

    def _settled(
        self, errors: dict[str, Exception], pending: Sequence[ray.ObjectRef], names: Mapping[ray.ObjectRef, str]
    ) -> dict[str, Exception]:
        """The errors, those that follow soon, and losses not noticed before. Does not return if Ray itself is lost."""
        late, _ = ray.wait(list(pending), num_returns=len(pending), timeout=SETTLE_S) if pending else ([], [])
        errors = errors | _errors(late, names)
        errors |= self._lost(set(self._watched).difference(errors))
        if any(map(is_loss, errors.values())):
            # A raylet that ends takes its actors with it, and they end first.
            time.sleep(1.0)
            self._watchdog.check()
        return errors


def object_store_bytes(config: Config) -> int:
    """As the config says; a size that follows from the batch is at most nine tenths of what the machine's shared memory
    has free, as Ray would put a larger store on the disk."""
    wanted = object_store_mib(config)
    if config.cluster.object_store_mib is None:
        wanted = min(wanted, max(FLOOR_MIB, 9 * shutil.disk_usage(segments.SHARED_MEMORY).free // 10 // 2**20))
    return wanted * 2**20


def _lost_among(errors: Mapping[str, Exception], expendable: Collection[str]) -> set[str]:
    return {name for name in expendable if is_loss(errors.get(name))}


def _unexplained(errors: Mapping[str, Exception], expendable: Collection[str]) -> dict[str, Exception]:
    """The errors, without those that follow from the loss of expendable processes if there is one."""
    lost = _lost_among(errors, expendable)
    if not lost:
        return dict(errors)
    return {name: e for name, e in errors.items() if name not in lost and is_cause(e)}


def _errors(ready: Sequence[ray.ObjectRef], names: Mapping[ray.ObjectRef, str]) -> dict[str, Exception]:
    errors: dict[str, Exception] = {}
    for ref in ready:
        try:
            ray.get(ref, timeout=0)
        except RayError as error:
            errors[names[ref]] = error
    return errors
