"""What somebody does at the page and sees there; the tests of the page share it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from flare_ray.metrics import names
from flare_ray.metrics.names import Series
from tests.support.browser import Browser

ENTER, ESCAPE = "\ue007", "\ue00c"


def opened(window: Browser, url: str) -> Browser:
    """A page just loaded by somebody new."""
    window.resize(1280, 900)
    window.scheme("light")
    window.open(f"{url}/ui/")
    window.run("sessionStorage.clear()")
    window.console()
    window.open(f"{url}/ui/")
    window.wait("return document.querySelectorAll('#model option').length")
    return window


def metrics_of(values: Mapping[tuple[Series | str, ...], float]) -> Callable[[], Awaitable[str]]:
    """A `metrics` method that tells of series, each with the values of its labels."""

    async def metrics() -> str:
        lines = []
        for (series, *labels), value in values.items():
            total = "_total" if series.kind is names.Kind.COUNTER else ""
            named = zip(("engine", *series.labels), ("e", *labels), strict=True)
            inner = ",".join(f'{name}="{label}"' for name, label in named)
            lines.append(f"{series.name}{total}{{{inner}}} {value}")
        return "\n".join(["# HELP up x", "up 1", *lines, ""])

    return metrics


def say(page: Browser, text: str) -> None:
    """Write a message and send it."""
    page.type("#message", text + ENTER)


def answered(page: Browser, count: int = 1) -> None:
    """Wait for so many whole answers."""
    page.wait("return document.querySelectorAll('.figures').length >= arguments[0]", count)


def told(page: Browser) -> str:
    """Wait for an error, and read it."""
    page.wait("return !document.querySelector('#problem').hidden")
    return page.text("#problem")


def cells(page: Browser) -> dict[str, str]:
    """Texts of the status by the names of their rows."""
    pairs = page.run(
        "return [...document.querySelectorAll('#figures tr')]"
        ".map((row) => [row.children[0].textContent, row.children[1].textContent])"
    )
    return dict(pairs)


def spans(page: Browser, box: str) -> list[tuple[str, str]]:
    """(source, text) of the pieces in a box."""
    found = page.run(
        "return [...document.querySelectorAll(`${arguments[0]} [data-source]`)]"
        ".map((e) => [e.dataset.source, e.textContent])",
        box,
    )
    return [tuple(pair) for pair in found]


def calm(page: Browser, *statuses: int) -> None:
    """Nothing stands in the console but that responses had these statuses."""
    messages = page.console()
    others = [m for m in messages if not any(f"status of {status}" in m for status in statuses)]
    assert not others
