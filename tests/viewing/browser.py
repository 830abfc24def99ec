"""A headless Chromium, driven through chromedriver by the W3C WebDriver protocol, with the standard library alone."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def is_there() -> bool:
    return shutil.which("chromium") is not None and shutil.which("chromedriver") is not None


class Browser:
    """One window; ``profile`` is an empty folder for what the browser keeps.

    Source: https://www.w3.org/TR/webdriver2/.
    """

    def __init__(self, profile: Path, width: int = 1200, height: int = 700) -> None:
        self._driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self._driver.stdout is not None
        started = (re.search(r"started successfully on port (\d+)", line) for line in self._driver.stdout)
        self._url = f"http://127.0.0.1:{next(match[1] for match in started if match)}/session"
        options = {
            "binary": shutil.which("chromium"),
            "args": [*ARGUMENTS, f"--user-data-dir={profile}", f"--window-size={width},{height}"],
        }
        session = self._post("", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})
        self._url += f"/{session['sessionId']}"

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(20)
            assert self._driver.stdout is not None
            self._driver.stdout.close()

    def open(self, file: Path) -> None:
        self._post("/url", {"url": file.absolute().as_uri()})

    def run(self, script: str) -> Any:
        """What the JavaScript returns."""
        return self._post("/execute/sync", {"script": script, "args": []})

    def point_at(self, x: float, y: float) -> None:
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self._post("/actions", {"actions": [mouse]})

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["value"]
