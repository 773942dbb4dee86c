"""A headless Chromium, controlled with its DevTools protocol over a WebSocket. It needs no further package."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S = 60.0


def find() -> str | None:
    """Return the path of a browser, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. ``errors`` contains its exceptions and console errors."""

    def __init__(self, socket: Any):
        self._socket, self._numbers = socket, itertools.count(1)
        self.errors: list[str] = []
        self._loads = 0
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (message := self._hear()).get("id") != number:
            pass
        assert "error" not in message, message
        return message["result"]

    def _hear(self) -> dict[str, Any]:
        message = json.loads(self._socket.recv(START_S))
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:500])
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.errors.append(message["params"]["entry"]["text"])
        self._loads += message.get("method") == "Page.loadEventFired"
        return message

    def reload(self) -> None:
        """Load the page again. Calls during the navigation would get no answer."""
        before = self._loads
        self.call("Page.reload")
        while self._loads == before:
            self._hear()

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page. If the value is a promise, wait for its result."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str) -> Any:
        """Return the value of an expression once it is true."""
        end = time.monotonic() + START_S
        # the page may still be loading
        guarded = f"(() => {{ try {{ return {script}; }} catch (error) {{ return false; }} }})()"
        while not (found := self.evaluate(guarded)):
            assert time.monotonic() < end, f"{script}: {self.evaluate('document.body.innerText')[:2000]}"
            time.sleep(0.05)
        return found

    def press(self, key: str, code: int) -> None:
        """Press and release one key."""
        text = {"text": "\r"} if key == "Enter" else {}  # this text submits a form
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def size(self, width: int, height: int) -> None:
        """Set the size of the window, for example to that of a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True
        )


@contextmanager
def browsing(address: str, folder: Path) -> Iterator[Page]:
    """Open a browser with one page of ``address`` until the end of the block. ``folder`` gets its profile."""
    import urllib.request

    from websockets.sync.client import connect

    program = find()
    assert program is not None
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--remote-debugging-port=0", "--no-first-run", f"--user-data-dir={folder}", address]
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        end = time.monotonic() + START_S
        while not (port := folder / "DevToolsActivePort").exists() or not port.read_text().strip():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        number = port.read_text().split()[0]
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{number}/json/list", timeout=START_S) as reply:
                tabs = [tab for tab in json.load(reply) if tab["type"] == "page"]
            if tabs:
                break
            assert time.monotonic() < end
            time.sleep(0.05)
        with connect(tabs[0]["webSocketDebuggerUrl"], max_size=None, origin=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(START_S)
