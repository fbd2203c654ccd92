"""A browser for tests of pages."""

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Browser:
    """Headless Chromium through chromedriver's own HTTP interface; needs no package."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options = {"goog:chromeOptions": {"args": flags}, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        session = self.call("/session", {"capabilities": {"alwaysMatch": options}})
        self.base += f"/session/{session['sessionId']}"

    def call(self, path: str, body: Any = None, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.call("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, address: str) -> None:
        self.call("/url", {"url": address})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("/screenshot", method="GET")))

    def run(self, script: str) -> Any:
        return self.call("/execute/sync", {"script": script, "args": []})

    def log(self, kind: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.call("/se/log", {"type": kind})
        return entries

    def tab(self) -> Any:
        keys = [{"type": "keyDown", "value": "\ue004"}, {"type": "keyUp", "value": "\ue004"}]
        self.call("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": keys}]})
        return self.run("const e = document.activeElement; return e.getAttribute('href') || e.className || e.tagName")


@pytest.fixture
def browser() -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    if driver is None or not (shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("no chromium with its chromedriver here")
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        port = next(
            int(m[1]) for line in process.stdout if (m := re.search(r"started successfully on port (\d+)", line))
        )
        chromium = Browser(port)
        yield chromium
        chromium.call("", method="DELETE")
    finally:
        process.terminate()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()
