"""Start Ray without services that runs do not need. `python -m` on this module is the `ray` command without them."""

from __future__ import annotations

import copy
import time
from typing import Any

import ray._private.services
import ray._private.utils
from ray._private.node import Node
from ray._private.parameter import RayParams

STARTS, START_S = 3, 300.0
"""Number of attempts to start Ray on a node, and the timeout of each in seconds. Ray's own timeout of 30 s is too short
for a busy node and cannot be configured. Several attempts are needed, because the raylet exits if its agents exceed
similar timeouts."""


def adapt_node() -> None:
    """Make this process start Ray without unused services, and wait for Ray's processes on a busy node."""
    _disable_unused_services()
    Node.__init__ = _started_again(Node.__init__)


def _disable_unused_services() -> None:
    """Keep this process from starting Ray's autoscaler, log monitor, dashboard and the optional part of Ray's agents.

    Ray has no options to turn these services off. They take seconds to start, and some listen without authentication.
    """
    Node.start_monitor = Node.start_log_monitor = Node.start_api_server = lambda *_, **__: None
    missing = ImportError("megarl runs Ray without its dashboard")
    # Ray then behaves as if its optional packages were not installed.
    ray._private.utils.get_dashboard_dependency_error = lambda: missing


def _started_again(start: Any) -> Any:
    """Return Node.__init__ with up to STARTS attempts."""
    find = ray._private.services.get_node

    def attempt(node: Node, ray_params: RayParams, *args: Any, **kwargs: Any) -> None:
        for number in range(1, STARTS + 1):
            ray._private.services.get_node = _awaited(find, node)
            try:
                return start(node, copy.deepcopy(ray_params), *args, **kwargs)
            except Exception as error:
                # Kill gracefully, so that the raylet ends its agents.
                node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
                if number == STARTS:
                    raise
                print(f"Ray did not start on this node; trying again: {error}", flush=True)
                vars(node).clear()
            finally:
                ray._private.services.get_node = find

    return attempt


def _awaited(find: Any, node: Node) -> Any:
    """Return a version of `find` that waits for the node to register as long as its raylet is running."""

    def wait(*args: Any) -> Any:
        deadline = time.monotonic() + START_S
        while True:
            try:
                return find(*args)
            except RuntimeError:
                raylets = node.all_processes["raylet"]
                if time.monotonic() > deadline or any(raylet.process.poll() is not None for raylet in raylets):
                    raise
            time.sleep(0.1)

    return wait


if __name__ == "__main__":
    from ray.scripts.scripts import main

    adapt_node()
    main()
