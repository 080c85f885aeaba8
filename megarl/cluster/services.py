"""Ray without the services that runs do not use. Run as a module, it is the `ray` command without these services."""

from __future__ import annotations

import copy
from typing import Any

import ray._private.utils
from ray._private.node import Node
from ray._private.parameter import RayParams

STARTS = 3
"""How often a node tries to start Ray. Ray stops waiting for its processes after 30 s, which it has no option for and
which a busy node exceeds."""


def adapt_node() -> None:
    """Make this process start Ray without its unused services, and more than once if Ray's processes are slow."""
    _disable_unused_services()
    Node.__init__ = _started_again(Node.__init__)


def _disable_unused_services() -> None:
    """Keep this process from starting Ray's autoscaler, log monitor, dashboard and the optional part of Ray's agents.

    Ray has no options to turn these services off. They take seconds to start, and some listen without authentication.
    """
    Node.start_monitor = Node.start_log_monitor = Node.start_api_server = lambda *_, **__: None
    missing = ImportError("megarl runs Ray without its dashboard")
    ray._private.utils.get_dashboard_dependency_error = lambda: missing  # as if only Ray's core were installed


def _started_again(start: Any) -> Any:
    """Return Node.__init__ with up to STARTS attempts."""

    def attempt(node: Node, ray_params: RayParams, *args: Any, **kwargs: Any) -> None:
        for number in range(1, STARTS + 1):
            try:
                return start(node, copy.deepcopy(ray_params), *args, **kwargs)
            except Exception as error:
                node.kill_all_processes(check_alive=False, wait=True)
                if number == STARTS:
                    raise
                print(f"Ray did not start on this node, trying again: {error}", flush=True)
                vars(node).clear()

    return attempt


if __name__ == "__main__":
    from ray.scripts.scripts import main

    adapt_node()
    main()
