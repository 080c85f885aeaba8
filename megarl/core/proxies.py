"""Makes requests to a run's own servers bypass the HTTP proxy."""

from __future__ import annotations

import os

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def bypass_proxies(*hosts: str) -> None:
    """Add hosts to no_proxy for this process and its children. Otherwise, if http_proxy is set, requests to the run's
    own servers go to the proxy, but it cannot reach them."""
    present = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    listed = dict.fromkeys([*filter(None, (host.strip() for host in present.split(","))), *hosts])
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(listed)  # some clients read only one of the two
