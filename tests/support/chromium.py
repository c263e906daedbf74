"""A real Chromium, driven over its debugging pipe: clicks, keys, touches and screenshots, without a further package."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
SECONDS = 60.0


class Page:
    """A tab; every method waits for the browser's answer."""

    def __init__(self, out: int, back: int) -> None:
        self._out, self._back = out, back
        self._rest, self._count = b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol, and its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium does not answer"
            self._rest += os.read(self._back, 1 << 20)
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        given = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(given["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning"):
                self.errors.append(json.dumps(given["args"])[:500])
            case "Log.entryAdded" if given["entry"]["level"] == "error":
                self.errors.append(given["entry"]["text"])
            case "Network.requestWillBeSent":
                url = given["request"]["url"]
                if not url.startswith(("file:", "data:", "blob:", "about:")):
                    self.errors.append(f"request: {url}")

    def look(self, *, width: int, height: int = 900, dark: bool = False, touch: bool = False) -> None:
        """A window of this width, of a desktop or of a phone."""
        scale = 2 if touch else 1
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=touch,
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(
        self, file: Path, *, ready: str = "document.readyState === 'complete'", fragment: str = ""
    ) -> None:
        """Load a file, and wait until the expression is true."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=file.as_uri() + fragment)
        end = time.monotonic() + SECONDS
        while not self.value(ready):
            assert time.monotonic() < end, self.errors or "the page is not ready"
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def middle(self, selector: str) -> tuple[float, float]:
        """Where an element is in the window, scrolled to if need be."""
        place = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        assert place, f"there is no {selector}"
        return place[0], place[1]

    def click(self, selector: str) -> None:
        """With the mouse."""
        self.click_at(*self.middle(selector))

    def click_at(self, x: float, y: float) -> None:
        """With the mouse."""
        self.hover_at(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        """With the mouse."""
        self.hover_at(*self.middle(selector))

    def hover_at(self, x: float, y: float) -> None:
        """With the mouse."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tap(self, selector: str) -> None:
        """With a finger."""
        x, y = self.middle(selector)
        self.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str, times: int = 1) -> None:
        """On the keyboard."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Tab": 9}.get(key, 0)
        for _ in range(times):
            self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        """As PNG."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A tab of a browser of its own, with its profile in the folder."""
    assert BROWSER is not None
    (read_out, out), (back, write_back) = os.pipe(), os.pipe()
    options = [*OPTIONS, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe"]
    # the browser reads commands from descriptor 3 and answers on 4
    line = f'exec "$@" 3<&{read_out} 4>&{write_back}'
    with subprocess.Popen(
        ["bash", "-c", line, "bash", BROWSER, *options],
        pass_fds=(read_out, write_back),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(read_out)
        os.close(write_back)
        try:
            yield Page(out, back)
        finally:
            process.kill()
            process.wait()
            os.close(out)
            os.close(back)
