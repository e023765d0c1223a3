"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import websocket

_PATIENCE_S = 60


class Browser:
    """One browser process. `page()` opens a file in a fresh tab."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if program is None:
            pytest.fail("the pages are tested in a real browser: apt-get install chromium")
        self._process = subprocess.Popen(
            [
                program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
                "--disable-dev-shm-usage", "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        port_file = folder / "DevToolsActivePort"
        deadline = time.monotonic() + _PATIENCE_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            if self._process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{program} did not start")
            time.sleep(0.05)
        self._address = f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}"

    def page(self, path: Path, *, width: int = 1280, height: int = 900, is_dark: bool = False) -> Page:
        """A file, opened and loaded; everything it logs and asks for is kept from the start."""
        request = urllib.request.Request(f"{self._address}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request) as answer:
            target = json.load(answer)
        page = Page(target["webSocketDebuggerUrl"])
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        page.prefer("dark" if is_dark else "light")
        page.open(path)
        return page

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=_PATIENCE_S)


class Page:
    """One tab: what it logged, what it asked for, and what a script inside it answers."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=_PATIENCE_S, suppress_origin=True)
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer; events that come meanwhile are kept."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") != number:
                self.events.append(message)
                continue
            if "error" in message:
                raise AssertionError(f"{method}: {message['error']}")
            found: dict[str, Any] = message["result"]
            return found

    def open(self, path: Path) -> None:
        self.send("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads(self._socket.recv()))
        self.run("typeof plotlyReady === 'undefined' ? null : plotlyReady.then(() => null)")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        answer = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str, code: int) -> None:
        """One key, as a keyboard sends it."""
        text = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )  # fmt: skip

    def draw_everything(self) -> None:
        """Bring every chart into view, as a reader who scrolls through does, until all are drawn."""
        self.run(
            """(async () => {
                for (const chart of charts) {
                    chart.node.scrollIntoView({ behavior: "instant", block: "center" });
                    for (let wait = 0; wait < 200 && !chart.node.querySelector(".main-svg"); wait += 1)
                        await new Promise((done) => setTimeout(done, 20));
                }
                window.scrollTo({ top: 0, behavior: "instant" });
            })()"""
        )

    def problems(self) -> list[str]:
        """Errors and warnings of the console, uncaught exceptions and blocked loads."""
        self.run("new Promise((done) => setTimeout(done, 50))")
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Every address that was asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path, *, is_whole: bool = False) -> None:
        options: dict[str, Any] = {"format": "png"}
        if is_whole:
            size = self.send("Page.getLayoutMetrics")["cssContentSize"]
            options |= {"captureBeyondViewport": True, "clip": {"x": 0, "y": 0, "scale": 1, **_sides(size)}}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **options)["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        self.send("Page.close")
        self._socket.close()


def _sides(size: dict[str, float]) -> dict[str, float]:
    return {"width": size["width"], "height": size["height"]}
