"""`flare-ray chat`: a conversation in the terminal with a running server.

A plain HTTP client of the OpenAI interface: it knows nothing of engines, and works against any
server that speaks it. Ctrl-C cancels the answer that is being written (the connection is closed,
which frees everything behind it), not the conversation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from flare_ray.errors import FlareError

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 300.0
"""Longest silence inside an answer: a queued request waits for its slot without a byte."""
COMMANDS = "/reset forgets the conversation, /quit leaves, Ctrl-C cancels an answer"

# Everything below U+0020 except newline and tab, DEL, and the C1 controls: a model's text must not
# move the cursor, change colours or set the window's title.
_CONTROLS = {
    code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in {"\n", "\t"}
}


class Piece(msgspec.Struct, frozen=True):
    """Part of an answer."""

    kind: Literal["reasoning", "content"]
    text: str


class Answer(msgspec.Struct):
    """What one exchange produced so far; filled while it streams.

    Attributes:
        usage: the server's token counts, empty until its last message.
        first_piece_s: seconds until the first piece; None before it.
    """

    content: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = {}
    first_piece_s: float | None = None
    total_s: float = 0.0


class ChatClient:
    """A conversation with one model of one server.

    Args:
        base_url: server address, with or without `/v1`.
        model: name to ask for; None = the first that the server lists.
        settings: further request fields (`temperature`, `max_tokens`, ...).
        system: system message; None = none.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        settings: Mapping[str, Any] | None = None,
        system: str | None = None,
    ) -> None:
        import httpx

        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._settings = dict(settings or {})
        self._system = system
        self._messages: list[dict[str, Any]] = []
        self._http = httpx.Client(
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S), trust_env=False
        )
        self.model = model or ""
        self.reset()

    def connect(self) -> str:
        """The model's name; asks the server unless it was given.

        Raises:
            FlareError: no server answers, or it lists no model.
        """
        models = [entry["id"] for entry in self._get_json("/v1/models").get("data", [])]
        if not self.model:
            if not models:
                raise FlareError(f"{self._base_url} lists no model: wait until it is ready")
            self.model = str(models[0])
        elif self.model not in models:
            raise FlareError(
                f"{self._base_url} serves {', '.join(models) or 'no model'}, not {self.model!r}: "
                "change --model"
            )
        return self.model

    def reset(self) -> None:
        """Forget the conversation, keep the system message."""
        self._messages = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """The conversation so far."""
        return tuple(self._messages)

    def ask(self, text: str, answer: Answer) -> Generator[Piece, None, None]:
        """Send `text`, yield the answer's pieces as they arrive, and remember both.

        Closing the iterator (or Ctrl-C while it runs) closes the connection; what had arrived stays
        in the conversation as the assistant's turn. A refused question is forgotten.

        Args:
            answer: filled while the pieces arrive.
        Raises:
            FlareError: the server refuses the request, breaks off, or cannot be reached.
        """
        self._messages.append({"role": "user", "content": text})
        try:
            yield from self._stream(answer)
        finally:
            if answer.content:
                self._messages.append({"role": "assistant", "content": answer.content})
            else:
                self._messages.pop()

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._http.close()

    def _stream(self, answer: Answer) -> Iterator[Piece]:
        body = {
            "model": self.model,
            "messages": self._messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._settings,
        }
        started = time.monotonic()
        with self._request("POST", "/v1/chat/completions", body) as response:
            for chunk in self._chunks(response):
                for piece in _pieces(chunk, answer):
                    if answer.first_piece_s is None:
                        answer.first_piece_s = time.monotonic() - started
                    yield piece
                answer.total_s = time.monotonic() - started

    def _chunks(self, response: httpx.Response) -> Iterator[dict[str, Any]]:
        """Decoded messages of a server-sent event stream, until `[DONE]`."""
        import httpx

        try:
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise FlareError(f"the answer broke off: {_error_text(chunk)}")
                yield chunk
        except httpx.TransportError as error:
            raise FlareError(f"the answer broke off: {_transport(error)}") from error
        except json.JSONDecodeError as error:
            raise FlareError(f"{self._base_url} sent a malformed event: {error}") from error
        raise FlareError("the answer broke off: the stream ended without [DONE]")

    def _get_json(self, path: str) -> dict[str, Any]:
        with self._request("GET", path, None) as response:
            try:
                document = json.loads(response.read())
            except json.JSONDecodeError as error:
                raise FlareError(f"{self._base_url}{path} is no JSON: {error}") from error
        return document if isinstance(document, dict) else {}

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> _Opened:
        import httpx

        url = f"{self._base_url}{path}"
        try:
            request = self._http.build_request(method, url, json=body)
            response = self._http.send(request, stream=True)
            if response.status_code != httpx.codes.OK:
                text = _refusal(response.read(), response)
                response.close()
                raise FlareError(text)
        except httpx.InvalidURL as error:
            raise FlareError(f"--url {self._base_url!r} is no address: {error}") from error
        except httpx.UnsupportedProtocol as error:
            raise FlareError(
                f"--url {self._base_url!r} needs http:// or https:// in front"
            ) from error
        except httpx.TransportError as error:
            raise FlareError(
                f"no server answers at {self._base_url} ({_transport(error)}): start one with "
                "flare-ray serve, or change --url"
            ) from error
        return _Opened(response)


