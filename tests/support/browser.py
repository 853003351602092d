"""Chromium without a window, driven by chromedriver's own protocol (W3C WebDriver is JSON over
HTTP, so it takes no further package).

`unavailable()` tells why it cannot be started here. Messages of a page's console, those of the
network and of the content security policy included, are kept by the driver until they are read.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

START_LIMIT_S = 60.0
WAIT_LIMIT_S = 30.0
STOP_LIMIT_S = 20.0
COMMAND_LIMIT_S = 60.0
POLL_S = 0.05
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""Under which WebDriver refers to an element of a page."""
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # containers that run tests as root have no sandbox to offer
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


def unavailable() -> str:
    """Why no browser can be driven here; "" = it can."""
    if _binary() is None:
        return f"no {' or '.join(BROWSERS)} on the path"
    return "" if shutil.which(DRIVER) else f"no {DRIVER} on the path"


def _binary() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class BrowserError(Exception):
    """What the driver refused, or what a script threw."""


@dataclass(frozen=True)
class Browser:
    """One window of its own profile."""

    http: httpx.Client
    session: str

    def command(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The value of a WebDriver command of this session.

        Raises:
            BrowserError: it failed.
        """
        return _value(self.http.request(method, f"/session/{self.session}{path}", json=body))

    def open(self, url: str) -> None:
        """Load a page, and wait for what it loads."""
        self.command("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body returns in the page."""
        body = {"script": script, "args": list(arguments)}
        return self.command("POST", "/execute/sync", body)

    def module(self, url: str, script: str, *arguments: Any) -> Any:
        """What a function body returns that has the exports of a module of the page as `m`."""
        wrapped = (
            "const done = arguments[arguments.length - 1];"
            f"import({json.dumps(url)}).then((m) => {{ {script} }})"
            ".then((value) => done({value}), (error) => done({error: String(error)}));"
        )
        body = {"script": wrapped, "args": list(arguments)}
        found = self.command("POST", "/execute/async", body)
        if "error" in found:
            raise BrowserError(found["error"])
        return found["value"]

    def text(self, selector: str) -> str:
        """What an element holds, shown or not."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def visible(self, selector: str) -> bool:
        """Whether the first such element is there and takes up room."""
        script = "return !!document.querySelector(arguments[0])?.getClientRects().length"
        return bool(self.run(script, selector))

    def texts(self, selector: str) -> list[str]:
        """Texts of all such elements."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return list(self.run(script, selector))

    def type(self, selector: str, text: str) -> None:
        """Type as a user does; keys without a letter are WebDriver's (`\\ue007` is Enter)."""
        self.command("POST", f"/element/{self._element(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        """Click where the element is seen; one that something covers is an error."""
        self.command("POST", f"/element/{self._element(selector)}/click", {})

    def _element(self, selector: str) -> str:
        body = {"using": "css selector", "value": selector}
        return str(self.command("POST", "/element", body)[ELEMENT])

    def set(self, selector: str, value: str) -> None:
        """Give a field a value, with the event that a user's change has."""
        script = (
            "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('change', {bubbles: true}))"
        )
        self.run(script, selector, value)

    def wait(self, script: str, *arguments: Any, limit_s: float = WAIT_LIMIT_S) -> Any:
        """What a function body returns once it is true."""
        return self.wait_until(lambda: self.run(script, *arguments), script, limit_s=limit_s)

    def wait_until(
        self, ask: Callable[[], Any], what: str, *, limit_s: float = WAIT_LIMIT_S
    ) -> Any:
        """What `ask` returns once it is true."""
        deadline = time.monotonic() + limit_s
        while True:
            value = ask()
            if value:
                return value
            if time.monotonic() > deadline:
                page = self.run("return document.body.innerText")
                raise AssertionError(f"not within {limit_s:g} s: {what}\n{page}\n{self.console()}")
            time.sleep(POLL_S)

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self.command("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int) -> None:
        """The page's size in CSS pixels, smaller than a window could be."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def scheme(self, name: str) -> None:
        """Whether the user prefers `light` or `dark`."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.devtools("Emulation.setEmulatedMedia", features=[feature])

    def console(self) -> list[str]:
        """Errors and warnings of the console since the last call."""
        entries = self.command("POST", "/se/log", {"type": "browser"})
        return [e["message"] for e in entries if e["level"] in ("SEVERE", "WARNING")]


def _value(response: httpx.Response) -> Any:
    value = response.json()["value"]
    if response.status_code != httpx.codes.OK:
        raise BrowserError(f"{value['error']}: {value['message']}")
    return value


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser until the block ends; nothing of it is left then.

    Args:
        folder: takes its profile and the driver's log.
    """
    binary = _binary()
    assert binary is not None, unavailable()
    with _driver(folder / "chromedriver.log") as http:
        options = {
            "binary": binary,
            "args": [*ARGUMENTS, f"--user-data-dir={folder / 'profile'}"],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = _value(http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}))
        found = Browser(http, made["sessionId"])
        try:
            yield found
        finally:
            found.command("DELETE", "")


@contextmanager
def _driver(log: Path) -> Iterator[httpx.Client]:
    """A driver in a session of its own, on a port that it alone listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [DRIVER, f"--port={port}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=COMMAND_LIMIT_S, trust_env=False
        ) as http:
            deadline = time.monotonic() + START_LIMIT_S
            while not _answers(http):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(POLL_S)
            yield http
    finally:
        tree = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_LIMIT_S)
        _, alive = psutil.wait_procs(tree, timeout=STOP_LIMIT_S)
        for child in alive:
            os.kill(child.pid, signal.SIGKILL)


def _answers(http: httpx.Client) -> bool:
    try:
        return bool(_value(http.get("/status"))["ready"])
    except httpx.TransportError:
        return False
