"""A whole output as one of xgrammar's structural tags: reasoning, then calls or the answer.

Only free text is left to the library, which knows how to end it at a tag wherever the tag begins
inside a token; everything else is EBNF of our own (`controller.grammar`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flare_ray.contracts.grammar import CallSyntax, GrammarSpec
from flare_ray.controller.grammar.answers import answer_ebnf
from flare_ray.controller.grammar.calls import Either, Fixed, Free, Piece, Written, call_pieces
from flare_ray.errors import InvalidRequest

Format = dict[str, Any]


def structural_tag(spec: GrammarSpec) -> Format:
    """The tag of `spec`.

    Raises:
        InvalidRequest: a part of it cannot be enforced; `param` names the part.
    """
    return {"type": "structural_tag", "format": _sequence([*_reasoning(spec), _body(spec)])}


def _body(spec: GrammarSpec) -> Format:
    if not spec.tools:
        if spec.kind == "none":
            raise InvalidRequest("calls are required and no function is declared", param="tools")
        return _text() if spec.kind == "text" else _grammar(answer_ebnf(spec))
    if spec.syntax is None:
        raise InvalidRequest("this model has no tool calls", param="tools")
    calls = [_call(spec, spec.syntax, place) for place in range(len(spec.tools))]
    if spec.syntax.block_open:
        calls = [_run(calls, spec.syntax, parallel=spec.parallel)]
    if spec.calls == "optional" and spec.kind == "text":
        return {
            "type": "triggered_tags",
            "triggers": [spec.syntax.opening],
            "tags": calls,
            "stop_after_first": not spec.parallel,
        }
    some = _either(calls)
    if spec.parallel and not spec.syntax.block_open:
        some = {"type": "plus", "content": some}
    if spec.calls == "required":
        return some
    return _either([some, _grammar(answer_ebnf(spec))])


def _run(calls: list[Format], syntax: CallSyntax, *, parallel: bool) -> Format:
    """Calls on lines of their own, in the tags around them."""
    line = _sequence([_either(calls), _fixed("\n")])
    lines: Format = {"type": "plus", "content": line} if parallel else line
    return _tag(syntax.block_open + "\n", lines, syntax.block_close)


def _reasoning(spec: GrammarSpec) -> list[Format]:
    if spec.reasoning == "none":
        return []
    # A call inside reasoning would end it (`frontend.parsers.chat`).
    excludes = [spec.syntax.opening] if spec.tools and spec.syntax is not None else []
    opening = spec.reasoning_open if spec.reasoning == "optional" else ""
    tag = _tag(opening, _text(excludes), spec.reasoning_close)
    return [tag if spec.reasoning == "open" else {"type": "optional", "content": tag}]


def _call(spec: GrammarSpec, syntax: CallSyntax, place: int) -> Format:
    try:
        pieces = call_pieces(spec.tools[place], syntax)
    except InvalidRequest as error:
        param = f"tools[{place}].function.parameters"
        message = f"{param}: {error}"
        raise InvalidRequest(message, param=param, code=error.code) from error
    first, last = pieces[0], pieces[-1]
    assert isinstance(first, Fixed) and isinstance(last, Fixed)
    return _tag(first.text, _sequence(_pieces(pieces[1:-1])), last.text)


def _pieces(pieces: Sequence[Piece]) -> list[Format]:
    formats: list[Format] = []
    for piece in pieces:
        if isinstance(piece, Fixed):
            formats.append(_fixed(piece.text))
        elif isinstance(piece, Written):
            formats.append(_grammar(piece.ebnf))
        elif isinstance(piece, Free):
            formats.append(_tag("", _text(), piece.end))
        elif isinstance(piece, Either):
            formats.append(_either([_sequence(_pieces(option)) for option in piece.options]))
        else:
            formats.append({"type": "optional", "content": _sequence(_pieces(piece.pieces))})
    return formats


def _sequence(elements: list[Format]) -> Format:
    if not elements:
        return _fixed("")
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _either(elements: list[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _fixed(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _text(excludes: Sequence[str] = ()) -> Format:
    return {"type": "any_text", "excludes": list(excludes)}


def _grammar(ebnf: str) -> Format:
    return {"type": "grammar", "grammar": ebnf}
