"""Ray without the services that runs do not use. Run as a module, it is the `ray` command without these services."""

from __future__ import annotations

import ray._private.utils
from ray._private.node import Node


def disable_unused_services() -> None:
    """Keep this process from starting Ray's autoscaler, log monitor, dashboard and the optional part of Ray's agents.

    Ray has no options to turn these services off. They take seconds to start, and some listen without authentication.
    """
    Node.start_monitor = Node.start_log_monitor = Node.start_api_server = lambda *_, **__: None
    missing = ImportError("megarl runs Ray without its dashboard")
    ray._private.utils.get_dashboard_dependency_error = lambda: missing  # as if only Ray's core were installed


if __name__ == "__main__":
    from ray.scripts.scripts import main

    disable_unused_services()
    main()
