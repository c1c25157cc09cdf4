"""A real Chromium for tests, driven through its DevTools protocol over a pipe: nothing but the browser is needed.

https://chromedevtools.github.io/devtools-protocol/ - messages are JSON, each ended by a NUL byte.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 60.0
"""Seconds that a message may take on a busy machine."""


def chromium() -> str:
    """The browser's path; a test fails in one line where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(
            "no Chromium on the PATH; scripts/test installs it for root (apt-get install chromium)", pytrace=False
        )
    return found


class Browser:
    """One page in one browser with an empty profile. Keeps what the console said, and what was asked of the net."""

    def __init__(self, profile: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()  # to the browser, from the browser: its descriptors 3 and 4
        # bash: other shells take no descriptor above 9
        shell = f'exec "$0" "$@" 3<&{ours[0]} 4>&{theirs[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, chromium(), *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._out, self._in, self._rest = ours[1], theirs[0], b""
        os.set_blocking(self._in, False)
        self._count = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._wait(lambda each: each.get("id") == message["id"])
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a file in a window of this size; narrow ones are a phone with a finger."""
        phone = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1 + phone, mobile=phone
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        for url in ("about:blank", path.resolve().as_uri()):  # away first: a page already open would not be loaded anew
            self._events.clear()
            self.send("Page.navigate", url=url)
            self._wait(lambda each: each.get("method") == "Page.loadEventFired", keep=True)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def key(self, name: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, text="\r" if name == "Enter" else "")
        self._settle()

    def click(self, selector: str) -> None:
        """Click the middle of the first piece of an element, scrolled into view."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = self.run(
            f"(() => {{ const b = document.querySelector({selector!r}).getClientRects()[0];"
            "return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)
        self._settle()

    def hover(self, selector: str) -> None:
        """Move the mouse over an element."""
        box = self.run(
            f"(() => {{ const b = document.querySelector({selector!r}).getClientRects()[0];"
            "return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        self._settle()

    def _settle(self) -> None:
        """Let the page do what the input sets off: some of its events (toggle, scroll) come a frame later."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 20))))")

    def shoot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        picture = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings on the console since the page was opened, exceptions among them."""
        bad = ("error", "warning", "assert")
        found = [json.dumps(e["params"]) for e in self._events if e["method"] == "Runtime.exceptionThrown"]
        said = [e["params"] for e in self._called("Runtime.consoleAPICalled")]
        found += [json.dumps(each) for each in said if each["type"] in bad]
        return found + [
            e["params"]["entry"]["text"]
            for e in self._called("Log.entryAdded")
            if e["params"]["entry"]["level"] in ("error", "warning")
        ]

    @property
    def requests(self) -> list[str]:
        """What the page asked for besides itself and what it holds."""
        urls = [e["params"]["request"]["url"] for e in self._called("Network.requestWillBeSent")]
        return [url for url in urls[1:] if not url.startswith("data:")]

    def close(self) -> None:
        """End the browser."""
        self._session = None
        with suppress(OSError, AssertionError):
            self.send("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def _called(self, method: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event["method"] == method]

    def _wait(self, wanted: Callable[[dict[str, Any]], bool], *, keep: bool = False) -> dict[str, Any]:
        """The next message of this kind; events that come before it are kept."""
        if keep:
            for event in self._events:
                if wanted(event):
                    return event
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            while b"\0" in self._rest:
                line, self._rest = self._rest.split(b"\0", 1)
                message = json.loads(line)
                if "method" in message:
                    self._events.append(message)
                if wanted(message):
                    return dict(message)
            try:
                self._rest += os.read(self._in, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
            assert self._process.poll() is None, f"Chromium ended with {self._process.returncode}"
        raise AssertionError(f"Chromium did not answer within {PATIENCE:.0f} s")
