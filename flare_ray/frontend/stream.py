"""Demultiplexing of an engine's output: one inbox per open request (channel (b)).

An inbox coalesces: whatever arrived since its last read is handed out together, so that a slow
client costs one larger chunk instead of many small ones. There is no timer: the first delta is
handed out as soon as it arrives.

Nearly every delta finds its reader waiting, with all that came before written. Such a one may go
past the reader (`Inbox.bypass`), which saves waking a task for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from flare_ray.contracts.messages import Admitted, Delta, Failed, Finished, Heartbeat, StreamItem
from flare_ray.errors import FlareError, InvalidRequest, Overloaded, RankFailure

RequestItem = Admitted | Delta | Finished | Failed
Bypass = Callable[[Delta], bool]
"""Takes a delta to its end at once, or returns False and has done nothing: the reader gets it."""


class Inbox:
    """Items of one request, in order. One reader; writers on the reader's event loop.

    Attributes:
        heard: something has arrived.
        closed: the last item has.
        bypass: is offered every delta that finds the reader waiting; None = the reader gets all.
        bypassed: it took one.
    """

    def __init__(self) -> None:
        self._items: list[RequestItem] = []
        self._waiter: asyncio.Future[None] | None = None
        self.heard = False
        self.closed = False
        self.bypass: Bypass | None = None
        self.bypassed = False

    def put(self, item: RequestItem) -> None:
        """Append; anything after the first `Finished` or `Failed` is dropped, as it must be."""
        if self.closed:
            return
        self.heard = True
        waiter = self._waiter
        if waiter is not None and waiter.done():
            waiter = None
        if isinstance(item, Delta):
            if waiter is not None and self.bypass is not None:
                try:
                    if self.bypass(item):
                        self.bypassed = True
                        return
                except Exception as error:
                    # Of this request alone: raised where it is read.
                    waiter.set_exception(error)
                    return
        elif not isinstance(item, Admitted):
            self.closed = True
        self._items.append(item)
        if waiter is not None:
            waiter.set_result(None)

    async def take(self) -> list[RequestItem]:
        """Everything that has arrived, neighbouring deltas merged; waits while there is nothing."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items if len(items) == 1 else merge_deltas(items)


class StreamTable:
    """Open requests of one consumer by their id on the wire."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}

    def __len__(self) -> int:
        return len(self._inboxes)

    def register(self, request_id: str) -> Inbox:
        """A new inbox.

        Raises:
            InvalidRequest: status 409: a live request has this id.
        """
        if request_id in self._inboxes:
            raise duplicate_request(request_id)
        inbox = self._inboxes[request_id] = Inbox()
        return inbox

    def forget(self, request_id: str) -> None:
        """Drop an inbox; late items for it are ignored from now on."""
        self._inboxes.pop(request_id, None)

    def deliver(self, items: Iterable[StreamItem]) -> None:
        """Hand items to their inboxes; items of forgotten (cancelled) requests are dropped."""
        for item in items:
            if not isinstance(item, Heartbeat):
                inbox = self._inboxes.get(item.request_id)
                if inbox is not None:
                    inbox.put(item)

    def open_ids(self) -> tuple[str, ...]:
        """Ids of the requests that have an inbox."""
        return tuple(self._inboxes)


def merge_deltas(items: list[RequestItem]) -> list[RequestItem]:
    """Join neighbouring deltas. A trim belongs to the last token of its own delta, so a delta that
    carries one is never followed by another inside the same merged delta."""
    merged: list[RequestItem] = []
    for item in items:
        last = merged[-1] if merged else None
        if isinstance(item, Delta) and isinstance(last, Delta) and last.trim_bytes == 0:
            merged[-1] = Delta(
                last.request_id,
                last.tokens + item.tokens,
                item.trim_bytes,
                last.scores + item.scores,
                item.prompt_scores or last.prompt_scores,
                last.sources + item.sources,
            )
        else:
            merged.append(item)
    return merged


def duplicate_request(request_id: str) -> InvalidRequest:
    """The refusal of a second live request with the same id."""
    return InvalidRequest(
        f"a request with the id {request_id!r} is still running; use another X-Request-ID or none",
        param="X-Request-ID",
        code="duplicate_request_id",
        status=409,
    )


def failure_error(item: Failed) -> FlareError:
    """The exception that says the same as `item`, for a request whose response has not begun."""
    if item.code == "overloaded":
        return Overloaded(
            item.message,
            retry_after_s=item.retry_after_s or 1.0,
            status=item.status if item.status in (429, 503) else 429,
        )
    if 400 <= item.status < 500 and item.code != "rank_failure":
        return InvalidRequest(item.message, param=item.param, code=item.code, status=item.status)
    if item.code == "rank_failure":
        return RankFailure(item.message, rank=-1, round_id=-1)
    return FlareError(item.message)
