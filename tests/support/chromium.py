"""A headless Chromium for tests of pages, driven by the DevTools protocol over a pair of pipes.

Source: Chrome DevTools Protocol, https://chromedevtools.github.io/devtools-protocol/. With --remote-debugging-pipe the
browser reads commands from descriptor 3 and writes answers to descriptor 4, each ended by a zero byte.
"""

import base64
import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

HAS_PIPES = sys.platform != "win32" and shutil.which("bash") is not None
PROGRAM = HAS_PIPES and next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 60
"""Time limit of each wait, which only a hanging browser reaches."""


class Page:
    """One page of the browser."""

    def __init__(self, into, out):
        self._into, self._out, self._number, self._session = into, out, 0, None
        self._rest, self._num_loaded = b"", 0
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(out, selectors.EVENT_READ)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.requests, self.errors = [], []
        """Addresses that were requested, and errors of scripts and of the page's policy."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Send a command, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _next(self):
        end = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            assert self._waiting.select(max(0, end - time.monotonic())), "the browser does not answer"
            read = os.read(self._out, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        parameters = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event.get("method") == "Page.loadEventFired":
            self._num_loaded += 1
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"])
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"])

    def open(self, path, *, width=1280, height=900, scheme="light"):
        """Open a file, and wait until its script has run."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        with self.loading():
            self.call("Page.navigate", url=path.absolute().as_uri())
        self.until("document.documentElement.dataset.ready === 'yes'")

    def value(self, expression):
        """Return the value of a JavaScript expression, which may be a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression):
        """Wait until a JavaScript expression is true."""
        check = f"const check = () => ({expression}) ? done(true) : setTimeout(check, 10)"
        assert self.value(f"new Promise(done => {{ {check}; check(); }})") is True

    def place(self, element):
        """Scroll an element into view, and return the coordinates of its middle."""
        return self.value(
            f"(async () => {{ const e = {element}; e.scrollIntoView({{block: 'center', inline: 'center'}});"
            "await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));"
            "const b = e.getBoundingClientRect(); return {x: b.x + b.width / 2, y: b.y + b.height / 2}; })()"
        )

    def click(self, element):
        """Click an element with the mouse."""
        at = self.place(element)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def hover(self, element):
        """Move the mouse to an element."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self.place(element))

    def press(self, key):
        """Press a key."""
        enter = {"code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **enter)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    @contextmanager
    def loading(self):
        """Wait at the end of the block until a page is loaded."""
        before = self._num_loaded
        yield
        while self._num_loaded == before:
            self._note(self._next())

    def picture(self, path):
        """Write a picture of the complete page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser(folder):
    """Start a browser with its data in a folder, and yield a page."""
    read_commands, into = os.pipe()
    out, write_answers = os.pipe()
    command = [
        *(PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--remote-debugging-pipe", f"--user-data-dir={folder}", "--no-first-run", "--disable-extensions"),
    ]
    # bash puts the pipes at the two descriptors that the browser uses
    shell = ["bash", "-c", f'exec "$@" 3<&{read_commands} 4>&{write_answers}', "bash", *command]
    environment = os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    process = subprocess.Popen(
        shell,
        pass_fds=(read_commands, write_answers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Page(into, out)
    finally:
        os.close(into)  # the browser ends
        process.terminate()
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(out)