class _Opened:
    """A response that is closed at the end of its block, read or not."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    def __enter__(self) -> httpx.Response:
        return self._response

    def __exit__(self, *_exc: object) -> None:
        self._response.close()


def _pieces(chunk: Mapping[str, Any], answer: Answer) -> Iterator[Piece]:
    """Visible parts of one message; counts and reasons go to `answer`."""
    if chunk.get("usage"):
        answer.usage = chunk["usage"]
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning:
            yield Piece("reasoning", reasoning)
        if delta.get("content"):
            answer.content += delta["content"]
            yield Piece("content", delta["content"])
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def _error_text(document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error if error is not None else document)


def _refusal(body: bytes, response: httpx.Response) -> str:
    try:
        text = _error_text(json.loads(body))
    except json.JSONDecodeError:
        text = body.decode("utf-8", "replace")[:500]
    retry = response.headers.get("retry-after")
    return f"status {response.status_code}: {text}" + (f" (retry in {retry} s)" if retry else "")


def _transport(error: Exception) -> str:
    return str(error) or type(error).__name__


def printable(text: str) -> str:
    """`text` without control characters that a terminal would obey."""
    return text.translate(_CONTROLS)


def summary(answer: Answer) -> str:
    """One line of figures below an answer."""
    tokens = answer.usage.get("completion_tokens")
    if tokens is None:
        return ""
    parts = [f"{tokens} tokens"]
    if answer.first_piece_s is not None:
        parts.append(f"first after {answer.first_piece_s:.2f} s")
    if answer.total_s > 0:
        parts.append(f"{tokens / answer.total_s:.1f} tokens/s")
    if answer.finish_reason == "length":
        parts.append("cut at the token limit")
    return ", ".join(parts)


def run_chat(client: ChatClient, console: Console) -> None:
    """The terminal loop: read a line, stream its answer, until /quit or the end of input."""
    console.print(f"{printable(client.connect())}: {COMMANDS}", style="dim", markup=False)
    while True:
        try:
            line = console.input("[bold]> [/bold]").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n(/quit leaves)", style="dim")
            continue
        if line in {"/quit", "/exit"}:
            return
        if line == "/reset":
            client.reset()
            console.print("(forgotten)", style="dim")
        elif line.startswith("/"):
            console.print(f"no command {line.split()[0]!r}: {COMMANDS}", style="dim", markup=False)
        elif line:
            _exchange(client, console, line)


def _exchange(client: ChatClient, console: Console, line: str) -> None:
    """One question and its answer; a failure or Ctrl-C ends only this exchange."""
    answer = Answer()
    pieces = client.ask(line, answer)
    previous = ""
    try:
        for piece in pieces:
            if previous not in ("", piece.kind):
                console.print()
            previous = piece.kind
            console.print(
                printable(piece.text),
                end="",
                style="dim italic" if piece.kind == "reasoning" else "",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    except KeyboardInterrupt:
        console.print(" (cancelled)", style="yellow", end="")
    except FlareError as error:
        console.print(printable(f"error: {error}"), style="red", markup=False, end="")
    finally:
        pieces.close()
    console.print()
    console.print(summary(answer), style="dim", markup=False)
