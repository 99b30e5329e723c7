"""A headless Chromium that a test speaks to through two pipes: the DevTools protocol without a driver and a port."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ANSWER_SECONDS = 60.0  # no test waits so long unless the browser hangs
FIRST_FREE = 10  # the browser reads from descriptor 3 and writes to 4


def chromium_or_skip() -> str:
    """Return the path of a Chromium."""
    for name in PROGRAMS:
        if path := shutil.which(name):
            return path
    pytest.skip("needs Chromium (Debian: chromium-headless-shell)")


class Browser:
    """One page in a browser, which ends with the context.

    Attributes:
        events: what the browser has said unasked.

    Args:
        folder: for its profile and its log.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._folder, self._session, self._number, self._read = folder, "", 0, b""
        commands, answers = os.pipe(), os.pipe()
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, FIRST_FREE) for end in (commands[0], answers[1])]
        self._commands, self._answers = commands[1], answers[0]
        options = ["--headless", "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", "--disable-gpu"]
        options += ["--no-sandbox", "--disable-dev-shm-usage", "--no-first-run"]  # root, small containers; our own page
        with (folder / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash", program, *options],
                pass_fds=theirs,
                stdout=log,
                stderr=log,
            )
        for descriptor in (*theirs, commands[0], answers[1]):
            os.close(descriptor)

    def __enter__(self) -> Browser:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = ""
        try:
            self.call("Browser.close")  # of one that is killed, processes go on for a moment, and write its profile
            self._process.wait(ANSWER_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._commands)
            os.close(self._answers)

    def open(self, page: Path, *, width: int, height: int = 800) -> None:
        """Load a file on a screen of ``width`` CSS pixels. As on a phone, the page says how wide it wants to be."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"]["value"]

    def screenshot(self, file: Path) -> None:
        """Write what is on the screen as a PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        """Return the next message of the browser."""
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], ANSWER_SECONDS)
            more = os.read(self._answers, 1 << 16) if ready else b""
            assert more, f"the browser has ended or hangs: {(self._folder / 'browser.log').read_text()[-2000:]}"
            self._read += more
        message, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
