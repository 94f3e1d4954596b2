"""A real browser for the tests of pages: headless Chromium, controlled over two pipes (no open port)."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync", "--disable-breakpad"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"),
)
PATIENCE_S = 180.0


class NoBrowser(Exception):
    """Chromium is installed and does not start here; the text is the error output."""


def program() -> str | None:
    """Returns the path of Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def sandbox() -> tuple[str, ...]:
    """Returns Chromium's sandbox flags: root and kernels without namespaces need `--no-sandbox`."""
    spaces = ["unshare", "--user", "--pid", "--net", "--fork", "true"]
    available = os.geteuid() != 0 and shutil.which(spaces[0]) is not None
    if available and subprocess.run(spaces, capture_output=True, timeout=60).returncode == 0:
        return ()
    return ("--no-sandbox",)


class Browser:
    """A single page. `errors` lists errors of the script and of the content security policy, `requests` the requested
    URLs.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        # Not `select.select`: it takes no file descriptor above 1023, and a process of many tests has more.
        self._poll = select.poll()
        self._poll.register(read, select.POLLIN)
        self._number, self._rest, self._session = 0, b"", ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._arrived: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, file: Path, fragment: str = "", width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Loads a page in a file and waits until the load is complete."""
        self.visit(f"{file.absolute().as_uri()}{fragment}", width, height, dark)

    def visit(self, address: str, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Loads an address and waits until the load is complete."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        # Starts from a blank page: a move within the same page would only scroll.
        for url in ("about:blank", address):
            self._arrived.clear()
            self._call("Page.navigate", url=url)
            deadline = time.monotonic() + PATIENCE_S
            while "Page.loadEventFired" not in self._arrived:
                self._message(deadline)

    def value(self, expression: str) -> Any:
        """Returns the value of an expression in the page, after waiting for a promise."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Waits until an expression is true in the page."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.value(f"!!({expression})"):
            assert time.monotonic() < deadline, f"still not: {expression}; {self.errors}"
            time.sleep(0.05)

    def key(self, key: str) -> None:
        """Presses a key."""
        text = {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def point(self, x: float, y: float) -> None:
        """Moves the mouse."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, file: Path, whole: bool = False) -> None:
        """Writes the visible page, or the whole page, as PNG."""
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """Asks the browser to end, child processes first."""
        self._session = ""
        self._call("Browser.close")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self._message(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready = self._poll.poll(1000 * max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium has not answered within {PATIENCE_S:g} s"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "Chromium has ended"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        method, parameters = message.get("method", ""), message.get("params", {})
        self._arrived.append(method)
        if method == "Log.entryAdded":
            self.errors.append(str(parameters["entry"].get("text")))
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        return message


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Yields a browser with a private profile folder, closed at the end of the context.

    Raises:
        NoBrowser: The browser does not start.
    """
    executable = program()
    assert executable
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]

    def fixed() -> None:  # Chromium listens on 3 and speaks on 4
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    stderr = profile / "stderr.txt"
    with stderr.open("wb") as log:
        process = subprocess.Popen(
            [executable, *FLAGS, *sandbox(), "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            env={**os.environ, "HOME": str(profile)},  # location of crash reports
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(3, 4),
            preexec_fn=fixed,
            start_new_session=True,
        )
    for end in (theirs_in, theirs_out, *high):
        os.close(end)
    try:
        try:
            page = Browser(ours_out, ours_in)
        except (AssertionError, OSError) as error:
            raise NoBrowser(f"{error}; {' '.join(stderr.read_text(errors='replace')[-500:].split())}") from None
        yield page
        page.close()
        process.wait(PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        os.close(ours_out)
        os.close(ours_in)
