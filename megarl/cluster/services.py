"""Ray without the services that runs do not use. As a program it is the `ray` command without them."""

from __future__ import annotations

import ray._private.utils
from ray._private.node import Node


def disable_unused_services() -> None:
    """Start neither Ray's autoscaler, log monitor and dashboard, nor the optional part of its agents, in this process.

    Ray has no options to turn these services off. They take seconds to start, and some listen without authentication.
    """
    Node.start_monitor = Node.start_log_monitor = Node.start_api_server = lambda *_, **__: None
    missing = ImportError("megarl runs Ray without its dashboard")
    ray._private.utils.get_dashboard_dependency_error = lambda: missing  # as if only Ray's core were installed


if __name__ == "__main__":
    from ray.scripts.scripts import main

    disable_unused_services()
    main()
