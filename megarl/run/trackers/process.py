"""The tracker process. It reads one JSON request per line from a socket. For each request it replies with one line,
which is empty on success and contains the error otherwise. If the tracker's library raises an error, the process
remains available for the next request."""

from __future__ import annotations

import json
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from megarl.run.trackers.backends import BACKENDS, Backend, Settings


class Server:
    """Serves the requests for one tracker: `open`, one `write` per step, and `close`."""

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
        if "close" in request:
            self._backend.close()


def main(descriptor: int) -> None:
    server = Server()
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            try:
                server.serve(json.loads(line))
                reply = ""
            except BaseException as error:  # a library may even call sys.exit
                traceback.print_exc()
                reply = " ".join(f"{type(error).__name__}: {error}".split()) or "unknown error"
            lines.write(reply + "\n")
            lines.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
