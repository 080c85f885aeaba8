"""A live report that a thread serves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.report.live import serve
from tests.timing import WAIT_S


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Yield the report's URL. The thread ends with the body: a thread that keeps serving a closed socket would use a
    core until the tests end.
    """
    with serve(folder) as (url, server):
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield url
        finally:
            server.shutdown()
            thread.join(WAIT_S)
        assert not thread.is_alive()
