"""The tracker process. It receives JSON requests and replies to each with an error message (empty on success). If the
tracker's library raises an error, the process remains available for the next request."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from io import BufferedRWPair
from typing import Any

from megarl.run.trackers.backends import BACKENDS, Backend, Settings
from megarl.usercode.parent import connect, send


class Server:
    """Serves the requests for one tracker: `open`, a `write` per step, a `write_images` per step with images, and
    `close`."""

    def __init__(self) -> None:
        self._settings: Settings | None = None
        self._backend: Backend | None = None

    def serve(self, request: Mapping[str, Any]) -> None:
        if "open" in request:
            self._settings = Settings(**request["open"])
        if self._backend is None:
            assert self._settings is not None, "the first request must be `open`"
            self._backend = BACKENDS[self._settings.tracker](self._settings)
        if "write" in request:
            self._backend.write(*request["write"])
        if "write_images" in request:
            self._backend.write_images(*request["write_images"])
        if "close" in request:
            self._backend.close()


def main(parent: BufferedRWPair) -> None:
    server = Server()
    for line in parent:
        try:
            server.serve(json.loads(line))
            failure = ""
        except BaseException as error:  # including SystemExit, in case a library calls sys.exit
            traceback.print_exc()
            failure = " ".join(f"{type(error).__name__}: {error}".split())
        send(parent, {"failure": failure})


if __name__ == "__main__":
    main(connect())
