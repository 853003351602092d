"""After every test of a suite that imports this fixture, the books of its controllers add up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flare_ray.controller.loop import Controller


@pytest.fixture(autouse=True)
def books_add_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs `Controller.check_integrity` on every controller that the test has made.

    Left out are those that a failure has stopped, as their requests are cut off anywhere, and those
    whose loop still runs in another thread, which alone may look.
    """
    made: list[Controller] = []
    looping: list[Controller] = []
    start, run = Controller.__init__, Controller.run

    def noting_start(self: Controller, *args: object, **fields: object) -> None:
        start(self, *args, **fields)  # type: ignore[arg-type]
        made.append(self)

    def noting_run(self: Controller) -> None:
        looping.append(self)
        run(self)
        looping.remove(self)

    monkeypatch.setattr(Controller, "__init__", noting_start)
    monkeypatch.setattr(Controller, "run", noting_run)
    yield
    for controller in made:
        if not controller.stats().fatal and controller not in looping:
            controller.check_integrity()
