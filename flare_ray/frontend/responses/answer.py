"""From output items to responses: whole, or as events.

    response.created, response.in_progress
    per item: response.output_item.added, its content as it grows, response.output_item.done
    response.completed | response.incomplete | response.failed

Events are numbered from 0. The whole answer is what the last event carries.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from flare_ray.contracts import messages
from flare_ray.contracts.messages import Delta, Finished
from flare_ray.frontend.client import EngineInfo, RequestStream
from flare_ray.frontend.openai.logprobs import ScoredTokens
from flare_ray.frontend.openai.prepare import Prepared
from flare_ray.frontend.openai.responses import TokenLogprob, encode
from flare_ray.frontend.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ToolCall,
)
from flare_ray.frontend.responses import records as r
from flare_ray.frontend.responses.requests import ResponseBody
from flare_ray.frontend.settings import ApiSettings
from flare_ray.frontend.sse import event
from flare_ray.frontend.stream import failure_error
from flare_ray.frontend.turn import Turn

Lifecycle = (
    type[r.Created] | type[r.InProgress] | type[r.Completed] | type[r.Truncated] | type[r.Failed]
)
"""Events about a response as a whole."""
Scores = Callable[[str], list[TokenLogprob]]


class ItemWriter:
    """Chat events in, item events out; keeps the whole items too.

    A message opens with its first letter that is no white space: what models write between
    reasoning and a call is layout.

    Args:
        scores: log-probabilities of the tokens that a piece of text begins to show; called with
            every piece, in order. None = nobody asked for them.
    """

    def __init__(self, unique_id: str, scores: Scores | None = None) -> None:
        self._unique_id = unique_id
        self._scores: Scores = scores or (lambda text: [])
        self._layout_scores: list[TokenLogprob] = []
        self._message_scores: list[TokenLogprob] = []
        self._open: type[r.MessageItem] | type[r.ReasoningItem] | None = None
        self._pieces: list[str] = []
        self._layout = ""
        self._number = 0
        self.items: list[r.Item] = []

    def write(self, events: Sequence[ChatEvent]) -> list[msgspec.Struct]:
        """Events of newly written output."""
        out: list[msgspec.Struct] = []
        for item in events:
            if isinstance(item, ToolCall):
                out += self._whole_call(item)
            elif isinstance(item, CallStart):
                out += self._start_call(item)
            elif isinstance(item, CallArguments):
                out.append(self._more_of_call(item))
            elif isinstance(item, CallEnd):
                out += self._end_call(item)
            elif isinstance(item, ContentText):
                out += self._content(item.text)
            else:
                self._scores(item.text)
                out += self._grow(r.ReasoningItem, item.text)
        return out

    def _content(self, text: str) -> list[msgspec.Struct]:
        scores = self._scores(text)
        if self._open is not r.MessageItem:
            self._layout += text
            self._layout_scores += scores
            if not self._layout.strip():
                return []
            text, self._layout = self._layout, ""
            scores, self._layout_scores = self._layout_scores, []
        return self._grow(r.MessageItem, text, scores)

    def close(self, status: str = "completed") -> list[msgspec.Struct]:
        """End the item that is open, if any."""
        if self._open is None:
            return []
        item = self._item("".join(self._pieces), status)
        part: r.Part = item.content[0]
        where = self._where()
        if isinstance(part, r.OutputText):
            done: msgspec.Struct = r.TextDone(
                sequence_number=self._next(), **where, text=part.text, logprobs=part.logprobs
            )
        else:
            done = r.ReasoningDone(sequence_number=self._next(), **where, text=part.text)
        out: list[msgspec.Struct] = [
            done,
            r.PartDone(sequence_number=self._next(), **where, part=part),
            r.ItemDone(sequence_number=self._next(), output_index=len(self.items), item=item),
        ]
        self.items.append(item)
        self._open = None
        return out

    def lifecycle(self, kinds: Sequence[Lifecycle], response: r.Response) -> list[msgspec.Struct]:
        """Events about the response as a whole."""
        return [kind(sequence_number=self._next(), response=response) for kind in kinds]

    def _grow(
        self,
        kind: type[r.MessageItem] | type[r.ReasoningItem],
        text: str,
        scores: Sequence[TokenLogprob] = (),
    ) -> list[msgspec.Struct]:
        out: list[msgspec.Struct] = []
        if self._open is not kind:
            out = self.close()
            self._open, self._pieces, self._message_scores = kind, [], []
            empty = self._item("", "in_progress")
            part: r.Part = empty.content[0]
            shell = msgspec.structs.replace(empty, content=[])
            out.append(
                r.ItemAdded(sequence_number=self._next(), output_index=len(self.items), item=shell)
            )
            out.append(r.PartAdded(sequence_number=self._next(), **self._where(), part=part))
        self._pieces.append(text)
        self._message_scores += scores
        number, where = self._next(), self._where()
        if kind is r.MessageItem:
            more = list(scores)
            return [*out, r.TextDelta(sequence_number=number, **where, delta=text, logprobs=more)]
        return [*out, r.ReasoningDelta(sequence_number=number, **where, delta=text)]

    def _whole_call(self, call: ToolCall) -> list[msgspec.Struct]:
        return [
            *self._start_call(CallStart(call.index, call.name)),
            self._more_of_call(CallArguments(call.index, call.arguments)),
            *self._end_call(CallEnd(call.index, complete=True)),
        ]

    def _start_call(self, call: CallStart) -> list[msgspec.Struct]:
        out, self._layout, self._layout_scores = self.close(), "", []
        index = len(self.items)
        item = r.CallItem(
            id=f"fc_{self._unique_id}_{index}",
            call_id=f"call_{self._unique_id}_{call.index}",
            name=call.name,
            arguments="",
            status="in_progress",
        )
        self.items.append(item)
        self._pieces = []
        return [*out, r.ItemAdded(sequence_number=self._next(), output_index=index, item=item)]

    def _more_of_call(self, more: CallArguments) -> msgspec.Struct:
        self._pieces.append(more.text)
        index = len(self.items) - 1
        return r.ArgumentsDelta(
            sequence_number=self._next(),
            item_id=self.items[index].id,
            output_index=index,
            delta=more.text,
        )

    def _end_call(self, end: CallEnd) -> list[msgspec.Struct]:
        index, arguments = len(self.items) - 1, "".join(self._pieces)
        begun = self.items[index]
        assert isinstance(begun, r.CallItem)
        status = "completed" if end.complete else "incomplete"
        item = msgspec.structs.replace(begun, arguments=arguments, status=status)
        self.items[index] = item
        where: dict[str, Any] = {"item_id": item.id, "output_index": index}
        out: list[msgspec.Struct] = []
        if end.complete:
            out.append(
                r.ArgumentsDone(
                    sequence_number=self._next(), **where, name=item.name, arguments=arguments
                )
            )
        done = r.ItemDone(sequence_number=self._next(), output_index=index, item=item)
        return [*out, done]

    def _item(self, text: str, status: str) -> r.MessageItem | r.ReasoningItem:
        if self._open is r.MessageItem:
            content = [r.OutputText(text=text, logprobs=list(self._message_scores))]
            return r.MessageItem(id=self._where()["item_id"], status=status, content=content)
        parts = [r.ReasoningPart(text=text)]
        return r.ReasoningItem(id=self._where()["item_id"], status=status, content=parts)

    def _where(self) -> dict[str, Any]:
        index = len(self.items)
        prefix = "msg" if self._open is r.MessageItem else "rs"
        return {"item_id": f"{prefix}_{self._unique_id}_{index}", "output_index": index}

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number


class ResponseAnswer:
    """The response to one prepared request of one choice."""

    def __init__(
        self, settings: ApiSettings, prepared: Prepared, body: ResponseBody, info: EngineInfo
    ) -> None:
        self._prepared = prepared
        self._turn = Turn(settings, prepared, by_token=body.scored)
        self._scored = ScoredTokens(settings.codec.token_bytes, wanted=body.scored)
        unique_id = prepared.response_id.removeprefix("resp_")
        self._writer = ItemWriter(unique_id, self._scores_of if body.scored else None)
        given, defaults = body.model_dump(by_alias=True), info.sampling_defaults
        text = given["text"] or {}
        self._shell = r.Response(
            id=prepared.response_id,
            created_at=int(time.time()),
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=settings.model_name,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": (given["reasoning"] or {}).get("effort"), "summary": None},
            temperature=_first(body.temperature, defaults.temperature),
            text={"format": _present(text.get("format") or {"type": "text"})},
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=_first(body.top_p, defaults.top_p),
            top_logprobs=body.top_logprobs or 0,
            usage=None,
            user=body.user,
            metadata=body.metadata or {},
        )

    async def whole(self, streams: Sequence[RequestStream]) -> bytes:
        """The JSON body.

        Raises:
            FlareError: the request failed.
        """
        finished = None
        async for item in streams[0]:
            if isinstance(item, messages.Failed):
                raise failure_error(item)
            if isinstance(item, Delta):
                self._write(item)
            else:
                finished = item
        assert finished is not None
        self._finish(finished)
        return encode(self._ended(finished))

    async def frames(self, streams: Sequence[RequestStream]) -> AsyncIterator[bytes]:
        """Server-sent events; those that are ready together come out as one piece."""
        yield _joined(self._writer.lifecycle((r.Created, r.InProgress), self._shell))
        async for item in streams[0]:
            if isinstance(item, messages.Failed):
                yield _joined(self._failed(item))
                return
            if isinstance(item, Delta):
                events = self._write(item)
            else:
                events = self._finish(item)
                kind = r.Truncated if item.reason == "length" else r.Completed
                events += self._writer.lifecycle((kind,), self._ended(item))
            if events:
                yield _joined(events)

    def more(self, delta: Delta) -> bytes:
        """See `AnswerWriter.more`."""
        return _joined(self._write(delta))

    def _write(self, delta: Delta) -> list[msgspec.Struct]:
        self._scored.add(delta)
        return self._writer.write(self._turn.add(delta))

    def _scores_of(self, text: str) -> list[TokenLogprob]:
        assert self._turn.token_trail is not None
        return self._scored.at(self._turn.token_trail.take(text))

    def _finish(self, finished: Finished) -> list[msgspec.Struct]:
        status = "incomplete" if finished.reason == "length" else "completed"
        return self._writer.write(self._turn.end()) + self._writer.close(status)

    def _ended(self, finished: Finished) -> r.Response:
        cut = finished.reason == "length"
        prompt, output = self._prepared.prompt_tokens[0], finished.completion_tokens
        return msgspec.structs.replace(
            self._shell,
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details=r.Incomplete("max_output_tokens") if cut else None,
            output=self._writer.items,
            usage=r.Usage(
                input_tokens=prompt,
                input_tokens_details=r.InputTokensDetails(cached_tokens=finished.cached_tokens),
                output_tokens=output,
                output_tokens_details=r.OutputTokensDetails(self._turn.reasoning_tokens),
                total_tokens=prompt + output,
            ),
        )

    def _failed(self, item: messages.Failed) -> list[msgspec.Struct]:
        events = self._writer.close("incomplete")
        code = "rate_limit_exceeded" if item.status == 429 else "server_error"
        response = msgspec.structs.replace(
            self._shell,
            status="failed",
            error=r.Failure(code, item.message),
            output=self._writer.items,
        )
        return events + self._writer.lifecycle((r.Failed,), response)


def _joined(events: Sequence[msgspec.Struct]) -> bytes:
    return b"".join(event(e) for e in events)


def _first(given: float | None, default: float) -> float:
    return default if given is None else given


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
