"""A Ray of our own on this machine, for the length of one run."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from megarl.cluster import processes
from megarl.cluster.failure import RunFailure
from megarl.cluster.watchdog import Watchdog
from megarl.config.schema import Cluster

SETTLE_S = 3.0
"""After a first failure, how long the other calls may take to tell their own: the cause is among them."""


class Session:
    """Starts Ray, waits for remote calls with a deadline and a diagnosis, and leaves no process behind."""

    def __init__(self, config: Cluster, logs: Path):
        self.logs = logs.resolve()
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="megarl-ray-"))
        processes.adopt_orphans()
        # Short delays, so that a lost process is noticed within seconds. Ray reads them when it starts.
        os.environ.update(
            RAY_health_check_period_ms="1000",
            RAY_health_check_timeout_ms="2000",
            RAY_health_check_failure_threshold="5",
            RAY_gcs_rpc_server_reconnect_timeout_s="10",
            RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
            RAY_USAGE_STATS_ENABLED="0",
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        )
        ray.init(
            address="local",
            num_cpus=len(os.sched_getaffinity(0)),
            object_store_memory=config.object_store_mib * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(self._folder),
        )
        self._watchdog = Watchdog(self._folder)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_) -> None:
        self._watchdog.stop()
        ray.shutdown()
        processes.end_descendants()
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self, calls: Mapping[str, ray.ObjectRef], phase: str, timeout_s: float | None = None) -> list[Any]:
        """Results of remote calls (by the name of the process that runs each), in order.

        The first failure ends the wait: a ValueError from a worker is raised as such, anything else is a RunFailure
        that names process and phase. timeout_s: None takes cluster.step_timeout_s.
        """
        deadline = time.monotonic() + (timeout_s or self._config.step_timeout_s)
        names = {ref: name for name, ref in calls.items()}
        pending = list(names)
        while pending:
            ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                waiting = ", ".join(names[ref] for ref in pending)
                raise RunFailure(f"{phase}: no answer from {waiting} before the deadline; see {self.logs}")
            errors = _errors(ready, names)
            if errors:
                settled, _ = ray.wait(pending, num_returns=len(pending), timeout=SETTLE_S) if pending else ([], [])
                raise self._cause({**errors, **_errors(settled, names)}, phase)
        return ray.get(list(calls.values()))

    def _cause(self, errors: Mapping[str, Exception], phase: str) -> Exception:
        """The most telling of several errors: a user's, then a lost process, then what its peers saw of it."""

        def rank(item: tuple[str, Exception]) -> int:
            _, error = item
            if isinstance(_origin(error), ValueError):
                return 0
            return 1 if isinstance(error, RayActorError) else 2

        name, error = min(errors.items(), key=rank)
        origin = _origin(error)
        if isinstance(origin, ValueError):
            return ValueError(str(origin))
        if isinstance(error, RayActorError):
            return RunFailure(f"{phase}: {name} died; see {self.logs / name}.log")
        first_line = str(origin).strip().splitlines()[:1]
        return RunFailure(
            f"{phase}: {name}: {type(origin).__name__}: {''.join(first_line)}; see {self.logs / name}.log"
        )


def _errors(ready: Sequence[ray.ObjectRef], names: Mapping[ray.ObjectRef, str]) -> dict[str, Exception]:
    errors: dict[str, Exception] = {}
    for ref in ready:
        try:
            ray.get(ref, timeout=0)
        except (RayTaskError, RayActorError, GetTimeoutError) as error:
            errors[names[ref]] = error
    return errors


def _origin(error: Exception) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error
