"""A headless Chromium for tests of pages: opens files, runs scripts, tells requests and errors.

    with Browser(tmp_path) as browser:
        browser.resize(400, dark=True)
        browser.open(tmp_path / "index.html")
        browser.value("document.title"), browser.errors, browser.requests

It is driven over the DevTools protocol. `CHROMIUM` is None where there is none.
"""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from base64 import b64decode
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)
START_S, ANSWER_S = 60, 60


class Browser:
    """One page of a browser whose profile is in `folder`."""

    def __init__(self, folder: Path) -> None:
        import websocket

        profile = folder / "profile"
        self._process = subprocess.Popen(
            [str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = self._port(profile / "DevToolsActivePort")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                pages = [one for one in json.load(answer) if one["type"] == "page"]
            address = pages[0]["webSocketDebuggerUrl"]
            self._socket = websocket.create_connection(address, timeout=ANSWER_S)
        except BaseException:
            self._process.kill()
            raise
        self._calls = 0
        self._events: list[dict[str, Any]] = []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self.call("Browser.close")
            self._socket.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    @staticmethod
    def _port(file: Path) -> str:
        """The port that the browser listens on, once it has written it."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if file.exists() and file.read_text().strip():
                return file.read_text().split()[0]
            time.sleep(0.05)
        raise TimeoutError("Chromium did not start")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The browser's answer; events that come before it are kept."""
        self._calls += 1
        order = {"id": self._calls, "method": method, "params": parameters}
        self._socket.send(json.dumps(order))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._calls:
                assert "error" not in message, message
                return message["result"]
            self._events.append(message)

    def resize(self, width: int, dark: bool = False, height: int = 900) -> None:
        """Set the window's width in pixels and the colours that the reader prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path) -> None:
        """Open a file and wait until it has loaded; earlier requests and errors are forgotten."""
        self._events.clear()
        loader = self.call("Page.navigate", url=page.resolve().as_uri())["loaderId"]
        end = time.monotonic() + ANSWER_S
        while not self._has_loaded(loader):
            assert time.monotonic() < end, f"{page} does not load"
            self.value("0")  # an answer brings the events before it

    def _has_loaded(self, loader: str) -> bool:
        """Whether the page of this navigation, and not the one before, has told that it loaded."""
        return any(
            event["method"] == "Page.lifecycleEvent"
            and event["params"]["loaderId"] == loader
            and event["params"]["name"] == "load"
            for event in self._events
        )

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression in the page is true."""
        end = time.monotonic() + ANSWER_S
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    @property
    def requests(self) -> list[str]:
        """The addresses that the page has asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._events
            if event["method"] == "Network.requestWillBeSent"
        ]

    @property
    def errors(self) -> list[str]:
        """What the console has of errors, and the exceptions of scripts."""
        found = []
        for event in self._events:
            told = event["params"]
            if event["method"] == "Log.entryAdded" and told["entry"]["level"] == "error":
                found.append(told["entry"]["text"])
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"]))
        return found
