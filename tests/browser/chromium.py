"""A page in headless Chromium, controlled over the DevTools protocol. Chromium has no network except 127.0.0.1."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tests.timing import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENSHOTS = os.environ.get("SCREENSHOTS")
"""A folder for screenshots of the pages, for manual inspection."""


def command(folder: Path) -> list[str]:
    """Return the command that starts Chromium with its profile in `folder`."""
    assert CHROMIUM, "Chromium is not installed. Fix: run make test-browser, which installs it"
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    network = ("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--disable-background-networking")
    return [CHROMIUM, *flags, *network, f"--user-data-dir={folder / 'chromium'}", "--hide-scrollbars"]


class Tab:
    """A tab that was opened by `browse_with`. Mouse positions are in CSS pixels of the window."""

    def __init__(self, write: int, read: int):
        self._write, self._read = os.fdopen(write, "wb", buffering=0), os.fdopen(read, "rb")
        self._numbers = count(1)
        self._session: str | None = None
        self.problems: list[str] = []
        """Uncaught exceptions, console errors and violations of the content security policy."""

    def open(self, address: str, width: int = 1200, height: int = 1000) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Performance.enable", timeDomain="threadTicks")  # reports CPU time of the page's main thread
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._receive())
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _receive(self) -> bytes:
        parts = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            assert byte, "Chromium has exited"
            parts += byte
        return bytes(parts)

    def _note(self, event: str | None, parameters: dict[str, Any]) -> None:
        is_error = event == "Log.entryAdded" and parameters["entry"]["level"] == "error"
        if event == "Runtime.exceptionThrown" or is_error:
            self.problems.append(json.dumps(parameters)[:2000])

    def eval(self, expression: str) -> Any:
        """Return the value of a JavaScript expression as JSON."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str) -> None:
        wait_until(lambda: self.eval(f"Boolean({expression})"), lambda: expression)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, x: float, y: float, to_x: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseMoved", (x + to_x) / 2, y, button="left")
        self.mouse("mouseMoved", to_x, y, button="left")
        self.mouse("mouseReleased", to_x, y, button="left", clickCount=1)

    def double_click(self, x: float, y: float) -> None:
        for clicks in (1, 2):
            self.mouse("mousePressed", x, y, button="left", clickCount=clicks)
            self.mouse("mouseReleased", x, y, button="left", clickCount=clicks)

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def cpu_seconds(self) -> float:
        """Return the CPU time of the page's main thread."""
        metrics = self.call("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    def take_picture(self, name: str) -> None:
        """Save the window if SCREENSHOTS is set."""
        if SCREENSHOTS:
            data = self.call("Page.captureScreenshot", format="png")["data"]
            (Path(SCREENSHOTS) / f"{name}.png").write_bytes(base64.b64decode(data))


@contextmanager
def browse_with(folder: Path, address: str, width: int = 1200, height: int = 1000) -> Iterator[Tab]:
    """Open the address in a tab of a new Chromium, whose profile is in `folder`."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    # Chromium reads commands from descriptor 3 and writes events to descriptor 4.
    script = 'exec "$@" 3<&"$0" 4>&"$OUT"'
    process = subprocess.Popen(
        ["bash", "-c", script, str(to_read), *command(folder), "--remote-debugging-pipe"],
        env=os.environ | {"OUT": str(from_write)},
        pass_fds=(to_read, from_write),
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        tab = Tab(to_write, from_read)
        tab.open(address, width, height)
        yield tab
    finally:
        process.terminate()
        process.wait()
